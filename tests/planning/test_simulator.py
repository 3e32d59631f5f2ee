"""The simulator against its recurrence, its twin in exact fractions, and the conservation of work."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import Contention, Curve, Network, NetworkError, Plan, PlanError, TensorSpec, Trace, simulate
from anabranch.planning.simulator import (
    SimulatedMessage,
    ends_s,
    finish_s,
    gathers,
    lower_bound_s,
    messages,
    scatters,
    schedule,
    undelayed,
)
from anabranch.values.network import InsideNodes
from oracles import Task, fifo, fluid, fluid_stages, work_done
from shorthand import bucket_of, plan_of, trace_of
from strategies import contentions, curves, plans_of, traces

CURVE = Curve.linear(2.0, 0.5)


def same_moment(count: int, nbytes: int, ready_s: float = 1.0) -> tuple[Trace, Plan]:
    """``count`` equal messages admitted together, each on a lane of its own."""
    trace = trace_of([TensorSpec(str(i), nbytes, 1, ready_s) for i in range(count)], 1.0)
    return trace, plan_of([bucket_of([str(i)], lane=i) for i in range(count)])


@st.composite
def queues(draw: st.DrawFn, lanes: int = 4, two_level: bool = False) -> list[SimulatedMessage]:
    times = st.one_of(st.just(0.0), st.integers(0, 8).map(float), st.floats(0, 10))
    inside = times if two_level else st.just(0.0)
    one = st.builds(SimulatedMessage, times, st.integers(0, lanes - 1), times, times, inside, inside)
    return draw(st.lists(one, min_size=1, max_size=9))


def conserves(queue: Sequence[SimulatedMessage], contention: Contention) -> bool:
    """Whether each message gets through exactly its transfer, at the speed the law allows, in the simulated time."""
    tasks = [Task(*message) for message in queue]
    done = work_done(tasks, schedule(queue, contention), contention)
    return done == pytest.approx([task.transfer_s for task in tasks], rel=1e-6, abs=1e-9)


# ---------------------------------------------------------------------------------------------------- one lane


@given(traces(), curves, st.data())
def test_one_lane_is_the_fifo_recurrence(trace: Trace, curve: Curve, data: st.DataObject) -> None:
    plan = data.draw(plans_of(trace, lanes=1))
    network = Network(4, {"dense": curve}, data.draw(contentions()))  # alone on the link: contention has no say
    of = {t.name: t for t in trace.tensors}
    ready = [max(of[name].ready_s for name in bucket.names) for bucket in plan.buckets]
    cost = [curve.seconds(sum(of[name].nbytes for name in bucket.names)) for bucket in plan.buckets]
    ends = [span.end_s for span in simulate(trace, plan, network).communication]
    assert ends == pytest.approx(fifo(ready, cost), rel=1e-9)


@given(traces(), curves, st.floats(0, 2), st.data())
def test_a_message_delays_what_is_computed_after_it(
    trace: Trace, curve: Curve, delay_s: float, data: st.DataObject
) -> None:
    plan = data.draw(plans_of(trace, lanes=1))
    network = Network(4, {"dense": curve}, delays={"dense": delay_s})
    of = {t.name: t for t in trace.tensors}
    ready = [i * delay_s + max(of[name].ready_s for name in b.names) for i, b in enumerate(plan.buckets)]
    cost = [curve.seconds(sum(of[name].nbytes for name in b.names)) for b in plan.buckets]
    ends = fifo(ready, cost)
    assert finish_s(trace, plan, network) == pytest.approx(max(*ends, trace.backward_s + len(plan) * delay_s), rel=1e-9)
    timeline = simulate(trace, plan, network)
    assert [span.end_s for span in timeline.communication] == pytest.approx(ends, rel=1e-9)
    assert timeline.finish_s == pytest.approx(finish_s(trace, plan, network), rel=1e-9)
    spans = [span for span in timeline.compute if span.name.startswith("backward ")]
    late = [span.end_s - t.ready_s for span, t in zip(spans, trace.tensors, strict=True)]
    assert late[0] == 0 and all(a <= b + 1e-9 for a, b in pairwise(late))  # none waits for what is launched after it
    # recorded under this plan, the trace gives the times without delays again
    recorded = replace(
        trace, tensors=tuple(replace(t, ready_s=s.end_s) for t, s in zip(trace.tensors, spans, strict=True))
    )
    found = undelayed(recorded, plan, network)
    assert [t.ready_s for t in found.tensors] == pytest.approx([t.ready_s for t in trace.tensors], rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------ simultaneous messages


@settings(max_examples=300)
@given(queues(), contentions())
def test_the_schedule_is_its_twins(queue: list[SimulatedMessage], contention: Contention) -> None:
    want = fluid([Task(*message) for message in queue], contention)
    got = schedule(queue, contention)
    assert [begin for begin, _ in got] == pytest.approx([begin for begin, _ in want], rel=1e-9, abs=1e-9)
    assert [end for _, end in got] == pytest.approx([end for _, end in want], rel=1e-9, abs=1e-9)


@settings(max_examples=300)
@given(queues(two_level=True), contentions())
def test_the_stages_of_two_level_messages_are_their_twins(
    queue: list[SimulatedMessage], contention: Contention
) -> None:
    want = fluid_stages([Task(*message) for message in queue], contention)
    between = schedule(queue, contention)
    got = list(zip(scatters(queue), between, gathers(queue, between), strict=True))
    for ours, twins in zip(got, want, strict=True):
        for stage, twin in zip(ours, twins, strict=True):
            assert stage == pytest.approx(twin, rel=1e-9, abs=1e-9)
    assert ends_s(queue, contention) == pytest.approx([stages[-1][1] for stages in want], rel=1e-9, abs=1e-9)


@settings(max_examples=200)
@given(queues(), contentions())
def test_work_is_conserved(queue: list[SimulatedMessage], contention: Contention) -> None:
    assert conserves(queue, contention)


def test_lanes_that_share_no_bandwidth_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [SimulatedMessage(0.0, lane, 0.5, 4.0) for lane in range(3)]
    assert conserves(queue, Contention.law(0.5))
    monkeypatch.setattr(Contention, "slowdown", lambda self, k: 1.0)
    assert not conserves(queue, Contention.law(0.5))
    assert conserves(queue, Contention.law(0.0))  # where they really do not slow each other, all is well


def test_a_forgotten_link_cap_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [SimulatedMessage(0.0, lane, 0.5, 4.0) for lane in range(3)]
    capped = Contention.law(0.1, link_cap=1.5)
    assert conserves(queue, capped)
    monkeypatch.setattr(Contention, "slowdown", lambda self, k: 1 + 0.1 * (k - 1))
    assert not conserves(queue, capped)


@given(st.floats(0, 3), st.floats(0, 10), st.floats(0, 1), st.integers(0, 100))
def test_two_together_take_a_plus_one_plus_eta_b_m(eta: float, a: float, b: float, nbytes: int) -> None:
    trace, plan = same_moment(2, nbytes)
    timeline = simulate(trace, plan, Network.linear(8, a, b, eta=eta))
    for span in timeline.communication:
        assert span.start_s == 1.0
        assert span.seconds == pytest.approx(a + (1 + eta) * b * nbytes)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_m_together(m: int) -> None:
    trace, plan = same_moment(m, 100)
    law = finish_s(trace, plan, Network.linear(8, 2, 0.25, eta=0.5))
    assert law == 1 + 2 + (1 + 0.5 * (m - 1)) * 25
    capped = finish_s(trace, plan, Network.linear(8, 2, 0.25, eta=0.0, link_cap=2.0))
    assert capped == 1 + 2 + max(1.0, m / 2) * 25
    table = Contention((1.0, 1.0, 1.5))
    tabled = finish_s(trace, plan, Network(8, {"dense": Curve.linear(2, 0.25)}, table))
    assert tabled == 1 + 2 + {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 8: 4.0}[m] * 25


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_a_full_link_without_start_up_gains_nothing(sizes: list[int]) -> None:
    """η = 1, a = 0: messages admitted together finish, in all, when they would one after the other."""
    trace = trace_of([TensorSpec(str(i), n, 1, 1.0) for i, n in enumerate(sizes)], 0.0)
    network = Network.linear(8, 0.0, 0.5, eta=1.0)
    apart = finish_s(trace, plan_of([bucket_of([str(i)], lane=i) for i in range(len(sizes))]), network)
    in_turn = finish_s(trace, plan_of([bucket_of([str(i)]) for i in range(len(sizes))]), network)
    assert apart == pytest.approx(in_turn)
    assert in_turn == 1.0 + 0.5 * sum(sizes)


@given(queues())
def test_eta_zero_is_no_slowdown(queue: list[SimulatedMessage]) -> None:
    for message, (begin, end) in zip(queue, schedule(queue, Contention.law(0.0)), strict=True):
        assert end - begin == pytest.approx(message.start_s + message.transfer_s, abs=1e-9)


@given(queues(), contentions())
def test_the_launch_rule(queue: list[SimulatedMessage], contention: Contention) -> None:
    """In order across lanes, never before the gradient, one message per lane at a time."""
    got = schedule(queue, contention)
    launch_s = 0.0
    free_s = dict.fromkeys(range(4), 0.0)
    for message, (begin, end) in zip(queue, got, strict=True):
        launch_s = max(launch_s, message.ready_s)
        assert begin == pytest.approx(max(launch_s, free_s[message.lane]))
        assert end >= begin + message.start_s - 1e-9
        free_s[message.lane] = end


def test_a_bucket_waits_for_the_launch_before_it() -> None:
    trace = trace_of([TensorSpec("early", 1, 1, 1.0), TensorSpec("late", 1, 1, 5.0)], 0.0)
    network = Network.linear(2, 1.0, 0.0)
    late_first = simulate(trace, plan_of([bucket_of(["late"], 0), bucket_of(["early"], 1)]), network)
    assert [(s.start_s, s.end_s) for s in late_first.communication] == [(5.0, 6.0), (5.0, 6.0)]
    early_first = simulate(trace, plan_of([bucket_of(["early"], 0), bucket_of(["late"], 1)]), network)
    assert [(s.start_s, s.end_s) for s in early_first.communication] == [(1.0, 2.0), (5.0, 6.0)]


def test_a_lane_may_stay_empty() -> None:
    trace, _ = same_moment(1, 10)
    assert finish_s(trace, plan_of([bucket_of(["0"], lane=7)]), Network.linear(2, 1.0, 0.5)) == 7.0


@given(traces(max_tensors=6), contentions(), st.data())
def test_no_plan_beats_the_lower_bound(trace: Trace, contention: Contention, data: st.DataObject) -> None:
    plan = data.draw(plans_of(trace))
    network = Network(8, {"dense": data.draw(curves)}, contention)
    assert finish_s(trace, plan, network) * (1 + 1e-9) >= lower_bound_s(trace, network, plan.lanes)


@given(traces(max_tensors=6), contentions(), st.data())
def test_no_plan_of_flat_and_two_level_messages_beats_the_lower_bound(
    trace: Trace, contention: Contention, data: st.DataObject
) -> None:
    drawn = data.draw(plans_of(trace))
    kinds = [data.draw(st.sampled_from(["dense", "dense@nodes"])) for _ in drawn.buckets]
    plan = Plan(tuple(replace(b, collective=kind) for b, kind in zip(drawn.buckets, kinds, strict=True)))
    inside = data.draw(st.none() | st.builds(InsideNodes, st.just(2), curves, curves))
    network = Network(8, {kind: data.draw(curves) for kind in ("dense", "dense@nodes")}, contention, inside=inside)
    assert finish_s(trace, plan, network) * (1 + 1e-9) >= lower_bound_s(trace, network, plan.lanes)


# -------------------------------------------------------------------------------------------------- the timeline


@given(traces(), curves, contentions(), st.data())
def test_the_timeline_of_a_step(trace: Trace, curve: Curve, contention: Contention, data: st.DataObject) -> None:
    plan, network = data.draw(plans_of(trace)), Network(16, {"dense": curve}, contention)
    timeline = simulate(trace, plan, network)
    assert timeline == simulate(trace, plan, network)  # deterministic, to the last bit
    assert timeline.finish_s == finish_s(trace, plan, network)
    assert timeline.iteration_s == pytest.approx(trace.forward_s + timeline.finish_s)
    assert timeline.exposed_s == pytest.approx(timeline.finish_s - trace.backward_s, rel=1e-6, abs=1e-6)
    assert sum(span.seconds for span in timeline.compute) == pytest.approx(trace.forward_s + trace.backward_s)
    assert [span.track for span in timeline.communication] == [f"lane {bucket.lane}" for bucket in plan.buckets]
    assert timeline.meta == {"source": "simulated", "world_size": 16}


def test_the_counter_example_as_a_timeline() -> None:
    trace = trace_of([TensorSpec("3", 4, 1, 1.0), TensorSpec("2", 1, 1, 4.0), TensorSpec("1", 1, 1, 8.0)], 2.0)
    timeline = simulate(trace, Plan.from_cuts(trace, [1]), Network.linear(2, 4, 1))
    assert [(s.start_s, s.end_s) for s in timeline.communication] == [(1.0, 9.0), (9.0, 15.0)]
    assert (timeline.finish_s, timeline.iteration_s, timeline.exposed_s, timeline.overlap) == (15, 17, 7, 0.5)
    assert timeline.compute[0].name == "forward"


def test_stages_of_successive_two_level_buckets_overlap_and_have_a_track_of_their_own() -> None:
    trace = trace_of([TensorSpec(name, 4, 1, ready) for name, ready in zip("abc", (1.0, 2.0, 3.0), strict=True)], 1.0)
    inside = InsideNodes(2, Curve.linear(1.0, 0.25), Curve.linear(1.0, 0.0))
    network = Network(4, {"dense": CURVE, "dense@nodes": Curve.linear(0.0, 1.0)}, inside=inside)
    plan = plan_of([bucket_of("a", 0, "dense@nodes"), bucket_of("b", 0, "dense"), bucket_of("c", 0, "dense@nodes")])
    timeline = simulate(trace, plan, network)
    assert [(s.track, s.name.partition(": ")[2], s.start_s, s.end_s) for s in timeline.communication] == [
        ("lane 0", "dense@nodes, 1 tensors, a", 3.0, 7.0),
        ("inside 0", "dense@nodes, 1 tensors, a, scatter", 1.0, 3.0),
        ("inside 0", "dense@nodes, 1 tensors, a, gather", 7.0, 8.0),
        ("lane 0", "dense, 1 tensors, b", 7.0, 11.0),
        ("lane 0", "dense@nodes, 1 tensors, c", 11.0, 15.0),
        ("inside 0", "dense@nodes, 1 tensors, c, scatter", 3.0, 5.0),
        ("inside 0", "dense@nodes, 1 tensors, c, gather", 15.0, 16.0),
    ]
    assert [span.track for span in timeline.messages] == 3 * ["lane 0"]
    assert timeline.finish_s == finish_s(trace, plan, network) == 16.0
    assert timeline.exposed_s == 13.0
    # where nothing is known of what is inside nodes, it costs nothing
    assert [s.track for s in simulate(trace, plan, replace(network, inside=None)).communication] == 3 * ["lane 0"]


def test_each_bucket_pays_its_own_collective() -> None:
    trace = trace_of([TensorSpec("a", 10, 1, 0.0), TensorSpec("b", 10, 1, 0.0)], 0.0)
    network = Network(2, {"dense": CURVE, "sparse": Curve.linear(1.0, 0.0)})
    plan = plan_of([bucket_of(["a"]), bucket_of(["b"], 0, "sparse")])
    assert [m.start_s + m.transfer_s for m in messages(trace, plan, network)] == [7.0, 1.0]
    with pytest.raises(NetworkError, match="other"):
        simulate(trace, plan_of([bucket_of(["a", "b"], 0, "other")]), network)
    with pytest.raises(PlanError, match="leaves out b"):
        simulate(trace, plan_of([bucket_of(["a"])]), network)


def test_a_thousand_messages_on_many_lanes_agree_with_the_law() -> None:
    """Too many for the twin: work is conserved, and nothing drifts."""
    rng = random.Random(6)
    queue = [
        SimulatedMessage(rng.random() * 50, rng.randrange(4), rng.random() * 0.1, rng.random()) for _ in range(400)
    ]
    assert conserves(queue, Contention.law(0.5, link_cap=1.8))


@pytest.mark.parametrize("eta", [0.0, 1e6])
def test_extreme_contention_ends(eta: float) -> None:
    rng = random.Random(7)
    queue = [SimulatedMessage(rng.random(), rng.randrange(8), 0.0, rng.choice([0.0, 1e-12, 1.0])) for _ in range(200)]
    for begin, end in schedule(queue, Contention.law(eta)):
        assert 0 <= begin <= end < float("inf")
