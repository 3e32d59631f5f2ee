"""A whole cluster: sweeps over world sizes, batches and bands."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Curve, Network, Plan, TensorSpec, Trace, simulate
from anabranch import planning as planners
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling.prediction import planned, sweep
from anabranch.tools.predict.scaling.result import ScalePoint
from shorthand import trace_of
from strategies import networks, traces

TRACE = trace_of([TensorSpec(str(i), 1 << 18, 4, 0.01 * (i + 1)) for i in range(12)], 0.06)
RING = Network.ring(4, 2e-5, 1e-10, 1e-11)
WORLD = [1, 2, 4, 16, 256, 2048, 16384]
Planners = Mapping[str, Callable[[Trace, Network], Plan]]
CHOSEN: Planners = {
    "per_tensor": planners.per_tensor,
    "optimal": planners.optimal,
    "lanes": planners.lanes,
}


def swept(
    trace: Trace,
    network: Network,
    world_sizes: Sequence[int],
    planners: Planners = CHOSEN,
    band: Sequence[Network] = (),
    **options: Any,
) -> Iterator[ScalePoint]:
    """A sweep on ``network`` as the middle of a band, which is empty by default."""
    low, high = band or (network, network)
    strategies = {name: planned(planner) for name, planner in planners.items()}
    return sweep(trace, NetworkRange("links", network, low, high, "", ""), world_sizes, strategies, **options)


def test_every_planner_at_every_size() -> None:
    points = list(swept(TRACE, RING, WORLD))
    assert [(p.world_size, p.planner) for p in points] == [(n, name) for n in WORLD for name in CHOSEN]
    for point in points:
        network = RING.at(point.world_size)
        plan = CHOSEN[point.planner](TRACE, network)
        timeline = simulate(TRACE, plan, network)
        assert (point.buckets, point.lanes) == (len(plan), plan.lanes)
        assert point.iteration_s == pytest.approx(timeline.iteration_s)
        assert point.exposed_s == pytest.approx(timeline.exposed_s, abs=1e-12)


def test_weak_scaling_identities() -> None:
    alone_s = TRACE.forward_s + TRACE.backward_s
    for point in swept(TRACE, RING, WORLD):
        assert point.speedup == pytest.approx(point.world_size * alone_s / point.iteration_s)
        assert point.efficiency == pytest.approx(alone_s / point.iteration_s)
        assert point.iteration_s == pytest.approx(alone_s + point.exposed_s)
        assert 0 < point.efficiency <= 1


def test_strong_scaling_identities() -> None:
    alone_s = TRACE.forward_s + TRACE.backward_s
    for point in swept(TRACE, RING, WORLD, scaling="strong"):
        assert point.speedup == pytest.approx(alone_s / point.iteration_s)
        assert point.efficiency == pytest.approx(point.speedup / point.world_size)
        assert point.iteration_s == pytest.approx(alone_s / point.world_size + point.exposed_s)


def test_one_rank_is_the_unit() -> None:
    for scaling in ("weak", "strong"):
        for point in swept(TRACE, RING, [1], scaling=scaling):
            assert point.speedup == pytest.approx(1)
            assert point.exposed_s == pytest.approx(0)


def test_a_network_without_cost_scales_perfectly() -> None:
    for point in swept(TRACE, Network.ring(4, 0, 0), WORLD):
        assert point.efficiency == pytest.approx(1)


@given(traces(max_numel=1 << 10), st.integers(2, 64), networks(), networks())
def test_a_band_contains_its_middle(trace: Trace, size: int, low: Network, high: Network) -> None:
    around = [low.at(size), high.at(size)] if min(low.world_size, high.world_size) > 1 else []
    for point in swept(trace, RING, [size], band=around):
        assert point.iteration_low_s <= point.iteration_s <= point.iteration_high_s
        worst, best = point.efficiencies
        assert worst <= point.efficiency * (1 + 1e-12) and point.efficiency <= best * (1 + 1e-12)


def test_a_band_is_the_same_plan_elsewhere() -> None:
    cheap, expensive = Network.ring(4, 1e-5, 1e-11), Network.ring(4, 1e-3, 1e-8)
    for point in swept(TRACE, RING, [4, 64], band=[cheap, expensive]):
        plan = CHOSEN[point.planner](TRACE, RING.at(point.world_size))
        found = [simulate(TRACE, plan, links.at(point.world_size)).iteration_s for links in (cheap, expensive)]
        assert [point.iteration_low_s, point.iteration_high_s] == pytest.approx(found)


def test_a_larger_batch_computes_longer_and_sends_as_much() -> None:
    chosen = {"small": planners.single, "large": planners.single}
    small, large = swept(replace(TRACE, meta={"batch": 10}), RING, [8], chosen, batches={"large": 30})
    alone_s = TRACE.forward_s + TRACE.backward_s
    assert large.iteration_s - large.exposed_s == pytest.approx(3 * alone_s)
    assert large.exposed_s == pytest.approx(small.exposed_s)
    assert small.samples_per_s == pytest.approx(80 / small.iteration_s)
    assert large.samples_per_s == pytest.approx(240 / large.iteration_s)
    assert large.speedup == pytest.approx(8 * 3 * alone_s / large.iteration_s)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="factor is 0"):
        recorded = replace(TRACE, meta={"batch": 10})
        list(swept(recorded, RING, [4], {"one": planners.single}, batches={"one": 0}))
    with pytest.raises(ValueError, match="scaling is 'odd'"):
        list(swept(TRACE, RING, [4], scaling="odd"))


def test_pricing_adds_costs_at_every_size() -> None:
    def pricing(here: Network) -> Network:
        return replace(here, curves={**here.curves, "bf16": Curve.linear(1e-6 * here.world_size, 0.0)})

    def cheap(trace: Trace, network: Network) -> Plan:
        return planners.optimal(trace, network, collective="bf16")

    points = list(swept(TRACE, RING, [4, 16], {"cheap": cheap, "optimal": planners.optimal}, pricing=pricing))
    by_size = {(point.world_size, point.planner): point for point in points}
    assert by_size[16, "cheap"].exposed_s == pytest.approx(16e-6)
    assert by_size[4, "cheap"].exposed_s == pytest.approx(4e-6)
    plain = {point.world_size: point for point in swept(TRACE, RING, [4, 16], {"optimal": planners.optimal})}
    assert all(by_size[size, "optimal"] == plain[size] for size in (4, 16))
