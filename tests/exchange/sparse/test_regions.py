"""Regions always divide the bucket, and no region is wider than its owner's buffer."""

from itertools import pairwise
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.sparse import select
from anabranch.values.kinds.formats import widest_numel


def proposal(mask: torch.Tensor, ranks: int) -> torch.Tensor:
    """Of a rank that selects these."""
    return select.propose_boundaries(mask.float(), torch.zeros(len(mask)), torch.tensor(0.5), ranks)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 9), numel=st.integers(1, 80), chunk=st.integers(1, 80))
def test_regions_divide_the_bucket(data: st.DataObject, ranks: int, numel: int, chunk: int) -> None:
    proposals = []
    for _ in range(ranks):
        mask = data.draw(st.lists(st.booleans(), min_size=numel, max_size=numel))
        with patch.object(select, "CHUNK_NUMEL", chunk):
            made = proposal(torch.tensor(mask), ranks)
        where = [j for j, chosen in enumerate(mask) if chosen]
        naive = [where[j * len(where) // ranks] if where else j * numel // ranks for j in range(1, ranks)]
        assert made.tolist() == naive
        proposals.append(made)
    bounds = select.mean_boundaries(torch.stack(proposals).sum(dim=0), numel, ranks).tolist()
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, ranks + 1)
    assert max(b - a for a, b in pairwise(bounds)) <= widest_numel(numel, ranks)


def test_balanced_where_values_are_in_one_corner() -> None:
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[:40] = True
    bounds = select.mean_boundaries(4 * proposal(mask, 4), 1000, 4)
    assert bounds.tolist() == [0, 10, 20, 30, 1000]


def test_no_region_outgrows_its_owner() -> None:
    bounds = select.mean_boundaries(torch.zeros(15, dtype=torch.int64), 1600, 16)
    assert int(bounds.diff().amax()) == 400


def test_nor_does_the_first() -> None:
    """Everything large lies at the end: the first region would be nearly all of the bucket."""
    bounds = select.mean_boundaries(16 * torch.arange(1585, 1600), 1600, 16)
    assert bounds.tolist() == [0, 400, 800, 1200, *range(1588, 1601)]
