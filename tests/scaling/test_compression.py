"""Strategies with sparse buckets: their densities, and which gradients they leave dense."""

from dataclasses import replace

from anabranch import Network
from anabranch.scaling.compression import dense_only, highest_density, sparse_strategies
from cli.nouns import small_trace

RING = Network.ring(8, 5e-5, 8e-10)


def test_messages_need_room_for_the_greatest_density_that_may_be_chosen() -> None:
    assert highest_density("oktopk:0.01") == highest_density("lean:0.01") == 0.01
    assert highest_density("oktopk") == highest_density("lean") == 0.2  # the top of the ladder
    assert highest_density("optimal") == 1.0


def test_only_float32_travels_sparsely() -> None:
    trace = small_trace()
    assert dense_only(trace) == []
    first = replace(trace.tensors[0], dtype="bfloat16", itemsize=2)
    assert dense_only(replace(trace, tensors=(first, *trace.tensors[1:]))) == [first.name]


def test_every_density_that_may_be_chosen_has_a_cost() -> None:
    strategies = sparse_strategies(["oktopk", "oktopk:0.03", "lean:0.03"], small_trace(), RING)
    assert list(strategies.planners) == ["oktopk", "oktopk:0.03", "lean:0.03"]
    priced = strategies.priced(RING.at(64))
    assert {"dense", "oktopk:0.01", "oktopk:0.2", "oktopk:0.03"} <= set(priced.curves) and priced.world_size == 64
    for planner in strategies.planners.values():
        planner(small_trace(), priced).check(small_trace())


def test_without_compression_nothing_is_added() -> None:
    none = sparse_strategies([], small_trace(), RING)
    assert none.priced(RING) == RING and not none.planners and not none.assumptions
