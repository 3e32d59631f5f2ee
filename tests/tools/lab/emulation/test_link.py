"""An emulated link: its costs, and transfers that share it, under a clock that stands still until it is moved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from anabranch import Bucket, Network, Plan, TensorSpec, Trace, simulate
from anabranch.tools.lab.emulation.link import Cost, LinkDirection, Transfer, cost
from anabranch.values.links import AlphaBeta

LINK = AlphaBeta("ring", 50e-6, 8e-10)
MIB = 1 << 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("nbytes", [0, 4, MIB])
def test_an_all_reduce_costs_what_the_planners_think(ranks: int, nbytes: int) -> None:
    whole = cost("all-reduce", LINK, ranks, nbytes)
    if ranks > 1:
        expected = Network.ring(ranks, LINK.alpha_s, LINK.beta_s_per_byte).allreduce_s(nbytes)
        assert sum(whole) == approx(expected, rel=1e-12)
    half = cost("all-gather", LINK, ranks, nbytes)
    assert [2 * part for part in half] == approx(list(whole), rel=1e-12)


def test_the_other_costs() -> None:
    a, b = LINK.alpha_s, LINK.beta_s_per_byte
    assert cost("broadcast", LINK, 5, 1000) == approx((3 * a, 1000 * b))
    assert cost("gather", LINK, 5, 1000) == approx((a, 800 * b))
    assert cost("message", LINK, 5, 1000) == approx((a, 1000 * b))
    assert cost("broadcast", LINK, 1, 1000) == cost("gather", LINK, 1, 1000) == Cost(0.0, 0.0)


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finish(link: LinkDirection, clock: ManualClock, transfer: Transfer) -> float:
    """When it is over, found as a waiting thread finds it."""
    for _ in range(1000):
        remaining_s = link.remaining_s(transfer)
        if remaining_s <= 0:
            return clock.now - 100
        before, clock.now = clock.now, clock.now + remaining_s
        if clock.now == before:  # less than the clock can tell
            clock.now += 1e-9
    raise AssertionError("it never ends")


def test_one_transfer_takes_its_cost() -> None:
    clock = ManualClock()
    link = LinkDirection(clock)
    transfer = link.start(Cost(1.0, 2.0))
    assert link.remaining_s(transfer) == approx(3.0)
    clock.now += 2.5
    assert link.remaining_s(transfer) == approx(0.5)
    clock.now += 0.5
    assert link.remaining_s(transfer) == 0 and transfer.done
    clock.now += 10
    assert finish(link, clock, link.start(Cost(0.0, 0.0))) == approx(13)


def test_equal_transfers_share_and_their_latencies_overlap() -> None:
    clock = ManualClock()
    link = LinkDirection(clock)
    three = [link.start(Cost(1.0, 2.0)) for _ in range(3)]
    assert [finish(link, clock, transfer) for transfer in three] == [approx(7.0)] * 3


def test_a_late_short_one_slows_a_long_one_by_its_own_length() -> None:
    clock = ManualClock()
    link = LinkDirection(clock)
    long = link.start(Cost(0.0, 10.0))
    clock.now += 4
    short = link.start(Cost(0.0, 1.0))
    assert finish(link, clock, short) == approx(6.0)
    assert finish(link, clock, long) == approx(11.0)


def test_a_message_without_bytes_passes_a_full_link() -> None:
    clock = ManualClock()
    link = LinkDirection(clock)
    link.start(Cost(0.0, 10.0))
    assert finish(link, clock, link.start(Cost(0.5, 0.0))) == approx(0.5)


COSTS = st.lists(st.builds(Cost, st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=8)


@given(COSTS)
def test_the_link_never_exceeds_its_rate_and_never_idles_with_work_to_do(costs: list[Cost]) -> None:
    clock = ManualClock()
    link = LinkDirection(clock)
    left = [(cost, link.start(cost)) for cost in costs]
    ends: list[tuple[Cost, float]] = []
    while left:
        seconds = [link.remaining_s(transfer) for _, transfer in left]
        ends += [(cost, clock.now - 100) for cost, transfer in left if transfer.done]
        left = [pair for pair in left if not pair[1].done]
        clock.now += max(1e-9, min(seconds))
    assert all(end >= sum(cost) - 1e-6 for cost, end in ends)
    busy_until = 0.0  # with whatever order or shares, as long as it never rests
    for start_s, transfer_s in sorted(costs):
        busy_until = max(busy_until, start_s) + transfer_s
    assert max(end for _, end in ends) == approx(busy_until, abs=1e-6)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_messages_at_once_take_what_the_simulator_says(sizes: list[int]) -> None:
    network = Network.ring(2, 0.5, 1.0)  # an all-reduce of M bytes: 1 s, then M seconds
    trace = Trace(tuple(TensorSpec(f"t{i}", numel, 1, 0.0) for i, numel in enumerate(sizes)), 0.0)
    plan = Plan(tuple(Bucket((f"t{i}",), lane=i) for i in range(len(sizes))))
    clock = ManualClock()
    link = LinkDirection(clock)
    transfers = [link.start(Cost(1.0, float(numel))) for numel in sizes]
    ends = [
        finish(link, clock, transfer) for _, transfer in sorted(zip(sizes, transfers, strict=True), key=lambda p: p[0])
    ]
    assert max(ends) == approx(simulate(trace, plan, network).finish_s, rel=1e-6)
