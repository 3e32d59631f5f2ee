"""The published rule as published, the optimum as proven, and the order between the planners."""

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anabranch import Curve, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning.simulator import finish_s, lower_bound_s
from oracles import published_groups
from shorthand import trace_of
from strategies import curves, linear_curves, traces, whole_traces

ROUNDING = 1 + 1e-9


def priced(curve: Curve) -> Network:
    return Network(8, {"dense": curve})


def of_layers(tb: list[float], p: list[int], itemsize: int = 1) -> Trace:
    """A trace from backward times and sizes in forward order, layer 1 first, as papers list them."""
    ready_s, tensors = 0.0, []
    for layer in range(len(tb), 0, -1):
        ready_s += tb[layer - 1]
        tensors.append(TensorSpec(str(layer), p[layer - 1], itemsize, ready_s))
    return trace_of(tensors, 0.0)


def layers(plan: Plan) -> list[list[int]]:
    return [[int(name) for name in bucket.names] for bucket in plan.buckets]


def test_the_counter_example() -> None:
    trace, network = of_layers([4, 3, 1], [1, 1, 4]), Network.linear(2, 4, 1)
    rule, best = planners.mgwfbp(trace, network), planners.optimal(trace, network)
    assert layers(rule) == [[3, 2], [1]]
    assert layers(best) == [[3], [2, 1]]
    assert finish_s(trace, rule, network) == 18
    assert finish_s(trace, best, network) == 15


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(0, 10),
    st.integers(0, 4),
)
def test_mgwfbp_and_asc_are_the_published_algorithms(layered: list[tuple[int, int]], a: int, b: int) -> None:
    tb, p = [float(t) for t, _ in layered], [size for _, size in layered]
    trace, network = of_layers(tb, p), Network.linear(2, a, b)
    assert layers(planners.mgwfbp(trace, network)) == published_groups(tb, p, a, b)
    for lanes in (1, 2, 3):
        asc = planners.asc(trace, network, lanes)
        assert layers(asc) == published_groups(tb, p, a, b, rule="asc")
        assert [bucket.lane for bucket in asc.buckets] == [i % lanes for i in range(len(asc))]


def test_a_rule_for_lines_takes_the_nearest_line() -> None:
    trace = of_layers([3.0] * 9, [10, 2, 30, 4, 50, 6, 70, 8, 9])
    curve = Curve.through([(0, 1.0), (10, 4.0), (20, 5.0), (100, 9.0)])
    start_s, s_per_byte = curve.line()
    assert planners.mgwfbp(trace, priced(curve)) == planners.mgwfbp(trace, Network.linear(8, start_s, s_per_byte))
    assert planners.asc(trace, priced(curve)) == planners.asc(trace, Network.linear(8, start_s, s_per_byte))


@settings(max_examples=200)
@given(whole_traces(max_tensors=10), st.integers(0, 9), st.integers(0, 3))
def test_order_between_planners_in_whole_numbers(trace: Trace, a: int, b: int) -> None:
    network = Network.linear(4, a, b)
    done = {name: finish_s(trace, plan(trace, network), network) for name, plan in planners.PLANNERS.items()}
    assert done["optimal"] <= min(done["mgwfbp"], done["per_tensor"], done["single"], done["by_bytes"])
    assert done["mgwfbp"] <= min(done["per_tensor"], done["single"])
    assert done["lanes"] <= min(done["optimal"], done["asc"])
    assert done["optimal"] >= lower_bound_s(trace, network)


@given(traces(), linear_curves())
def test_order_between_planners(trace: Trace, curve: Curve) -> None:
    network = priced(curve)
    rule = finish_s(trace, planners.mgwfbp(trace, network), network)
    best = finish_s(trace, planners.optimal(trace, network), network)
    apart = finish_s(trace, planners.per_tensor(trace, network), network)
    together = finish_s(trace, planners.single(trace, network), network)
    assert best <= min(rule, apart, together) * ROUNDING
    assert rule <= min(apart, together) * ROUNDING


