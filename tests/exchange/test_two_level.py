"""Two-level exchanges: shares and back, averages on nodes of every shape, and stages that keep their order."""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import anabranch as ab
from anabranch import Bucket, Plan
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import collectives_for, settings_of
from anabranch.exchange.dense import DenseExchanges
from anabranch.exchange.interface import Group, Steps
from anabranch.exchange.lanes import Lanes, Message
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.exchange.shares import Share
from anabranch.exchange.two_level import division
from anabranch.values.nodes import Nodes
from exchange.values import values_of_ranks
from ranks import RankError, cases_on_ranks, group_timeout, on_ranks

CPU = torch.device("cpu")
TWO_BY_TWO = Nodes.of_size(4, 2)


# --------------------------------------------------------------------------------------------------------- shares


@given(st.integers(1, 5), st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), min_size=1, max_size=5))
def test_a_bucket_is_divided_by_parameter_and_put_together_again(places: int, numels: list[int]) -> None:
    found = division(places, tuple(numels))
    bucket = torch.arange(sum(numels))
    shares: list[list[int]] = [[] for _ in range(places)]
    first = 0
    for numel in numels:
        for place, share in enumerate(shares):
            share += range(first + place * numel // places, first + (place + 1) * numel // places)
        first += numel
    assert found.to_places(bucket).tolist() == [element for share in shares for element in share]
    assert list(found.shares) == [len(share) for share in shares]
    longest = max(found.shares)
    rows = torch.tensor([share + [-1] * (longest - len(share)) for share in shares], dtype=bucket.dtype)
    whole = torch.full_like(bucket, -2)
    found.to_parameters(rows, whole)
    assert torch.equal(whole, bucket)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_every_element_once_and_as_equal_as_can_be(numel: int, parts: int) -> None:
    shares = [Share(parts, number).of(numel) for number in range(parts)]
    assert [element for share in shares for element in share] == list(range(numel))
    assert {len(share) for share in shares} <= {numel // parts, -(-numel // parts)}


# ------------------------------------------------------------------------------------------------------- averages

SIZES = [[1], [1, 1, 1], [0, 3], [7, 0, 1, 12], [64, 257, 1, 5]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGE = 60_000.0  # of 16 bits: two of them are infinite
SHAPES = {
    "2 x 2": TWO_BY_TWO,
    "2 x 2, interleaved": Nodes(((0, 2), (1, 3))),
    "3 x 2": Nodes.of_size(6, 2),
    "2 x 3": Nodes.of_size(6, 3),
    "2 x 4": Nodes.of_size(8, 4),
}


class Rig:
    """One lane of these nodes, on a group of the first ranks; it exchanges buckets of parameters of these sizes."""

    def __init__(self, rank: int, nodes: Nodes, group: Group, collectives: Collectives | None = None) -> None:
        self.lanes = Lanes(group, CPU)
        self.lanes.grow(1)
        self.lanes.use_nodes(nodes, [0])
        self.collectives = collectives or Collectives(QuantisedExchanges(), DenseExchanges())
        self.collectives.use_nodes(nodes, rank)
        self.stages: list[tuple[bool, bool]] = []  # of each one that ended: whether it had works, and was the last

    def average(
        self, kind: str, sizes: Sequence[int], buffer: torch.Tensor, divisor: Callable[[], int] | None = None
    ) -> torch.Tensor:
        names = [f"p{number}" for number in range(len(sizes))]
        plan = Plan((Bucket(tuple(names), 0, kind),))
        numels = dict(zip(names, sizes, strict=True))
        launcher = BucketLauncher(plan, self.lanes, self.collectives, numels, lambda _: self.ended)
        launcher.divisor = divisor
        return launcher.launch(0, buffer).wait()

    def ended(self, works: list[dist.Work], is_last: bool) -> None:
        self.stages.append((bool(works), is_last))


def first_ranks(rank: int, count: int) -> Group | None:
    """The group of the first ranks; None on the others."""
    group = dist.new_group(list(range(count)), timeout=group_timeout())
    return group if rank < count and isinstance(group, dist.ProcessGroup) else None


def wild(rank: int, nodes: Nodes) -> dict[str, torch.Tensor]:
    """Averages of values of very different magnitude, in every dtype."""
    ranks = len(nodes) * nodes.per_node
    if (group := first_ranks(rank, ranks)) is None:
        return {}
    rig = Rig(rank, nodes, group)
    found = {
        f"{dtype} {sizes}": rig.average("dense@nodes", sizes, values_of_ranks(sum(sizes), ranks, dtype)[rank])
        for dtype in DTYPES
        for sizes in SIZES
    }
    rig.lanes.close()
    return found


def noise(rank: int) -> torch.Tensor:
    return torch.randn(700, generator=torch.Generator().manual_seed(rank))


def special(rank: int, nodes: Nodes) -> dict[str, torch.Tensor]:
    """Rounded kinds, sums too large for 16 bits, values that are not finite, another divisor."""
    ranks = len(nodes) * nodes.per_node
    if (group := first_ranks(rank, ranks)) is None:
        return {}
    rig = Rig(rank, nodes, group)
    found = {}
    for kind in ("bf16", "int8"):
        found[kind] = rig.average(f"{kind}@nodes", [650, 50], noise(rank))
        found[f"{kind} of 16 bits"] = rig.average(f"{kind}@nodes", [650, 50], noise(rank).half())
    for kind in ("dense", "bf16", "int8"):
        found[f"large {kind}"] = rig.average(f"{kind}@nodes", [9], torch.full((9,), LARGE).half())
        for value in (float("nan"), float("inf")):
            buffer = torch.ones(40)
            if rank == 1:
                buffer[17] = value
            found[f"{value} {kind}"] = rig.average(f"{kind}@nodes", [30, 10], buffer)
    found["sum"] = rig.average("dense@nodes", [5], torch.full((5,), float(rank)), lambda: 1)
    rig.stages.clear()
    found["scalar"] = rig.average("int8@nodes", [1], torch.full((1,), float(rank)))
    has_share = nodes.place_of(rank) == nodes.per_node - 1
    assert rig.stages == [(True, False), (has_share, False), (True, True)]
    rig.lanes.close()
    return found


@pytest.mark.slow
def test_averages_have_the_same_bits_on_all_ranks_and_are_those_of_naive_sums() -> None:
    cases: dict[str, Any] = {f"wild {name}": (wild, nodes) for name, nodes in SHAPES.items()}
    cases |= {f"special {name}": (special, SHAPES[name]) for name in ("2 x 2", "3 x 2", "2 x 4")}
    answers = cases_on_ranks(cases, 8, timeout_s=90.0)
    for name, nodes in SHAPES.items():
        ranks = len(nodes) * nodes.per_node
        for dtype in DTYPES:
            for sizes in SIZES:
                first, *others = (answer[f"{dtype} {sizes}"] for answer in answers[f"wild {name}"][:ranks])
                assert all(torch.equal(first, other) for other in others), (name, dtype, sizes)
                values = torch.stack(values_of_ranks(sum(sizes), ranks, dtype)).double()
                limits = torch.finfo(dtype)
                # Each of the sums, and the rounding of each node's, is off by at most half of eps of the magnitudes.
                bound = ranks * limits.eps * values.abs().mean(0) + limits.tiny
                if dtype.itemsize == 2:  # sums inside nodes are in float32
                    bound = (len(nodes) + 1) / 2 * limits.eps * values.abs().mean(0) + limits.tiny
                assert ((first.double() - values.mean(0)).abs() <= bound).all(), (name, dtype, sizes)
    for name in ("2 x 2", "3 x 2", "2 x 4"):
        ranks = len(SHAPES[name]) * SHAPES[name].per_node
        check_special(answers[f"special {name}"][:ranks])


def check_special(answers: list[dict[str, torch.Tensor]]) -> None:
    ranks, first = len(answers), answers[0]
    for what, found in first.items():
        for other in answers[1:]:
            assert torch.equal(found.nan_to_num(), other[what].nan_to_num()), what
    exact = torch.stack([noise(rank) for rank in range(ranks)]).mean(0)
    for kind, most in (("bf16", 0.006), ("int8", 0.02)):
        assert 0 < float((first[kind] - exact).norm() / exact.norm()) < most
        halved = first[f"{kind} of 16 bits"]
        assert halved.dtype == torch.float16 and float((halved - exact).norm() / exact.norm()) < most
    for kind in ("dense", "bf16", "int8"):
        assert first[f"large {kind}"].tolist() == pytest.approx([LARGE] * 9, rel=0.01)
        for value in (float("nan"), float("inf")):
            found = first[f"{value} {kind}"]
            assert not found[17].isfinite(), f"{kind} hides {value}"
            if kind == "dense":
                assert found.isfinite().sum() == 39
    assert first["sum"].tolist() == [sum(range(ranks))] * 5
    assert first["scalar"].item() == pytest.approx(sum(range(ranks)) / ranks, rel=0.01)


def beyond_half(rank: int, kind: str) -> dict[str, torch.Tensor]:
    """A step whose averages float16 cannot hold: because of residuals, or since scales are rounded up."""
    group = dist.group.WORLD
    assert group is not None
    settings = settings_of(ab.OkTopk(1.0, warmup_steps=0) if kind.startswith("oktopk") else kind)
    names = {"p0": torch.zeros(64, dtype=torch.float16)}
    rig = Rig(rank, TWO_BY_TWO, group, collectives_for(settings, names, group, lambda: True))
    bucket = Bucket(("p0",), 0, f"{kind}@nodes")
    state = rig.collectives.residuals.of(bucket)
    if state is not None:
        state.residual.fill_(400_000.0)
    average = rig.average(bucket.collective, [64], torch.full((64,), torch.finfo(torch.float16).max).half())
    rig.lanes.close()
    return {"average": average, "kept": torch.zeros(32) if state is None else state.residual}


def test_averages_that_float16_cannot_hold_are_sent_later() -> None:
    largest = torch.finfo(torch.float16).max
    kinds = ("int8", "int4", "oktopk:1.0")
    answers = cases_on_ranks({kind: (beyond_half, kind) for kind in kinds}, 4, timeout_s=60.0)
    for kind in kinds:
        for answer in answers[kind]:
            assert answer["average"].tolist() == [largest] * 64, kind
        for place in (0, 1):
            kept = sum(answers[kind][rank]["kept"] for rank in (place, 2 + place))
            expected = 0.0 if kind == "int8" else 2 * 400_000.0
            assert kept.tolist() == pytest.approx([expected] * 32, rel=1e-3), kind


# ----------------------------------------------------------------------------------------------------------- lanes


def mixed_at_their_own_pace(rank: int, messages: int) -> dict[str, Any]:
    """Flat and two-level messages on one lane; every rank pauses where it likes, in submitting and in every stage."""
    assert dist.group.WORLD is not None
    kinds, pause = random.Random(1), random.Random(100 + rank)
    rig = Rig(rank, TWO_BY_TWO, dist.group.WORLD)
    lane, begun, ended, futures = rig.lanes[0], list[int](), list[int](), []

    def later(steps: Steps) -> Steps:
        time.sleep(pause.choice([0, 0, 0.001, 0.004]))
        yield from steps

    def noted(steps: Steps, number: int) -> Steps:
        begun.append(number)
        yield from steps

    for number in range(messages):
        kind = kinds.choice(["dense", "dense@nodes", "int8", "int8@nodes"])
        sizes = [kinds.choice([2, 41, 3000]) for _ in range(2)]
        buffer = torch.full((sum(sizes),), float(number + rank))
        stages = rig.collectives.stages(
            Bucket(("a", "b"), 0, kind), buffer, sizes, lane, 4.0, lambda steps, *_, number=number: noted(steps, number)
        )
        label = f"message {number}"
        on_end = lambda works, is_last, number=number: ended.append(number) if is_last else None  # noqa: E731
        futures.append(lane.submit(Message([later(steps) for steps in stages], buffer, label, on_end)))
        time.sleep(pause.choice([0, 0, 0.002]))
    values = [future.wait() for future in futures]
    rig.lanes.close()
    return {"begun": begun, "ended": ended, "values": [[float(v.min()), float(v.max())] for v in values]}


def test_flat_messages_keep_their_place_between_two_level_ones() -> None:
    for answer in on_ranks(mixed_at_their_own_pace, 4, 60):
        for number, (low, high) in enumerate(answer["values"]):
            assert low == pytest.approx(number + 1.5, rel=0.02) and high == pytest.approx(low, rel=0.02)
        assert answer["begun"] == list(range(60)), "one order between nodes, on all ranks"
        assert sorted(answer["ended"]) == list(range(60))


def one_after_another(rank: int) -> list[str]:
    """Flat messages on a lane with nodes, while nothing is on its way; and one behind a two-level one."""
    assert dist.group.WORLD is not None
    rig = Rig(rank, TWO_BY_TWO, dist.group.WORLD)
    lane: Any = rig.lanes[0]
    found = []
    for kind in ("dense", "dense@nodes", "dense"):
        assert rig.average(kind, [5], torch.ones(5)).tolist() == [1.0] * 5
        while not (idle := lane._stages[0].is_idle):
            time.sleep(0.001)
        found.append(f"{kind}: {lane._stages[0]._passed}, {idle}")
    rig.lanes.close()
    return found


def test_flat_messages_make_no_detour() -> None:
    for answer in on_ranks(one_after_another, 4):
        assert answer == ["dense: 0, True", "dense@nodes: 1, True", "dense: 1, True"]


STAGES = ["the sum inside the node", "the exchange between nodes", "the gathering inside the node"]
VICTIM = 1
PARTNERS = (0, 3, 0)  # the rank that waits for it, by stage


def fault_in(rank: int, stage: int, fault: str) -> None:
    """A message; one in which rank 1 dies or fails in this stage; and one that must not be sent any more."""
    assert dist.group.WORLD is not None
    rig = Rig(rank, TWO_BY_TWO, dist.group.WORLD)
    lane = rig.lanes[0]

    def faulty(steps: Steps) -> Steps:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("a bug in this stage")
        yield from steps

    assert rig.average("dense@nodes", [5], torch.ones(5)).tolist() == [1.0] * 5
    buffer = torch.ones(700)
    stages = list(rig.collectives.stages(Bucket(("a",), 0, "int8@nodes"), buffer, [700], lane, 4.0))
    if rank == VICTIM:
        stages[stage] = faulty(stages[stage])
    lane.submit(Message(stages, buffer, "bucket 7")).wait()
    rig.average("dense@nodes", [5], torch.ones(5))  # on ranks that have ended this message before they heard of it
    dist.barrier()


@pytest.mark.parametrize("fault", ["die", "fail"])
@pytest.mark.parametrize("stage", range(3))
def test_a_fault_in_any_stage_ends_all_ranks_and_is_named(stage: int, fault: str) -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(fault_in, 4, stage, fault)
    said = {int(part[0]): part for part in re.split(r"^rank (?=\d failed:)", str(caught.value), flags=re.M)[1:]}
    assert sorted(said) == [0, 1, 2, 3], f"a rank did not end by itself: {caught.value}"
    waited = f"bucket 7: {STAGES[stage]} did not get through after"
    assert (waited if fault == "fail" else "it died without a word") in said[VICTIM]
    assert waited in said[PARTNERS[stage]]
    assert "look for the first error among all ranks" in said[PARTNERS[stage]]
