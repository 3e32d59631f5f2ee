"""The planner of sharded steps against all plans there are, and on models of a hundred blocks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import Network, PlanError
from anabranch.fsdp.planning import Block, Links, ShardedTrace, ShardingPlan, peak_nbytes, plan, planner, step_s
from anabranch.fsdp.planning.sharded_step import Finish, walk
from fsdp.planning.twin import every_plan, fastest_s, links_of, sharded_traces

MIB = 1 << 20


@given(sharded_traces(max_blocks=5), links_of())
@settings(max_examples=200, deadline=None)
def test_without_a_bound_it_is_the_fastest_of_all(trace: ShardedTrace, links: Links) -> None:
    assert step_s(trace, plan(trace, links), links) == pytest.approx(fastest_s(trace, links, None), rel=1e-9)


@given(sharded_traces(max_blocks=4), links_of(), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_within_a_bound_it_is_the_fastest_that_fits(trace: ShardedTrace, links: Links, memory_nbytes: int) -> None:
    fastest = fastest_s(trace, links, memory_nbytes)
    if fastest == float("inf"):
        with pytest.raises(PlanError, match="a unit per block, each freed after forward, needs"):
            plan(trace, links, memory_nbytes)
        return
    found = plan(trace, links, memory_nbytes)
    assert peak_nbytes(trace, found) <= memory_nbytes
    assert step_s(trace, found, links) == pytest.approx(fastest, rel=1e-9)


@given(sharded_traces(max_blocks=4), links_of(), st.one_of(st.none(), st.integers(0, 60)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_unit_per_block_is_the_fastest_of_those(
    trace: ShardedTrace, links: Links, memory_nbytes: int | None, searching: bool
) -> None:
    """Also where not all can be tried."""
    fits = (p for p in every_plan(trace) if memory_nbytes is None or peak_nbytes(trace, p) <= memory_nbytes)
    fastest = min((step_s(trace, p, links) for p in fits if len(p) == len(trace)), default=float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FEW", 0 if searching else planner.FEW)
        if fastest == float("inf"):
            with pytest.raises(PlanError, match="a unit per block, each freed after forward, needs"):
                plan(trace, links, memory_nbytes, per_block=True)
            return
        found = plan(trace, links, memory_nbytes, per_block=True)
    assert len(found) == len(trace) and (memory_nbytes is None or peak_nbytes(trace, found) <= memory_nbytes)
    assert step_s(trace, found, links) <= (1.1 if searching else 1 + 1e-9) * fastest + 1e-9


@given(sharded_traces(max_blocks=5), links_of(), st.one_of(st.none(), st.integers(20, 200)))
@settings(max_examples=100, deadline=None)
def test_the_search_alone_is_close_to_the_fastest(trace: ShardedTrace, links: Links, memory_nbytes: int | None) -> None:
    """As for many blocks, where not all plans can be tried."""
    fastest = fastest_s(trace, links, memory_nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FEW", 0)
        try:
            found = plan(trace, links, memory_nbytes)
        except PlanError:  # as the exact one does, where a unit per block does not fit
            assert memory_nbytes is not None
            per_block = ShardingPlan.per_block([block.name for block in trace.blocks])
            assert peak_nbytes(trace, per_block) > memory_nbytes
            return
    assert step_s(trace, found, links) <= 1.1 * fastest + 1e-9


def model(count: int) -> ShardedTrace:
    """Blocks of many sizes, as in an image model."""
    blocks = [Block(f"b{i}", (1 + i % 7) * MIB, (1 + i % 7) * MIB, 1e-3, 2e-3) for i in range(count)]
    return ShardedTrace(tuple(blocks), 8 * MIB, 8 * MIB, 1e-3, 2e-3, 5e-3)


@pytest.mark.parametrize("memory_nbytes", [None, 150 * MIB])
def test_a_hundred_blocks_take_few_simulations_and_never_more_than_a_unit_per_block(
    memory_nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = model(100)
    links = Links(Network.ring(4, 100e-6, 1e-9), Network.ring(2, 50e-6, 2e-9))
    simulated: list[Finish] = []

    def counted(*step: Any) -> Finish:
        simulated.append(walk(*step))
        return simulated[-1]

    monkeypatch.setattr(planner, "walk", counted)
    found = plan(trace, links, memory_nbytes)
    assert 1000 < len(simulated) < 2 * planner.TRIALS
    assert memory_nbytes is None or peak_nbytes(trace, found) <= memory_nbytes
    default = ShardingPlan.per_block([block.name for block in trace.blocks])
    assert step_s(trace, found, links) < 0.95 * step_s(trace, default, links)


def test_equal_plans_are_told_apart_by_memory() -> None:
    """Where messages cost nothing, nothing is gained by keeping parameters."""
    trace = model(5)
    found = plan(trace, Links(Network.linear(2, 0.0, 0.0)), memory_nbytes=1 << 40)
    assert peak_nbytes(trace, found) == min(peak_nbytes(trace, other) for other in every_plan(trace))
