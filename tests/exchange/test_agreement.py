"""Agreement among real ranks: the same bytes everywhere, and differences that every rank names in the same words."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from anabranch import Bucket, CollectiveError, DisagreementError, Network, Plan, TensorSpec, Trace
from anabranch.exchange.agreement import agree_on, all_or_none, check_same, from_all_ranks, from_rank_0
from anabranch.exchange.groups import backend_of
from anabranch.exchange.interface import Group
from ranks import Case, cases_on_ranks, group_timeout, on_ranks

PLAN = Plan((Bucket(("a", "b")), Bucket(("ü",), lane=1, collective="bf16")))
TRACE = Trace((TensorSpec("a", 3, 4, 0.1, "float32", 1e-9), TensorSpec("b", 5, 2, 1 / 3)), 0.1, {"model": "tiny"})
NETWORK = Network.measured(3, [(1 << k, 1e-4 + (1 << k) * 1e-9, 1e-5) for k in range(10, 20)])


Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def among_three() -> Answers:
    """What three ranks answered to everything below, in one launch."""
    cases: dict[str, Case] = {
        "bytes": (bytes_travel,),
        "differences": (differences,),
        "nouns": (nouns_travel,),
        "wrong kind": (wrong_kind,),
        "one fails": (one_fails,),
        "a part": (a_part_of_the_world,),
    }
    return cases_on_ranks(cases, 3)


def everyone() -> Group:
    group = dist.group.WORLD
    assert group is not None
    return group


def error_of(what: str, lines: list[str]) -> str:
    """The message of the DisagreementError that check_same raises with these arguments; empty if it raises none."""
    try:
        check_same(what, lines, everyone())
    except DisagreementError as error:
        return str(error)
    return ""


def bytes_travel(rank: int) -> dict[str, Any]:
    group = everyone()
    return {
        "rank 0's": from_rank_0(b"zero \x00\xff" if rank == 0 else b"ignored", group).hex(),
        "nothing": from_rank_0(b"" if rank == 0 else b"x", group).hex(),
        "none": from_rank_0(None, group).hex(),
        "large": len(from_rank_0(bytes(300_000) if rank == 0 else None, group)),
        "all": [part.hex() for part in from_all_ranks(bytes([rank]) * rank, group)],
        "all empty": [part.hex() for part in from_all_ranks(b"", group)],
        "trailing zeros": [part.hex() for part in from_all_ranks(b"\0" * (2 - rank), group)],
    }


def test_bytes_arrive_as_they_were_sent(among_three: Answers) -> None:
    for answer in among_three["bytes"]:
        assert answer == {
            "rank 0's": b"zero \x00\xff".hex(),
            "nothing": "",
            "none": "",
            "large": 300_000,
            "all": ["", "01", "0202"],
            "all empty": ["", "", ""],
            "trailing zeros": ["0000", "00", ""],
        }


def differences(rank: int) -> dict[str, str]:
    return {
        "same": error_of("the model", ["a", "b"]),
        "both empty": error_of("the model", []),
        "one line": error_of("the model", ["a", f"b{rank // 2}", f"c{rank}"]),
        "shorter": error_of("the model", ["a", "b"][: 2 - rank // 2]),
        "empty": error_of("the model", ["a"] * (rank != 1)),
        "only rank 0": error_of("the settings", [str(rank == 0)]),
        "hostile": error_of("the model", ["a\nb" if rank else "a", "b"]),
    }


def test_the_first_difference_is_named_on_every_rank(among_three: Answers) -> None:
    first, *others = among_three["differences"]
    assert all(other == first for other in others)
    assert first["same"] == first["both empty"] == ""
    assert "the model is not the same on all ranks" in first["one line"]
    # Rank 1 differs from rank 0 in its third item, rank 2 in its second: the lowest rank that differs is quoted.
    assert "rank 0 has 'c0' (item 2), rank 1 has 'c1' (item 2); ranks 1, 2 differ" in first["one line"]
    assert "rank 0 has 'b' (item 1), rank 2 has nothing after item 0; ranks 2 differ" in first["shorter"]
    assert "rank 1 has '' (item 0)" in first["empty"]
    assert "the settings" in first["only rank 0"] and "ranks 1, 2 differ from rank 0" in first["only rank 0"]
    assert first["hostile"]


def nouns_travel(rank: int) -> list[bool]:
    group = everyone()
    other = Plan((Bucket(("other",)),))
    return [
        agree_on(Plan, PLAN if rank == 0 else other, group) == PLAN,
        agree_on(Plan, PLAN if rank == 0 else None, group).fingerprint == PLAN.fingerprint,
        agree_on(Trace, TRACE if rank == 0 else None, group) == TRACE,
        agree_on(Network, NETWORK if rank == 0 else None, group) == NETWORK,
    ]


def test_rank_0s_nouns_arrive_to_the_last_bit(among_three: Answers) -> None:
    assert among_three["nouns"] == [[True] * 4] * 3


def wrong_kind(rank: int) -> str:
    with pytest.raises(DisagreementError) as caught:
        agree_on(Plan, TRACE if rank == 0 else None, everyone())  # type: ignore[type-var]
    return str(caught.value)


def test_another_noun_than_expected_is_refused_everywhere(among_three: Answers) -> None:
    assert among_three["wrong kind"] == ["rank 0 sent a Trace where a plan was expected"] * 3


def a_part_of_the_world(rank: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    assert isinstance(group, dist.ProcessGroup)
    sent = [part.decode() for part in from_all_ranks(f"rank {rank}".encode(), group)]
    return [from_rank_0(f"from {rank}".encode(), group).decode(), *sent]


def test_ranks_are_counted_within_the_group(among_three: Answers) -> None:
    assert among_three["a part"] == [None, *[["from 1", "rank 1", "rank 2"]] * 2]


def in_a_mesh(rank: int) -> list[Any]:
    """Two rows of three ranks; one rank differs along its column and its row, and then fails."""
    columns = [dist.new_group(ranks) for ranks in ([0, 3], [1, 4], [2, 5])]
    rows = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3, 4, 5])]
    mesh = columns[rank % 3], rows[rank // 3]
    found: list[Any] = [
        [part.decode() for part in from_all_ranks(b"\0".join([b"%d" % rank] * rank).hex().encode(), *mesh)]
    ]
    with pytest.raises(DisagreementError) as caught:
        check_same("the lines", ["same", "other" if rank == 4 else "same"], *mesh)
    found.append(str(caught.value))
    with pytest.raises((DisagreementError, ArithmeticError)) as failed, all_or_none("building", *mesh):
        if rank == 4:
            raise ArithmeticError("no 4")
    return [*found, str(failed.value)]


def test_all_ranks_of_a_mesh_are_asked_at_once() -> None:
    """Dimension by dimension, ranks that see no difference along the first would wait for those that do."""
    answers = on_ranks(in_a_mesh, 6)
    for rank, (sent, differ, failed) in enumerate(answers):
        assert sent == [b"\0".join([b"%d" % other] * other).hex() for other in range(6)]
        assert "rank 0 has 'same' (item 1), rank 4 has 'other' (item 1); ranks 4 differ from rank 0" in differ
        assert failed == (
            "no 4" if rank == 4 else "building failed on ranks 4, and not here; rank 4: ArithmeticError('no 4')"
        )


def one_fails(rank: int) -> list[str]:
    """What ranks say where none fails, some do, and all do."""
    said = []
    for failing in ([], [1], [0, 2], [0, 1, 2]):
        try:
            with all_or_none("building", everyone()):
                if rank in failing:
                    raise ArithmeticError(f"no {rank}")
            said.append("fine")
        except (ArithmeticError, DisagreementError) as error:
            said.append(str(error))
    return said


def test_what_fails_on_one_rank_fails_on_all(among_three: Answers) -> None:
    answers = among_three["one fails"]
    assert [answer[0] for answer in answers] == ["fine"] * 3
    told = "building failed on ranks 1, and not here; rank 1: ArithmeticError('no 1')"
    assert [answer[1] for answer in answers] == [told, "no 1", told]
    assert [answer[2] for answer in answers][1].startswith("building failed on ranks 0, 2, and not here; rank 0")
    assert [answer[3] for answer in answers] == ["no 0", "no 1", "no 2"]


def without_rank_1(rank: int) -> str:
    """What rank 0 is told when rank 1 does not answer within the group's timeout."""
    group = dist.new_group(timeout=group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)  # which connects it
    backend_of(group, "cpu").set_timeout(timedelta(seconds=1))
    if rank == 1:
        return ""
    with pytest.raises(CollectiveError) as failed:
        from_all_ranks(b"still here", group)
    return str(failed.value)


def test_a_rank_that_does_not_answer_is_an_error_with_advice() -> None:
    said, _ = on_ranks(without_rank_1, 2)
    assert "ranks could not agree" in said and "look for the first error among all ranks" in said
