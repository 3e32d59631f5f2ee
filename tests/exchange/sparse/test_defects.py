"""Each defect of the public implementation (algorithms.md §4.8), as a test that would have caught it."""

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.residuals.bucket_states import uniform_boundaries
from anabranch.exchange.sparse import select
from anabranch.exchange.sparse.select import passing
from anabranch.exchange.sparse.thresholds import kth_magnitude
from exchange.sparse.worlds import EXCHANGES, OK_TOPK, WHOLE, check_step, gradients, states, step


@pytest.mark.parametrize("name", WHOLE)
def test_every_common_place_is_cleared_when_thresholds_are_new(name: str) -> None:
    """There: indices by magnitude where sorted ones were expected; of 7007 common positions one was found."""
    held, world = states(4, 4000), VirtualWorld(4)
    made = gradients(4, 4000, 0)
    before = [gradient.clone() for gradient in made]
    step(EXCHANGES[name], made, held, world, 0.05)
    applied = made[0] != 0
    for state, accumulated in zip(held, before, strict=True):
        certain = applied & (accumulated.abs() > accumulated.abs()[applied].median())
        offered = accumulated.abs() >= state.local_threshold
        if name in ("exact", "fixed and roomy"):  # no slot is missing: all that passed was offered
            assert not state.residual[applied & offered].any()
        assert int((state.residual[certain] == 0).sum()) > 0.5 * int(certain.sum())


@pytest.mark.parametrize("name", ["exact", "exact bf16", "fixed", "fixed bf16", "gtopk", "dsa"])
def test_places_beyond_float32(name: str) -> None:
    """There: indices in float32 buffers; 2²⁴ + 1 arrived as 2²⁴."""
    numel = 2**24 + 64
    positions = torch.tensor([5, 2**24 - 1, 2**24 + 1, 2**24 + 3, numel - 1])
    made = [torch.zeros(numel)]
    made[0][positions] = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0])
    held, world = states(1, numel), VirtualWorld(1)
    step(EXCHANGES[name], made, held, world, 8 / numel)
    assert made[0].nonzero().flatten().tolist() == positions.tolist()
    assert made[0][positions].tolist() == [1.0, 2.0, -3.0, 4.0, 5.0]
    assert not held[0].residual.any()


def test_sums_of_boundaries_beyond_int32() -> None:
    """There: boundaries summed as int32, which overflowed from 146 ranks on for 14.7 million elements."""
    numel, ranks = 14_728_266, 256
    assert uniform_boundaries(numel, ranks).dtype == torch.int64
    last = torch.full((ranks - 1,), numel - 1, dtype=torch.int64)
    proposals = torch.minimum(last, torch.arange(1, ranks) * (numel // ranks))
    summed = proposals * ranks
    assert int(summed.max()) > 2**31
    bounds = select.mean_boundaries(summed, numel, ranks)
    assert torch.equal(bounds[1:-1], proposals)


def test_more_than_two_to_the_31_elements_in_all() -> None:
    """Boundaries, their sums and their differences, without the elements themselves."""
    numel, ranks = 3 * 2**31, 64
    even = uniform_boundaries(numel, ranks)
    assert torch.equal(select.mean_boundaries(even[1:-1] * ranks, numel, ranks), even)


@pytest.mark.parametrize("name", sorted(EXCHANGES))
def test_one_rank_few_values_and_none(name: str) -> None:
    """There: P = 1 crashes, fewer values than workers make all boundaries equal, none selected is an IndexError."""
    for ranks, numel in ((1, 1), (1, 20), (6, 1), (6, 3), (6, 20)):
        held, world = states(ranks, numel), VirtualWorld(ranks)
        for made in (
            [torch.zeros(numel) for _ in range(ranks)],
            [torch.eye(1, numel)[0] * (rank == ranks - 1) for rank in range(ranks)],
            gradients(ranks, numel, 0),
            [torch.zeros(numel) for _ in range(ranks)],
        ):
            check_step(EXCHANGES[name], made, held, world, 0.05)


@pytest.mark.parametrize("name", OK_TOPK)
def test_sums_that_cancel_select_nothing(name: str) -> None:
    """There: an empty global selection is an index into an empty array."""
    values = gradients(1, 200, 0)[0]
    made = [values.clone(), -values]
    held, world = states(2, 200), VirtualWorld(2)
    check_step(EXCHANGES[name], made, held, world, 0.05)
    assert not made[0].any()
    check_step(EXCHANGES[name], gradients(2, 200, 1), held, world, 0.05)


def test_a_new_threshold_selects_k_and_not_one_less() -> None:
    """There: a strict comparison with the k-th largest."""
    values = gradients(1, 1000, 0)[0]
    assert int(passing(values, kth_magnitude(values, 37)).sum()) == 37


def test_ties_cannot_overflow_a_message() -> None:
    """All values are equal, so all pass any threshold that lets one pass: caps and slots hold, nothing is lost.

    A threshold a little above them all lets none pass in a step.
    """
    for name in OK_TOPK:
        held, world = states(3, 300), VirtualWorld(3)
        applied = []
        for _ in range(3):
            made = [torch.ones(300) for _ in range(3)]
            check_step(EXCHANGES[name], made, held, world, 0.05)
            applied.append(int((made[0] != 0).sum()))
        assert 0 < max(applied) <= (2 * 15 if "exact" in name else 3 * 15 + 3)
