"""Exact plans of two-level messages, against all cuts, and what else plans them."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import Curve, CurvePoint, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning import two_level
from anabranch.planning.merge import compressed, compressed_if_faster, using
from anabranch.planning.simulator import finish_s
from anabranch.values.files import load_bundled_trace
from anabranch.values.network import InsideNodes
from oracles import all_cuts, lane_choices
from shorthand import trace_of
from strategies import costs, curves, traces

EXACT = "dense@nodes"


def of_nodes(between: Curve, scatter: Curve, gather: Curve, delay_s: float = 0.0) -> Network:
    """A network on which flat dense messages are of no use."""
    inside = InsideNodes(4, scatter, gather)
    return Network(8, {"dense": Curve.linear(1e3, 1.0), EXACT: between}, delays={EXACT: delay_s}, inside=inside)


def all_plans(trace: Trace, kind: str = EXACT) -> list[Plan]:
    return [using(Plan.from_cuts(trace, cuts), kind) for cuts in all_cuts(len(trace))]


def check(trace: Trace, network: Network) -> None:
    finishes = [(finish_s(trace, plan, network), len(plan)) for plan in all_plans(trace)]
    least = min(finish for finish, _ in finishes)
    found = planners.optimal(trace, network, collective=EXACT).check(trace)
    assert finish_s(trace, found, network) == pytest.approx(least, rel=1e-9, abs=1e-12)
    # Plans that finish within rounding of each other may count as equal, and those far enough apart never do.
    fewest = [min(count for finish, count in finishes if finish <= least * (1 + near)) for near in (1e-9, 1e-13)]
    assert fewest[0] <= len(found) <= fewest[1]
    assert {bucket.collective for bucket in found.buckets} == {EXACT}


def whole_curve(rng: random.Random) -> Curve:
    size, level, points = rng.choice([0, 0, 3]), rng.randint(0, 3), []
    for _ in range(rng.randint(1, 3)):
        points.append(CurvePoint(size, float(level)))
        step = rng.choice([1, 2, 4])
        size, level = size + step, level + rng.choice([0, step, 2 * step])
    return Curve(tuple(points), float(rng.choice([0, 1, 1, 2])))


@pytest.mark.parametrize("seed", range(4))
def test_whole_numbers_with_many_ties(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        ready = list(accumulate(rng.choice([0, 0, 1, 2, 5]) for _ in range(rng.randint(1, 9))))
        trace = trace_of([TensorSpec(str(i), rng.randint(0, 6), 1, float(r)) for i, r in enumerate(ready)], 0.0)
        between, scatter, gather = (whole_curve(rng) for _ in range(3))
        check(trace, of_nodes(between, scatter, gather, float(rng.choice([0, 0, 0, 1, 2]))))


@settings(max_examples=200, deadline=None)
@given(traces(max_tensors=7), curves, curves, curves, st.just(0.0) | costs)
def test_any_curves_inside_slower_than_the_card_or_not(
    trace: Trace, between: Curve, scatter: Curve, gather: Curve, delay_s: float
) -> None:
    check(trace, of_nodes(between, scatter, gather, delay_s))


def test_a_network_without_costs_inside_nodes_is_planned_as_if_messages_were_flat() -> None:
    trace = trace_of([TensorSpec(str(i), 10 * i + 1, 4, float(i)) for i in range(8)], 0.0)
    network = Network(8, {"dense": Curve.linear(9.0, 1.0), EXACT: Curve.linear(1.0, 0.02)})
    flat = planners.optimal(trace, replace(network, curves={"dense": network.curve(EXACT)}))
    assert planners.optimal(trace, network, collective=EXACT) == using(flat, EXACT)
    nothing = replace(network, inside=InsideNodes(2, Curve.linear(0.0, 0.0), Curve.linear(0.0, 0.0)))
    assert planners.optimal(trace, nothing, collective=EXACT) == using(flat, EXACT)


def test_of_many_gradients_neighbours_are_merged_and_little_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = load_bundled_trace("resnet50")
    network = of_nodes(Curve.linear(5e-5, 1e-9), Curve.linear(2e-5, 1e-10), Curve.linear(2e-5, 1e-10))
    merged = trace.forward_s + finish_s(trace, planners.optimal(trace, network, collective=EXACT).check(trace), network)
    monkeypatch.setattr(two_level, "MOST_GRADIENTS", len(trace))
    exact = trace.forward_s + finish_s(trace, planners.optimal(trace, network, collective=EXACT), network)
    assert exact <= merged <= 1.005 * exact


def test_several_lanes_are_near_all_cuts_on_all_lanes() -> None:
    rng = random.Random(4)
    gaps = []
    for _ in range(40):
        ready = list(accumulate(rng.random() * rng.choice([0.1, 1.0, 4.0]) for _ in range(rng.randint(3, 5))))
        trace = trace_of([TensorSpec(str(i), rng.randint(1, 40), 4, r) for i, r in enumerate(ready)], 1.0)
        line = Curve.linear(rng.choice([0.1, 1.0, 3.0]), rng.choice([0.005, 0.02, 0.1]))
        scatter, gather = (line.scaled(rng.choice([0.1, 0.5, 1.5]), 0.0) for _ in range(2))
        network = of_nodes(line, scatter, gather)
        plans = [
            replace(plan, buckets=tuple(replace(b, lane=n) for b, n in zip(plan.buckets, lanes, strict=True)))
            for plan in all_plans(trace)
            for lanes in lane_choices(len(plan), 3)
        ]
        best = min(finish_s(trace, plan, network) for plan in plans)
        found = finish_s(trace, planners.lanes(trace, network, 3, collective=EXACT), network)
        assert found <= finish_s(trace, planners.optimal(trace, network, collective=EXACT), network)
        gaps.append(found / best - 1)
    assert min(gaps) >= -1e-12
    assert sum(gaps) / len(gaps) < 0.01
    assert max(gaps) < 0.15


def compressing() -> tuple[Trace, Network]:
    """Large gradients that int8 sends fastest on two levels, and a small one that is fastest dense and flat."""
    sizes = (10**6, 10**6, 10**6, 10)
    trace = trace_of([TensorSpec(f"t{i}", n, 4, 0.1 * (i + 1)) for i, n in enumerate(sizes)], 0.1)
    kinds = {"dense": (1e-4, 2e-7), "int8": (1e-3, 1e-7), EXACT: (1e-4, 1e-7), "int8@nodes": (1e-3, 2.5e-8)}
    inside = InsideNodes(4, Curve.linear(1e-3, 1e-9), Curve.linear(1e-3, 1e-9))
    return trace, Network(8, {kind: Curve.linear(*line) for kind, line in kinds.items()}, inside=inside)


def test_buckets_that_do_not_gain_travel_dense_on_two_levels_or_flat() -> None:
    trace, network = compressing()
    apart = replace(trace, tensors=tuple(replace(t, ready_s=10.0 * t.ready_s) for t in trace.tensors))
    plan = compressed(apart, network, "int8@nodes", ["t0"]).check(apart)
    kinds = {name: bucket.collective for bucket in plan.buckets for name in bucket.names}
    assert kinds == {"t0": EXACT, "t1": "int8@nodes", "t2": "int8@nodes", "t3": "dense"}
    without = replace(network, curves={kind: c for kind, c in network.curves.items() if kind != EXACT})
    plan = compressed(apart, without, "int8@nodes", ["t0"])
    assert {bucket.collective for bucket in plan.buckets if "t0" in bucket.names} == {"dense"}


def test_a_two_level_kind_that_is_no_faster_than_dense_messages_on_two_levels_gives_way_to_them() -> None:
    trace, network = compressing()
    assert compressed_if_faster(trace, network, "int8@nodes") == compressed(trace, network, "int8@nodes")
    slow = replace(network, curves={**network.curves, "int8@nodes": Curve.linear(1.0, 1e-7)})
    assert compressed_if_faster(trace, slow, "int8@nodes") == planners.optimal(trace, slow, collective=EXACT)
