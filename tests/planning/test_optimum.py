"""The exact optimum against brute force and against the recurrence written plainly."""

import random
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch import Curve, CurvePoint, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning import merge as optimum
from anabranch.planning.simulator import finish_s
from oracles import Best, all_cuts, brute_force, naive_dp
from shorthand import trace_of
from strategies import curves, linear_curves, stepped_curves, traces, whole_traces


def check(trace: Trace, curve: Curve, want: Best) -> None:
    network = Network(8, {"dense": curve})
    plan = planners.optimal(trace, network)
    assert finish_s(trace, plan, network) == pytest.approx(want.finish_s, rel=1e-9, abs=1e-12)
    assert len(plan) == want.buckets
    assert [name for bucket in plan.buckets for name in bucket.names] == [t.name for t in trace.tensors]


def whole_curve(rng: random.Random) -> Curve:
    """A non-falling polygon on whole numbers, its lines of whole or half slopes: ties are exact."""
    size, level, points = rng.choice([0, 0, 3]), rng.randint(0, 5), []
    for _ in range(rng.randint(1, 4)):
        points.append(CurvePoint(size, float(level)))
        step = rng.choice([1, 2, 2, 4, 8])
        size, level = size + step, level + rng.choice([0, step // 2, step, 3 * step, 8 * step])
    return Curve(tuple(points), float(rng.choice([0, 0, 1, 2])))


@pytest.mark.parametrize("seed", range(4))
def test_whole_numbers_with_many_ties(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        count = rng.randint(1, 9)
        ready = list(accumulate(rng.choice([0, 0, 1, 2, 5]) for _ in range(count)))
        trace = trace_of([TensorSpec(str(i), rng.randint(0, 6), 1, float(r)) for i, r in enumerate(ready)], 0.0)
        curve = whole_curve(rng)
        check(trace, curve, brute_force(trace, curve))


@settings(max_examples=200)
@example(
    trace_of([TensorSpec("0", 1, 4, 0.0), TensorSpec("1", 0, 4, 1e-9)], 0.0), Curve.linear(0.0, 1.0), 1.0
)  # two messages are earlier than one, by little
@given(traces(), linear_curves(), st.one_of(st.floats(1e-6, 3), st.integers(1, 5).map(float)))
def test_messages_that_delay_what_is_computed_after_them(trace: Trace, curve: Curve, delay_s: float) -> None:
    network = Network(8, {"dense": curve}, delays={"dense": delay_s})
    plans = [Plan.from_cuts(trace, cuts) for cuts in all_cuts(len(trace))]
    least = min(finish_s(trace, plan, network) for plan in plans)
    found = planners.optimal(trace, network)
    assert finish_s(trace, found, network) == pytest.approx(least, rel=1e-9, abs=1e-12)
    # Plans that finish within rounding of each other may count as equal, and those far enough apart never do.
    fewest = [min(len(p) for p in plans if finish_s(trace, p, network) <= least * (1 + near)) for near in (1e-9, 1e-13)]
    assert fewest[0] <= len(found) <= fewest[1]


def test_more_gradients_than_can_be_priced_one_by_one_are_planned_all_the_same() -> None:
    trace = trace_of([TensorSpec(str(i), 1000, 4, 1e-5 * i) for i in range(optimum.MOST_DELAYED + 5)], 1e-3)
    free, delayed = (Network(8, {"dense": Curve.linear(1e-5, 2e-9)}, delays=d) for d in ({}, {"dense": 1e-3}))
    many, few = (planners.optimal(trace, network) for network in (free, delayed))
    assert len(few) < len(many) and finish_s(trace, few, delayed) < finish_s(trace, many, delayed)


@settings(max_examples=150)
@given(traces(), linear_curves())
def test_lines(trace: Trace, curve: Curve) -> None:
    check(trace, curve, brute_force(trace, curve))


@settings(max_examples=250)
@given(traces(max_numel=5000), stepped_curves())
def test_steps_flats_and_jumps(trace: Trace, curve: Curve) -> None:
    check(trace, curve, brute_force(trace, curve))


@settings(max_examples=100)
@given(whole_traces(), curves)
def test_any_curve_on_small_sizes(trace: Trace, curve: Curve) -> None:
    check(trace, curve, brute_force(trace, curve))


SHAPES = {
    "convex": [(0, 1e-4), (1 << 12, 2e-4), (1 << 16, 3e-3), (1 << 20, 8e-2)],
    "concave": [(0, 0.0), (1 << 10, 1e-3), (1 << 14, 2e-3), (1 << 20, 4e-3)],
    "staircase": [(0, 1e-4), (1 << 13, 1e-4), ((1 << 13) + 64, 8e-4), (1 << 17, 8e-4), ((1 << 17) + 64, 4e-3)],
    "line": [(0, 1e-3), (1 << 20, 3e-3)],
    "flat": [(0, 1e-3), (1 << 20, 1e-3)],
    "free start": [(0, 0.0), (1 << 20, 1e-2)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_three_hundred_tensors(shape: str) -> None:
    curve = Curve.through(SHAPES[shape])
    rng = random.Random(shape)
    for gap_s in (0.0, 1e-4, 2e-3):
        ready = list(accumulate(rng.random() * gap_s for _ in range(300)))
        trace = trace_of([TensorSpec(str(i), rng.randrange(1, 20_000), 4, r) for i, r in enumerate(ready)], 0.0)
        check(trace, curve, naive_dp(trace, curve))


def test_equal_layers_at_three_hundred() -> None:
    """Equal sizes at equal gaps: as many ties as there can be."""
    trace = trace_of([TensorSpec(str(i), 64, 4, i / 1024) for i in range(300)], 0.0)
    for start_s in (0.0, 1 / 1024, 1 / 128, 1 / 8):
        for s_per_byte in (0.0, 2.0**-20, 2.0**-18, 2.0**-15):
            curve = Curve.linear(start_s, s_per_byte)
            check(trace, curve, naive_dp(trace, curve))


def test_by_hand() -> None:
    trace = trace_of([TensorSpec(str(i), 4, 1, float(i)) for i in range(4)], 0.0)
    free = Network.linear(2, 0, 0)
    assert len(planners.optimal(trace, free)) == 1  # all plans finish with backward: fewest buckets


def test_a_steep_jump_and_many_bytes() -> None:
    """A protocol switch within one byte, and terabytes: f[j] − s·S[j] as it stands loses the digits that decide."""
    points = [(0, 0.0005847413868586288), (8192, 0.0006432155255444918), (8193, 3.9665952024278597)]
    curve = Curve(Curve.through(points).points, 0.0)
    nbytes = [8192, 10**9, 10**9, 10**12, 8192, 4097, 10**12, 8192, 10**9, 4097, 10**12, 10**12]
    nbytes += [8192, 8192, 8192, 8192, 4097]
    trace = trace_of([TensorSpec(str(i), n, 1, i * 2e-4) for i, n in enumerate(nbytes)], 0.0)
    check(trace, curve, naive_dp(trace, curve))


@pytest.mark.parametrize("seed", range(3))
def test_steep_jumps_at_random(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        switch = rng.choice([1, 64, 1024, 8192])
        low_s, jump_s = rng.random() * 1e-3, rng.random() * rng.choice([1e-3, 1e-1, 10.0, 1000.0])
        points = (CurvePoint(0, low_s), CurvePoint(switch, 1.1 * low_s), CurvePoint(switch + 1, 1.1 * low_s + jump_s))
        curve = Curve(points, rng.choice([0.0, 1e-12, 1e-9]))
        count = rng.randint(2, 40)
        ready = accumulate(rng.random() * rng.choice([0, 1e-6, 1e-3]) for _ in range(count))
        sizes = [rng.choice([switch, switch, switch // 2 + 1, 10**9, 10**12]) for _ in range(count)]
        trace = trace_of([TensorSpec(str(i), n, 1, r) for i, (n, r) in enumerate(zip(sizes, ready, strict=True))])
        check(trace, curve, naive_dp(trace, curve))
