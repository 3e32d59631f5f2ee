"""comm_state_dict() of DataParallel with residuals: resuming is bit-exact, and no residual is lost or mixed up."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import anabranch as ab
from parallel.given_gradients import (
    COLUMNS,
    ROWS,
    GivenGradients,
    computed,
    fresh,
    fresh_of,
    gradients,
    one_step,
    residuals_of,
    state_after_six_steps,
    two_buckets,
)
from ranks import cases_on_ranks, on_ranks

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, cut: int | None, folder: str) -> torch.Tensor:
    """What is applied in steps 8 … 13; with ``cut``, a fresh wrapper takes over there, from torch's checkpoint."""
    model, parallel = fresh(two_buckets(0.1))
    applied = []
    for step in range(14):
        if step == cut:
            save({"comm": ab.CommState(parallel)}, checkpoint_id=folder)
            parallel.close()
            model, parallel = fresh(two_buckets(0.1))
            load({"comm": ab.CommState(parallel, folder)}, checkpoint_id=folder)
        applied.append(one_step(model, parallel, step, rank))
    parallel.close()
    return torch.stack(applied[8:])


def test_resuming_from_torchs_checkpoint_is_bit_exact(tmp_path: Path) -> None:
    whole, cut = on_ranks(resumed, 4, None, ""), on_ranks(resumed, 4, 8, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)) and whole[0].any()


def from_a_dict(rank: int, cut: int | None, wire: str, wire_after: str) -> torch.Tensor:
    """The same by ``comm_state_dict``; the wire may be another one afterwards."""
    model, parallel = fresh(two_buckets(0.1), wire=wire)
    applied = []
    for step in range(14):
        if step == cut:
            kept = parallel.comm_state_dict()
            parallel.close()
            model, parallel = fresh(two_buckets(0.1), wire=wire_after)
            parallel.load_comm_state_dict(kept)
        applied.append(one_step(model, parallel, step, rank))
    parallel.close()
    return torch.stack(applied[8:])


WIRES = ("fp32", "bf16", "int8")


def test_resuming_with_its_state_is_bit_exact(found: dict[str, list[Any]]) -> None:
    for wire in WIRES:
        whole, cut = found[f"whole, {wire}"], found[f"cut, {wire}"]
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)) and whole[0].any(), wire


def test_another_wire_resumes_the_same_state(found: dict[str, list[Any]]) -> None:
    answers = found["another wire"]
    assert torch.equal(answers[0], answers[1]) and answers[0].any()


def saved(rank: int, kind: str, folder: str) -> torch.Tensor:
    model, parallel = fresh_of(kind)
    for step in range(9):
        one_step(model, parallel, step, rank)
    save({"comm": ab.CommState(parallel)}, checkpoint_id=folder)
    left = residuals_of(parallel)
    parallel.close()
    return left


def taken_over(rank: int, kind: str, folder: str) -> dict[str, Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("anabranch").addHandler(handler)
    model, parallel = fresh_of(kind)
    load({"comm": ab.CommState(parallel, folder)}, checkpoint_id=folder)
    before = residuals_of(parallel)
    applied = one_step(model, parallel, 9, rank)
    after = residuals_of(parallel)
    parallel.close()
    return {"before": before, "applied": applied, "after": after, "said": said}


@pytest.mark.parametrize(("kind", "ranks", "now"), [("oktopk:0.1", 4, 2), ("int4", 3, 2), ("int4", 2, 3)])
def test_another_number_of_ranks_takes_over_the_sum_and_says_so(
    kind: str, ranks: int, now: int, tmp_path: Path
) -> None:
    old = on_ranks(saved, ranks, kind, str(tmp_path))
    entries = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {key.split("/")[1] for key in entries} == {f"rank{rank}" for rank in range(ranks)}
    assert all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()), "nothing is pickled"
    answers = on_ranks(taken_over, now, kind, str(tmp_path))
    total = torch.stack([piece.double() for piece in old]).sum(dim=0)
    assert total.abs().max() > 0.1
    torch.testing.assert_close(sum(one["before"].double() for one in answers), total, rtol=1e-5, atol=1e-5)
    accounted = now * answers[0]["applied"].double() + sum(one["after"].double() for one in answers)
    torch.testing.assert_close(accounted, total + computed(now, 9, 10), rtol=1e-5, atol=1e-5)
    said = f"residuals of {ranks} ranks were loaded on {now}: their sum is conserved"
    assert any(said in line for line in answers[0]["said"])


