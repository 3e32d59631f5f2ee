"""Lanes: never worse than one lane, near brute force where brute force can be had."""

import random
from dataclasses import replace

import pytest
from hypothesis import given

from anabranch import Bucket, Contention, Curve, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning.simulator import finish_s, lower_bound_s
from oracles import all_cuts, lane_choices
from shorthand import trace_of
from strategies import contentions, curves, traces

ETAS = [0.0, 0.3, 0.5, 1.0]


def brute_force_s(trace: Trace, network: Network, lanes: int) -> float:
    """The best of all partitions into runs, on all choices of lanes."""
    best = float("inf")
    for cuts in all_cuts(len(trace)):
        runs = Plan.from_cuts(trace, cuts).buckets
        for choice in lane_choices(len(runs), lanes):
            plan = Plan(tuple(Bucket(b.names, lane) for b, lane in zip(runs, choice, strict=True)))
            best = min(best, finish_s(trace, plan, network))
    return best


def random_case(rng: random.Random, count: int) -> tuple[Trace, Network]:
    ready_s, tensors = 0.0, []
    for i in range(count):
        ready_s += rng.random() * rng.choice([0.1, 1.0, 4.0])
        tensors.append(TensorSpec(str(i), rng.randint(1, rng.choice([4, 40])), 4, ready_s))
    start_s, s_per_byte = rng.choice([0.1, 1.0, 3.0]), rng.choice([0.005, 0.02, 0.1])
    return trace_of(tensors, 1.0), Network.linear(8, start_s, s_per_byte, eta=rng.choice(ETAS))


def test_the_gap_to_brute_force() -> None:
    rng = random.Random(2)
    gaps = []
    for _ in range(60):
        trace, network = random_case(rng, rng.randint(3, 6))
        found = finish_s(trace, planners.lanes(trace, network, 3), network)
        gaps.append(found / brute_force_s(trace, network, 3) - 1)
    assert min(gaps) >= -1e-12
    assert sum(gaps) / len(gaps) < 0.01
    assert max(gaps) < 0.15


@given(traces(max_tensors=6, kinds=2, max_numel=5000), curves, contentions())
def test_never_worse_than_one_lane_nor_better_than_can_be(trace: Trace, curve: Curve, contention: Contention) -> None:
    network = Network(8, {"dense": curve}, contention)
    plan = planners.lanes(trace, network, polish=40).check(trace)
    done_s = finish_s(trace, plan, network)
    assert done_s <= finish_s(trace, planners.optimal(trace, network), network)
    assert done_s * (1 + 1e-9) >= lower_bound_s(trace, network, plan.lanes)
    used = [bucket.lane for bucket in plan.buckets]
    assert list(dict.fromkeys(used)) == list(range(plan.lanes))  # no gaps, in order of first use
    assert plan.lanes <= 4


def test_polish_helps_and_never_hurts() -> None:
    rng = random.Random(3)
    better = 0
    for _ in range(20):
        trace, network = random_case(rng, 12)
        one_lane = finish_s(trace, planners.optimal(trace, network), network)
        rough = finish_s(trace, planners.lanes(trace, network, polish=0), network)
        fine = finish_s(trace, planners.lanes(trace, network), network)
        assert fine <= rough <= one_lane
        assert finish_s(trace, planners.lanes(trace, network, lanes=1), network) == pytest.approx(one_lane)
        better += fine < rough * (1 - 1e-6)
    assert better > 0


def test_the_optimum_is_a_candidate_on_crooked_curves_too() -> None:
    """Where no straight line leads to it: without it, and without polish, one lane would lose to ``optimal``."""
    rng = random.Random(8)
    curve = Curve.through([(0, 0.5), (40, 0.5), (44, 6.0), (400, 7.0)])
    for _ in range(20):
        trace, _ = random_case(rng, 12)
        network = Network(8, {"dense": curve})
        best = finish_s(trace, planners.optimal(trace, network), network)
        assert finish_s(trace, planners.lanes(trace, network, polish=0), network) <= best
        assert finish_s(trace, planners.lanes(trace, network, lanes=1, polish=0), network) == best


def test_lanes_help_where_messages_do_not_slow_each_other() -> None:
    trace = trace_of([TensorSpec(str(i), 100, 4, float(i)) for i in range(4)], 1.0)
    network = Network.linear(8, 1.0, 0.01, eta=0.0)
    plan = planners.lanes(trace, network)
    assert plan.lanes > 1
    assert finish_s(trace, plan, network) == 8.0  # the last gradient, ready at 3, takes 5: nobody can be faster
    assert finish_s(trace, planners.optimal(trace, network), network) > 8.0


def test_a_full_link_without_start_up_needs_one_lane() -> None:
    trace = trace_of([TensorSpec(str(i), 100, 4, float(i)) for i in range(4)], 1.0)
    plan = planners.lanes(trace, Network.linear(8, 0.0, 0.25))
    assert plan.lanes == 1  # ties go to fewer lanes


def test_messages_of_another_kind_at_its_prices() -> None:
    """The same plan as for a network whose dense messages cost as much, in the other kind's name."""
    rng = random.Random(5)
    for _ in range(10):
        trace, network = random_case(rng, 10)
        both = Network(8, {"dense": Curve.linear(9.0, 9.0), "int8": network.curve("dense")}, network.contention)
        found = planners.lanes(trace, both, collective="int8")
        assert finish_s(trace, found, both) <= finish_s(
            trace, planners.using(planners.optimal(trace, network), "int8"), both
        )
        assert {bucket.collective for bucket in found.buckets} == {"int8"}
        assert finish_s(trace, found, both) == pytest.approx(
            finish_s(trace, planners.lanes(trace, network), network), 0.02
        )


def test_gradients_of_16_bits_cost_another_kind_as_much_as_those_of_32() -> None:
    """The search must price them as the simulator does, or it would lose to the optimum on one lane."""
    rng = random.Random(6)
    for _ in range(10):
        trace, network = random_case(rng, 10)
        half = replace(trace, tensors=tuple(replace(t, dtype="bfloat16", itemsize=2) for t in trace.tensors))
        full = replace(trace, tensors=tuple(replace(t, dtype="float32", itemsize=4) for t in trace.tensors))
        both = replace(network, curves={**network.curves, "int8": network.curve("dense")}, model=None)
        found = planners.lanes(half, both, collective="int8")
        assert finish_s(half, found, both) <= finish_s(half, planners.optimal(half, both, collective="int8"), both)
        assert finish_s(half, found, both) == pytest.approx(
            finish_s(full, planners.lanes(full, both, collective="int8"), both), 0.02
        )


def test_equal_inputs_equal_plans() -> None:
    rng = random.Random(4)
    for _ in range(10):
        trace, network = random_case(rng, 10)
        assert planners.lanes(trace, network).fingerprint == planners.lanes(trace, network).fingerprint


def test_refusals() -> None:
    trace = trace_of([TensorSpec("a", 1, 4, 0.0)], 0.0)
    for planner in (planners.lanes, planners.asc):
        with pytest.raises(ValueError, match="lanes is 0"):
            planner(trace, Network.linear(2, 1, 1), lanes=0)
