"""Ranks that differ: the expected last one, stragglers, and one pool for all world sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import TensorSpec, Trace
from anabranch.planning.simulator import LEAST_RANKS, WORLDS, slowest_ranks
from shorthand import trace_of
from strategies import traces

TRACE = trace_of([TensorSpec(str(i), 1 << 18, 4, 0.01 * (i + 1)) for i in range(12)], 0.06)


def ends(trace: Trace) -> list[float]:
    """The end of forward and every gradient's instant, from the start of the step."""
    return [trace.forward_s, *(trace.forward_s + tensor.ready_s for tensor in trace.tensors)]


def naive(
    trace: Trace, size: int, largest: int, jitter: float, stragglers: int, factor: float, seed: int
) -> list[float]:
    """One rank at a time, one world at a time."""
    rng = np.random.default_rng(seed)
    work = np.diff(ends(trace), prepend=0.0)
    pool = [np.cumsum(work * np.exp(jitter * rng.standard_normal(len(work)))) for _ in range(max(largest, LEAST_RANKS))]
    worlds = [pool[low : low + size] for low in range(0, len(pool) - size + 1, size)][:WORLDS]
    last = [np.max([r * (factor if i < stragglers else 1) for i, r in enumerate(world)], axis=0) for world in worlds]
    return list(np.mean(last, axis=0))


@pytest.mark.parametrize("size", [1, 3, 8, 700, 1024])
def test_a_pool_is_its_naive_twin(size: int) -> None:
    found = slowest_ranks(TRACE, [size, 1024], 0.3, 1, 1.7, seed=5)[size]
    assert ends(found) == pytest.approx(naive(TRACE, size, 1024, 0.3, 1, 1.7, 5))


def test_the_same_seed_gives_the_same_ranks() -> None:
    assert slowest_ranks(TRACE, [4, 16], 0.3, seed=5) == slowest_ranks(TRACE, [4, 16], 0.3, seed=5)
    assert slowest_ranks(TRACE, [4, 16], 0.3, seed=5) != slowest_ranks(TRACE, [4, 16], 0.3, seed=6)


@given(traces(), st.integers(1, 6), st.integers(0, 99))
def test_equal_ranks_are_one_rank(trace: Trace, world_size: int, seed: int) -> None:
    same = slowest_ranks(trace, [world_size], 0.0, seed=seed)[world_size]
    scale = trace.forward_s + trace.backward_s
    assert same.forward_s == pytest.approx(trace.forward_s)
    assert [t.ready_s for t in same.tensors] == pytest.approx([t.ready_s for t in trace.tensors], abs=1e-12 * scale)
    assert [t.nbytes for t in same.tensors] == [t.nbytes for t in trace.tensors]


@given(traces(max_tensors=4), st.floats(0.01, 0.5), st.integers(0, 99))
def test_more_ranks_are_never_faster(trace: Trace, jitter: float, seed: int) -> None:
    """A world of 16 is two worlds of 8, and one of 512 is all of them, so that its last rank can only be later."""
    found = slowest_ranks(trace, [8, 16, 512], jitter, seed=seed)
    few, more, most = (ends(found[size]) for size in (8, 16, 512))
    for early, late, latest in zip(few, more, most, strict=True):
        assert early <= late * (1 + 1e-9) and late <= latest * (1 + 1e-9)


def test_the_expected_maximum_is_that_of_the_normal_distribution() -> None:
    """One piece of work, so that the last of 64 ranks takes exp(jitter · E max z), and E max z of 64 is 2.37."""
    one = trace_of([TensorSpec("t", 1, 4, 1.0)])
    found = slowest_ranks(one, [64, 4096], 0.01, seed=3)[64]
    assert np.log(found.backward_s) / 0.01 == pytest.approx(2.37, abs=0.15)


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_straggler_delays_everyone(factor: float) -> None:
    late = slowest_ranks(TRACE, [8], 0.0, 1, factor)[8]
    assert late.forward_s == pytest.approx(factor * TRACE.forward_s)
    assert [t.ready_s for t in late.tensors] == pytest.approx([factor * t.ready_s for t in TRACE.tensors])
    assert slowest_ranks(TRACE, [8], 0.0, 8, factor)[8] == late  # the last rank counts, not how many there are


def test_a_fast_rank_delays_nobody() -> None:
    fast = slowest_ranks(TRACE, [8], 0.0, 1, 0.5)[8]
    assert fast.forward_s == TRACE.forward_s
    assert [t.ready_s for t in fast.tensors] == pytest.approx([t.ready_s for t in TRACE.tensors])


def test_refusals() -> None:
    for options in ({"jitter": -0.1}, {"jitter": float("nan")}, {"straggler_factor": 0.0}, {"stragglers": 9},
                    {"stragglers": -1}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            slowest_ranks(TRACE, [8], **{"jitter": 0.0, **options})  # type: ignore[arg-type]
