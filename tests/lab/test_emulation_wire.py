"""Transfers that share an emulated wire, under a clock that is told what to say."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from anabranch import Bucket, Network, Plan, TensorSpec, Trace, simulate
from anabranch.lab.emulation.cost import Cost
from anabranch.lab.emulation.wire import Transfer, Wire


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finish(wire: Wire, hand: Hand, transfer: Transfer) -> float:
    """When it is over, found as a waiting thread finds it."""
    for _ in range(1000):
        left_s = wire.left_s(transfer)
        if left_s <= 0:
            return hand.now - 100
        before, hand.now = hand.now, hand.now + left_s
        if hand.now == before:  # less than the clock can tell
            hand.now += 1e-9
    raise AssertionError("it never ends")


def test_one_transfer_takes_its_cost() -> None:
    hand = Hand()
    wire = Wire(hand)
    transfer = wire.post(Cost(1.0, 2.0))
    assert wire.left_s(transfer) == approx(3.0)
    hand.now += 2.5
    assert wire.left_s(transfer) == approx(0.5)
    hand.now += 0.5
    assert wire.left_s(transfer) == 0 and transfer.over
    hand.now += 10
    assert finish(wire, hand, wire.post(Cost(0.0, 0.0))) == approx(13)


def test_equal_transfers_share_and_their_latencies_overlap() -> None:
    hand = Hand()
    wire = Wire(hand)
    three = [wire.post(Cost(1.0, 2.0)) for _ in range(3)]
    assert [finish(wire, hand, transfer) for transfer in three] == [approx(7.0)] * 3


def test_a_late_short_one_slows_a_long_one_by_its_own_length() -> None:
    hand = Hand()
    wire = Wire(hand)
    long = wire.post(Cost(0.0, 10.0))
    hand.now += 4
    short = wire.post(Cost(0.0, 1.0))
    assert finish(wire, hand, short) == approx(6.0)
    assert finish(wire, hand, long) == approx(11.0)


def test_what_carries_nothing_passes_a_full_wire() -> None:
    hand = Hand()
    wire = Wire(hand)
    wire.post(Cost(0.0, 10.0))
    assert finish(wire, hand, wire.post(Cost(0.5, 0.0))) == approx(0.5)


COSTS = st.lists(st.builds(Cost, st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=8)


@given(COSTS)
def test_the_wire_never_carries_more_than_it_can_and_never_rests_with_work_to_do(costs: list[Cost]) -> None:
    hand = Hand()
    wire = Wire(hand)
    left = [(cost, wire.post(cost)) for cost in costs]
    ends: list[tuple[Cost, float]] = []
    while left:
        seconds = [wire.left_s(transfer) for _, transfer in left]
        ends += [(cost, hand.now - 100) for cost, transfer in left if transfer.over]
        left = [pair for pair in left if not pair[1].over]
        hand.now += max(1e-9, min(seconds))
    assert all(end >= sum(cost) - 1e-6 for cost, end in ends)
    busy_until = 0.0  # with whatever order or shares, as long as it never rests
    for cost in sorted(costs):
        busy_until = max(busy_until, cost.start_s) + cost.transfer_s
    assert max(end for _, end in ends) == approx(busy_until, abs=1e-6)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_messages_at_once_take_what_the_simulator_says(sizes: list[int]) -> None:
    network = Network.ring(2, 0.5, 1.0)  # an all-reduce of M bytes: 1 s, then M seconds
    trace = Trace(tuple(TensorSpec(f"t{i}", numel, 1, 0.0) for i, numel in enumerate(sizes)), 0.0)
    plan = Plan(tuple(Bucket((f"t{i}",), lane=i) for i in range(len(sizes))))
    hand = Hand()
    wire = Wire(hand)
    transfers = [wire.post(Cost(1.0, float(numel))) for numel in sizes]
    ends = [
        finish(wire, hand, transfer) for _, transfer in sorted(zip(sizes, transfers, strict=True), key=lambda p: p[0])
    ]
    assert max(ends) == approx(simulate(trace, plan, network).finish_s, rel=1e-6)
