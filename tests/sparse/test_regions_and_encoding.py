"""Regions always part the bucket; pairs arrive as they were sent."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.sparse import regions, select
from anabranch.sparse.encoding import decode, encode, framed, head, unframed
from anabranch.sparse.exact import balanced, overlaps
from anabranch.sparse.sizes import FP32, encoding_for, widest_numel


def proposal(mask: torch.Tensor, ranks: int) -> torch.Tensor:
    """Of a rank that selects these."""
    return select.proposal(mask.float(), torch.zeros(len(mask)), torch.tensor(0.5), ranks)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 9), numel=st.integers(1, 80), chunk=st.integers(1, 80))
def test_regions_part_the_bucket(data: st.DataObject, ranks: int, numel: int, chunk: int) -> None:
    proposals = []
    for _ in range(ranks):
        mask = data.draw(st.lists(st.booleans(), min_size=numel, max_size=numel))
        with patch.object(select, "CHUNK", chunk):
            made = proposal(torch.tensor(mask), ranks)
        where = [j for j, chosen in enumerate(mask) if chosen]
        naive = [where[j * len(where) // ranks] if where else j * numel // ranks for j in range(1, ranks)]
        assert made.tolist() == naive
        proposals.append(made)
    bounds = regions.agreed(torch.stack(proposals).sum(dim=0), numel, ranks).tolist()
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, ranks + 1)
    assert max(b - a for a, b in pairwise(bounds)) <= widest_numel(numel, ranks)


def test_balanced_where_values_are_in_one_corner() -> None:
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[:40] = True
    bounds = regions.agreed(4 * proposal(mask, 4), 1000, 4)
    assert bounds.tolist() == [0, 10, 20, 30, 1000]


def test_no_region_outgrows_its_owner() -> None:
    bounds = regions.agreed(torch.zeros(15, dtype=torch.int64), 1600, 16)
    assert int(bounds.diff().amax()) == 400


def test_nor_does_the_first() -> None:
    """Everything large lies at the end: the first region would be nearly all of the bucket."""
    bounds = regions.agreed(16 * torch.arange(1585, 1600), 1600, 16)
    assert bounds.tolist() == [0, 400, 800, 1200, *range(1588, 1601)]


def test_positions_that_int32_cannot_hold_are_refused() -> None:
    assert widest_numel(2**33, 64) < 2**31
    with pytest.raises(ValueError, match="smaller buckets"):
        widest_numel(2**33, 2)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_slots_handed_out_anew(lengths: list[int]) -> None:
    """Invariant 8, slot by slot."""
    targets = balanced(sum(lengths), len(lengths))
    assert max(targets) - min(targets) <= 1
    holders = [i for i, length in enumerate(lengths) for _ in range(length)]
    owners = [j for j, length in enumerate(targets) for _ in range(length)]
    for i in range(len(lengths)):
        going, coming = overlaps(lengths, targets, i), overlaps(targets, lengths, i)
        for j in range(len(lengths)):
            assert going[j] == sum(a == i and b == j for a, b in zip(holders, owners, strict=True))
            assert coming[j] == sum(a == j and b == i for a, b in zip(holders, owners, strict=True))


@pytest.mark.parametrize(
    ("precision", "widest", "nbytes"), [("fp32", 10, 8), ("bf16", 2**31 - 1, 6), ("bf16", 65_535, 4)]
)
def test_pairs_arrive_as_they_were_sent(precision: str, widest: int, nbytes: int) -> None:
    wire = encoding_for("bf16" if precision == "bf16" else "fp32", widest)
    assert wire.pair_nbytes == nbytes
    values = (1e3 * torch.randn(3, 50)).to(torch.bfloat16).float()
    positions = torch.randint(0, widest, (3, 50), dtype=torch.int32)
    positions[0, :3] = torch.tensor([0, widest - 1, -1], dtype=torch.int32)
    pairs = torch.stack([values.view(torch.int32), positions], dim=-1)
    assert torch.equal(decode(encode(pairs, wire), wire), pairs)
    heads = head(torch.tensor([5, 6, 7]), torch.tensor([False, True, False]), torch.tensor(2.5))
    found, arrived = unframed(framed(heads, pairs, wire), wire)
    assert torch.equal(arrived, pairs)
    assert found[:, 0].tolist() == [5, -1, 7]
    assert found[:, 1].contiguous().view(torch.float32).tolist() == [2.5] * 3


def test_whole_values_travel_without_a_copy() -> None:
    pairs = torch.zeros(4, 2, dtype=torch.int32)
    assert encode(pairs, FP32).data_ptr() == pairs.data_ptr()
