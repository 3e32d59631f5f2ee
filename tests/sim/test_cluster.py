"""A whole cluster: sweeps, jitter and stragglers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Curve, Network, Plan, TensorSpec, Trace, planners, simulate
from anabranch.sim import ScalePoint, slowest_rank, sweep
from shorthand import trace_of
from strategies import traces

TRACE = trace_of([TensorSpec(str(i), 1 << 18, 4, 0.01 * (i + 1)) for i in range(12)], 0.06)
RING = Network.ring(4, 2e-5, 1e-10, 1e-11)
WORLD = [1, 2, 4, 16, 256, 2048, 16384]
CHOSEN: dict[str, Callable[[Trace, Network], Plan]] = {
    "per_tensor": planners.per_tensor,
    "optimal": planners.optimal,
    "lanes": planners.lanes,
}


def test_every_planner_at_every_size() -> None:
    points = list(sweep(TRACE, RING, WORLD, CHOSEN))
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
    for point in sweep(TRACE, RING, WORLD, CHOSEN):
        assert point.speedup == pytest.approx(point.world_size * alone_s / point.iteration_s)
        assert point.efficiency == pytest.approx(alone_s / point.iteration_s)
        assert point.iteration_s == pytest.approx(alone_s + point.exposed_s)
        assert 0 < point.efficiency <= 1


def test_strong_scaling_identities() -> None:
    alone_s = TRACE.forward_s + TRACE.backward_s
    for point in sweep(TRACE, RING, WORLD, CHOSEN, scaling="strong"):
        assert point.speedup == pytest.approx(alone_s / point.iteration_s)
        assert point.efficiency == pytest.approx(point.speedup / point.world_size)
        assert point.iteration_s == pytest.approx(alone_s / point.world_size + point.exposed_s)


def test_one_rank_is_the_unit() -> None:
    for scaling in ("weak", "strong"):
        for point in sweep(TRACE, RING, [1], CHOSEN, scaling=scaling):
            assert point.speedup == pytest.approx(1)
            assert point.exposed_s == pytest.approx(0)


def test_a_network_without_cost_scales_perfectly() -> None:
    for point in sweep(TRACE, Network.ring(4, 0, 0), WORLD, CHOSEN):
        assert point.efficiency == pytest.approx(1)


def test_planners_see_the_quiet_trace() -> None:
    seen: list[Trace] = []

    def spy(trace: Trace, network: Network) -> Plan:
        seen.append(trace)
        return planners.single(trace, network)

    noisy = list(sweep(TRACE, RING, [8], {"spy": spy}, jitter=0.2, stragglers=1, straggler_factor=2.0))
    assert seen == [TRACE]
    real = slowest_rank(TRACE, 8, 0.2, 1, 2.0)
    assert noisy[0].iteration_s == pytest.approx(
        simulate(real, planners.single(TRACE, RING.at(8)), RING.at(8)).iteration_s
    )


def test_jitter_is_seeded() -> None:
    def swept(seed: int) -> list[ScalePoint]:
        return list(sweep(TRACE, RING, [4, 64], CHOSEN, jitter=0.1, seed=seed))

    assert swept(1) == swept(1)
    assert swept(1) != swept(2)
    assert slowest_rank(TRACE, 16, 0.3, seed=5) == slowest_rank(TRACE, 16, 0.3, seed=5)


def test_without_jitter_a_sweep_is_the_quiet_sweep() -> None:
    assert list(sweep(TRACE, RING, WORLD, CHOSEN, jitter=0.0, seed=9)) == list(sweep(TRACE, RING, WORLD, CHOSEN))


@given(traces(), st.integers(1, 6), st.integers(0, 99))
def test_equal_ranks_are_one_rank(trace: Trace, world_size: int, seed: int) -> None:
    same = slowest_rank(trace, world_size, 0.0, seed=seed)
    scale = trace.forward_s + trace.backward_s
    assert same.forward_s == trace.forward_s
    assert [t.ready_s for t in same.tensors] == pytest.approx([t.ready_s for t in trace.tensors], abs=1e-12 * scale)
    assert [t.nbytes for t in same.tensors] == [t.nbytes for t in trace.tensors]


@given(traces(), st.integers(1, 6), st.floats(0, 0.5), st.integers(0, 99))
def test_more_ranks_are_never_faster(trace: Trace, world_size: int, jitter: float, seed: int) -> None:
    """The ranks of a smaller world are the first of a larger one, so its last rank can only be later."""
    fewer, more = (slowest_rank(trace, n, jitter, seed=seed) for n in (world_size, world_size + 3))
    for one, other in zip(fewer.tensors, more.tensors, strict=True):
        assert fewer.forward_s + one.ready_s <= (more.forward_s + other.ready_s) * (1 + 1e-12)


def test_jitter_is_log_normal_per_piece() -> None:
    one = slowest_rank(TRACE, 1, 0.25, seed=3)
    z = np.random.default_rng(3).standard_normal(13)
    assert one.forward_s == pytest.approx(TRACE.forward_s * np.exp(0.25 * z[0]))
    assert [t.ready_s for t in one.tensors] == pytest.approx(list(np.cumsum(0.01 * np.exp(0.25 * z[1:]))))


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_straggler_delays_everyone(factor: float) -> None:
    late = slowest_rank(TRACE, 8, 0.0, 1, factor)
    assert late.forward_s == pytest.approx(factor * TRACE.forward_s)
    assert [t.ready_s for t in late.tensors] == pytest.approx([factor * t.ready_s for t in TRACE.tensors])
    assert slowest_rank(TRACE, 8, 0.0, 8, factor) == late  # the last rank counts, not how many there are
    quiet, slow = (
        next(iter(sweep(TRACE, RING, [8], {"one": planners.single}, **options)))  # type: ignore[arg-type]
        for options in ({}, {"stragglers": 1, "straggler_factor": factor})
    )
    assert slow.iteration_s > quiet.iteration_s
    assert slow.efficiency < quiet.efficiency


def test_a_fast_rank_delays_nobody() -> None:
    fast = slowest_rank(TRACE, 8, 0.0, 1, 0.5)
    assert fast.forward_s == TRACE.forward_s
    assert [t.ready_s for t in fast.tensors] == pytest.approx([t.ready_s for t in TRACE.tensors])


def test_refusals() -> None:
    for options in ({"jitter": -0.1}, {"jitter": float("nan")}, {"straggler_factor": 0.0}, {"stragglers": 9},
                    {"stragglers": -1}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            slowest_rank(TRACE, 8, **{"jitter": 0.0, **options})  # type: ignore[arg-type]


def test_pricing_adds_costs_at_every_size() -> None:
    def pricing(here: Network) -> Network:
        return replace(here, curves={**here.curves, "cheap": Curve.linear(1e-6 * here.world_size, 0.0)})

    def cheap(trace: Trace, network: Network) -> Plan:
        return planners.optimal(trace, network, collective="cheap")

    points = list(sweep(TRACE, RING, [4, 16], {"cheap": cheap, "optimal": planners.optimal}, pricing=pricing))
    by_size = {(point.world_size, point.planner): point for point in points}
    assert by_size[16, "cheap"].exposed_s == pytest.approx(16e-6)
    assert by_size[4, "cheap"].exposed_s == pytest.approx(4e-6)
    plain = {point.world_size: point for point in sweep(TRACE, RING, [4, 16], {"optimal": planners.optimal})}
    assert all(by_size[size, "optimal"] == plain[size] for size in (4, 16))