def no_such_entry(rank: int, folder: str) -> str:
    save({"other": torch.ones(3)}, checkpoint_id=folder)
    _, parallel = fresh()
    try:
        ab.CommState(parallel, folder).state_dict()
    except ValueError as error:
        return str(error)
    finally:
        parallel.close()
    return "no error"


def test_a_checkpoint_without_the_state_is_named(tmp_path: Path) -> None:
    for message in on_ranks(no_such_entry, 2, str(tmp_path)):
        assert "has no entry anabranch/rank" in message and "load it without CommState" in message


def alone(rank: int, states: list[dict[str, Any]]) -> dict[str, Any]:
    """One rank goes on where two have state_after_six_steps; its first step is not finite."""
    model, parallel = fresh()
    parallel.load_comm_state_dict(*states)
    model.zero_grad()
    one, other = gradients(0, 0)
    parallel(one * float("inf"), other).backward()
    still = residuals_of(parallel)
    applied = one_step(model, parallel, 0, 0)
    again = one_step(model, parallel, 1, 0)
    left = residuals_of(parallel)
    parallel.close()
    return {"still": still, "applied": applied, "again": again, "left": left}


def test_one_rank_goes_on_where_several_stopped(found: dict[str, list[Any]]) -> None:
    states = found["six steps"]
    answers = on_ranks(alone, 1, states)[0]
    sums = [sum(state["residuals"][name] for state in states).view(ROWS, COLUMNS) for name in ("first", "second")]
    assert torch.equal(answers["still"], torch.stack(sums)), "what was not finite sent nothing"
    torch.testing.assert_close(answers["applied"], torch.stack(sums) + computed(1, 0, 1).float())
    torch.testing.assert_close(answers["again"], computed(1, 1, 2).float())
    assert not answers["left"].any()


# ------------------------------------------------------------------------------------------------------- disagreement


def mixed_up(rank: int, states: list[Any], planned: bool) -> str:
    """What a rank says that was given ``states[rank]``, or nothing."""
    model, parallel = fresh(two_buckets(0.1) if planned else None)
    try:
        if states[rank] is not None:
            parallel.load_comm_state_dict(states[rank])
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    try:
        one_step(model, parallel, 0, rank)
    except ab.DisagreementError as error:
        return said + str(error)
    finally:
        parallel.close()
    return said + "no error"


def test_ranks_that_load_different_states_get_an_error_and_do_not_hang(found: dict[str, list[Any]]) -> None:
    states = found["six steps"]
    older = {**states[1], "step": 4, "steps_trained": 4}
    given = {"none": [states[0], None], "older": [states[0], older], "the same": [states[0], states[0]], "own": states}
    for planned in (True, False):
        said = cases_on_ranks({name: (mixed_up, loaded, planned) for name, loaded in given.items()}, 2)
        for message in said["none"]:
            assert "load_comm_state_dict()" in message and "'step 6 of 2 ranks" in message and "'nothing'" in message
        for message in said["older"]:
            assert "step 6 of 2 ranks" in message and "step 4 of 2 ranks" in message
        assert "give its own" in said["the same"][1]
        assert all("a state that was refused" in message for message in said["the same"])
        assert said["own"] == ["no error"] * 2


def loaded_late(rank: int) -> str:
    model, parallel = fresh()
    one_step(model, parallel, 0, rank)
    try:
        parallel.load_comm_state_dict(parallel.comm_state_dict())
    except RuntimeError as error:
        return str(error)
    finally:
        parallel.close()
    return "no error"


def test_loading_after_the_first_step_is_refused(found: dict[str, list[Any]]) -> None:
    assert all("load before the first" in message for message in found["loaded late"])


def no_state_without_compression(rank: int) -> str:
    parallel = ab.DataParallel(GivenGradients())
    assert parallel.comm_state_dict() == {}
    parallel.load_comm_state_dict({})
    try:
        parallel.load_comm_state_dict({"version": 1})
    except ValueError as error:
        return str(error)
    finally:
        parallel.close()
    return "no error"


def test_state_of_a_compression_needs_the_compression(found: dict[str, list[Any]]) -> None:
    answers = found["without compression"] + on_ranks(no_state_without_compression, 1)
    assert all("compress=" in message for message in answers)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            **{f"whole, {wire}": (from_a_dict, None, wire, wire) for wire in WIRES},
            **{f"cut, {wire}": (from_a_dict, 8, wire, wire) for wire in WIRES},
            "another wire": (from_a_dict, 8, "int8", "fp32"),
            "six steps": (state_after_six_steps,),
            "loaded late": (loaded_late,),
            "without compression": (no_state_without_compression,),
        },
        2,
    )