@given(traces(), curves)
def test_lower_bounds(trace: Trace, curve: Curve) -> None:
    network = priced(curve)
    first, last = trace.tensors[0], trace.tensors[-1]
    bound = lower_bound_s(trace, network)
    assert bound >= trace.backward_s + curve.seconds(last.nbytes)
    if len(curve.points) == 1 and curve.points[0].nbytes == 0:
        assert bound * ROUNDING >= first.ready_s + curve.seconds(trace.nbytes)
    for planner in (planners.optimal, planners.mgwfbp, planners.per_tensor, planners.single, planners.by_bytes):
        assert finish_s(trace, planner(trace, network), network) * ROUNDING >= bound


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1 << 20)), min_size=2, max_size=12),
    st.floats(0, 100),
    st.floats(0, 1e-3),
)
def test_collapse_lemma(layered: list[tuple[float, int]], first_s: float, b: float) -> None:
    """If every layer after the first to finish takes less than a, the rule sends one message."""
    tb, p = [t for t, _ in layered], [size for _, size in layered]
    a = max(tb[:-1]) * (1 + 1e-9) + 1e-9
    trace = of_layers([*tb[:-1], first_s], p)
    assert len(planners.mgwfbp(trace, Network.linear(2, a, b))) == 1


def test_no_collapse_where_one_layer_takes_the_start_up() -> None:
    trace = of_layers([4.0, 1.0, 1.0], [1, 1, 1])
    assert len(planners.mgwfbp(trace, Network.linear(2, 4.0, 1.0))) > 1
    assert len(planners.mgwfbp(trace, Network.linear(2, 4.5, 1.0))) == 1


@given(whole_traces(max_tensors=10), st.integers(0, 4))
def test_without_a_start_up_nothing_beats_sending_at_once(trace: Trace, b: int) -> None:
    network = Network.linear(4, 0, b)
    finishes = {
        finish_s(trace, planner(trace, network), network)
        for planner in (planners.per_tensor, planners.mgwfbp, planners.optimal)
    }
    assert len(finishes) == 1
    assert finishes.pop() >= lower_bound_s(trace, network)


@given(whole_traces(), st.integers(0, 9), st.integers(0, 3))
def test_asc_merges_only_what_mgwfbp_would(trace: Trace, a: int, b: int) -> None:
    """On the first decision: r < τ implies r − τ < a, so where asc merges the first two, mgwfbp does."""
    assume(len(trace) > 1)
    network = Network.linear(4, a, b)
    asc, rule = planners.asc(trace, network), planners.mgwfbp(trace, network)
    if len(asc.buckets[0].names) > 1:
        assert len(rule.buckets[0].names) > 1


def random_kinds(rng: random.Random) -> tuple[Trace, Network]:
    ready_s, tensors = 0.0, []
    for i in range(rng.randint(2, 30)):
        ready_s += rng.random() * rng.choice([0, 1e-3, 1e-2])
        dtype, itemsize = rng.choice([("float32", 4), ("bfloat16", 2), ("float64", 8)])
        tensors.append(TensorSpec(str(i), rng.randrange(1, rng.choice([100, 1 << 22])), itemsize, ready_s, dtype))
    network = Network.linear(8, rng.choice([1e-5, 1e-3, 1e-2]), rng.choice([1e-10, 1e-9, 1e-8]))
    return trace_of(tensors, 0.01), network


def test_several_dtypes_never_mix_and_never_lose_to_a_fixed_plan() -> None:
    rng = random.Random(5)
    for _ in range(100):
        trace, network = random_kinds(rng)
        plan = planners.optimal(trace, network).check(trace)
        kinds = {t.name: t.kind for t in trace.tensors}
        assert all(len({kinds[name] for name in bucket.names}) == 1 for bucket in plan.buckets)
        for rival in (planners.single, planners.per_tensor, planners.by_bytes):
            assert finish_s(trace, plan, network) <= finish_s(trace, rival(trace, network), network)


def test_several_dtypes_never_lose_to_the_published_rule() -> None:
    """§1.8 (3) says so of one dtype; with several, the rule's plan is one of those tried."""
    rng = random.Random(5)
    for _ in range(100):
        trace, network = random_kinds(rng)
        best, rule = planners.optimal(trace, network), planners.mgwfbp(trace, network)
        assert finish_s(trace, best, network) <= finish_s(trace, rule, network) * ROUNDING


def test_another_collective() -> None:
    trace = of_layers([4, 3, 1], [1, 1, 4])
    network = Network(2, {"dense": Curve.linear(4, 1), "sparse": Curve.linear(0, 1)})
    plan = planners.optimal(trace, network, collective="sparse")
    assert {bucket.collective for bucket in plan.buckets} == {"sparse"}
    assert finish_s(trace, plan, network) == 9
    assert {bucket.collective for bucket in planners.optimal(trace, network).buckets} == {"dense"}
