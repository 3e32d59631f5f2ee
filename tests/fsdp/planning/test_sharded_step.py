"""The simulator of a sharded step against its twin, and on steps whose times can be told by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import Network, PlanError
from anabranch.fsdp.planning import Block, Links, ShardedTrace, ShardingPlan, Unit, peak_nbytes, simulate, step_s
from anabranch.values.timeline import Timeline
from fsdp.planning.twin import links_of, plans_of, sharded_traces, twin_step_s

FAST = Links(Network.linear(2, 0.0, 0.0))


def trace_of(count: int, nbytes: int = 10, forward_s: float = 1.0, backward_s: float = 2.0) -> ShardedTrace:
    return ShardedTrace(tuple(Block(f"b{i}", nbytes, nbytes, forward_s, backward_s) for i in range(count)))


def links(gather_s_per_byte: float, between: Network | None = None) -> Links:
    """A reduce-scatter costs as much as a gather."""
    return Links(Network.linear(2, 0.0, 2 * gather_s_per_byte), between)


def spans(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    return [(span.track, span.name, span.start_s, span.end_s) for span in timeline.spans]


@given(st.data())
@settings(max_examples=400)
def test_it_agrees_with_the_twin(data: st.DataObject) -> None:
    trace, links = data.draw(sharded_traces()), data.draw(links_of())
    plan = data.draw(plans_of(trace))
    assert step_s(trace, plan, links) == twin_step_s(trace, plan, links)


@given(st.data())
@settings(max_examples=100)
def test_a_timeline_has_the_length_of_the_step_and_no_track_does_two_things_at_once(data: st.DataObject) -> None:
    trace, links = data.draw(sharded_traces()), data.draw(links_of())
    plan = data.draw(plans_of(trace))
    timeline = simulate(trace, plan, links)
    assert timeline.iteration_s == step_s(trace, plan, links) or trace.nbytes == 0 == trace.compute_s
    for track in {span.track for span in timeline.spans}:
        mine = sorted((span.start_s, span.end_s) for span in timeline.spans if span.track == track)
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(mine))
    assert sum(span.seconds for span in timeline.compute) == trace.compute_s


@given(st.data())
@settings(max_examples=200)
def test_keeping_parameters_and_prefetching_farther_never_slow_a_step_that_frees_nothing(data: st.DataObject) -> None:
    """What the planner relies on."""
    trace, links = data.draw(sharded_traces()), data.draw(links_of())
    plan = data.draw(plans_of(trace))
    kept = ShardingPlan(tuple(Unit(unit.names, False) for unit in plan.units), plan.prefetch)
    farther = ShardingPlan(kept.units, plan.prefetch + 1)
    assert step_s(trace, farther, links) <= step_s(trace, kept, links) <= step_s(trace, plan, links)


def test_a_step_that_sends_nothing_only_computes() -> None:
    trace = trace_of(3)
    assert step_s(trace, ShardingPlan.per_block(["b0", "b1", "b2"]), FAST) == trace.compute_s == 9


def test_by_hand_all_kept() -> None:
    """Gathers of 5 s before a forward of 1 s each, then backward of 2 s each, each followed by a reduction of 5 s."""
    timeline = simulate(trace_of(2), ShardingPlan.per_block(["b0", "b1"], reshard=False), links(0.5))
    assert spans(timeline) == [
        ("inside", "gather b0", -11, -6),
        ("inside", "gather b1", -6, -1),
        ("compute", "forward b0", -6, -5),
        ("compute", "forward b1", -1, 0),
        ("compute", "backward b1", 0, 2),
        ("inside", "reduce b1", 2, 7),
        ("compute", "backward b0", 2, 4),
        ("inside", "reduce b0", 7, 12),
    ]
    assert timeline.exposed_s == 20 - 1 - 2  # behind the forward and the backward of b0


def test_by_hand_a_freed_unit_is_gathered_again_before_its_backward() -> None:
    timeline = simulate(trace_of(2), ShardingPlan((Unit(("b0",), True), Unit(("b1",), False))), links(0.1))
    again = [span for span in timeline.spans if span.name == "gather b0"]
    assert [(span.start_s, span.end_s) for span in again] == [(-3, -2), (-1, 0)]  # as soon as b1 has its parameters


def test_backward_waits_for_the_reduction_before_the_last_one() -> None:
    timeline = simulate(trace_of(3), ShardingPlan.per_block(["b0", "b1", "b2"], reshard=False), links(0.5))
    begins = {span.name: span.start_s for span in timeline.compute}
    assert (begins["backward b1"], begins["backward b0"]) == (2, 7)  # after the reduction of b2, from 2 to 7 s


def test_a_unit_without_gradients_delays_no_gather() -> None:
    blocks = (Block("b0", 7, 7, 0.0, 0.0), Block("b1", 0, 0, 0.0, 0.0), Block("b2", 4, 0, 0.0, 0.0))
    trace, plan = (
        ShardedTrace(blocks, loss_s=1.0),
        ShardingPlan((Unit(("b0",)), Unit(("b1",), False), Unit(("b2",), False))),
    )
    timeline = simulate(trace, plan, links(1.0))
    assert step_s(trace, plan, links(1.0)) == twin_step_s(trace, plan, links(1.0))
    assert [span.start_s for span in timeline.spans if span.name == "gather b0"] == [-12, -1]  # beside the loss


def test_between_nodes_each_rank_sends_its_shard() -> None:
    between = Network.linear(2, 1.0, 0.4)
    timeline = simulate(trace_of(1), ShardingPlan.per_block(["b0"], reshard=False), links(0.1, between))
    (average,) = [span for span in timeline.spans if span.track == "between"]
    assert (average.start_s, average.end_s) == (3, 3 + 1 + 0.4 * 5)


def test_one_rank_inside_sends_nothing_there() -> None:
    alone = Links(Network.linear(1, 9.0, 9.0), Network.linear(2, 1.0, 0.0))
    timeline = simulate(trace_of(1), ShardingPlan.per_block(["b0"]), alone)
    assert [span.track for span in timeline.communication] == ["between"]


def test_measured_gathers_are_used() -> None:
    points = {"dense": [(1, 10.0), (100, 10.0)], "all_gather": [(1, 3.0), (100, 3.0)]}
    network = Network.measured(2, points)
    assert (Links(network).gather_s(50), Links(network).reduce_s(50)) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("reshard", "prefetch", "expected"),
    [
        (False, 1, 10 + 20 + 40 + 40),  # all kept, and b2's buffer; as much with b2's gradients
        (True, 1, 40 + 20 + 40),  # b2 with its gradients, and b1 on its way
        (True, 2, 40 + 20 + 10 + 40),
    ],
)
def test_memory_by_hand(reshard: bool, prefetch: int, expected: int) -> None:
    sizes = {"b0": 10, "b1": 20, "b2": 40}
    trace = ShardedTrace(tuple(Block(name, nbytes, nbytes, 1.0, 2.0) for name, nbytes in sizes.items()))
    assert peak_nbytes(trace, ShardingPlan.from_cuts(list(sizes), [1, 2], reshard, prefetch)) == expected


@given(st.data())
@settings(max_examples=100)
def test_memory_is_at_least_the_largest_unit_and_grows_with_prefetch(data: st.DataObject) -> None:
    trace = data.draw(sharded_traces())
    plan = data.draw(plans_of(trace))
    farther = ShardingPlan(plan.units, plan.prefetch + 1)
    whole = ShardingPlan.from_cuts(plan.names, [], reshard=False)
    per_block = ShardingPlan.per_block(plan.names)
    assert peak_nbytes(trace, plan) <= peak_nbytes(trace, farther)
    assert peak_nbytes(trace, whole) >= trace.nbytes + sum(block.nbytes for block in trace.blocks)
    assert peak_nbytes(trace, per_block) >= max(2 * block.nbytes for block in trace.blocks)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has b1 where the trace has nothing more"):
        step_s(trace_of(1), ShardingPlan.per_block(["b0", "b1"]), FAST)
