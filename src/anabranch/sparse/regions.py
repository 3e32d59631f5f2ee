"""Regions: which rank owns which part of a bucket, so that every owner has about equally many values to add.

Regions are given by their boundaries, P+1 int64 numbers 0 = b_0 ≤ … ≤ b_P = n; rank r owns [b_r, b_{r+1}). Ranks count
what they select, bin by bin; the counts are added, and boundaries part the sum evenly, as if values lay evenly within a
bin. (The mean of positions that each rank would like, as published, parts them badly where layers of very different
sizes meet: an owner then receives twice what it should.)
"""

import torch

WIDEST = 4  # times the mean: what an owner's buffer can hold, however unevenly the values lie
FEWEST_BINS, BINS_PER_REGION = 256, 8
MOST_REGION_NUMEL = 2**31 - 1  # positions within a region travel as int32


def widest_numel(numel: int, ranks: int) -> int:
    """The most elements that a region of a bucket may have; refuses buckets whose positions would not fit int32."""
    widest = min(numel, WIDEST * -(-numel // ranks))
    if widest > MOST_REGION_NUMEL:
        raise ValueError(
            f"a bucket of {numel} elements on {ranks} ranks has regions of up to {widest} elements, and positions in "
            f"a region are int32: use smaller buckets"
        )
    return widest


def uniform(numel: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """Boundaries of regions of equal size, ±1."""
    return torch.arange(ranks + 1, dtype=torch.int64, device=device) * numel // ranks


def bin_width(numel: int, ranks: int) -> int:
    """Elements of a bin: as many bins as regions can be told apart by, few enough to be cheap to send."""
    return max(1, numel // max(FEWEST_BINS, BINS_PER_REGION * ranks))


def counted(places: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """How many of the places that a rank selects lie in each bin (int64)."""
    width = bin_width(numel, ranks)
    return torch.bincount(places // width, minlength=-(-numel // width))


def agreed(counts: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """The boundaries, from the sum over the ranks of their counts; uniform if nothing is selected."""
    return bounded(parted(counts, numel, ranks), numel, ranks)


def parted(counts: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """The P−1 inner boundaries that part what was counted evenly. Nothing waits for the host."""
    width, ends = bin_width(numel, ranks), counts.cumsum(0)
    parts = torch.arange(1, ranks, dtype=torch.int64, device=counts.device)
    first = parts * ends[-1] // ranks  # the number, from 0 on, of the value that begins the region
    bins = torch.searchsorted(ends, first, right=True).clamp(max=len(counts) - 1)
    wide = (numel - bins * width).clamp(max=width)  # the last bin may be narrower
    inside = (first - ends[bins] + counts[bins]) * wide // counts[bins].clamp(min=1)
    return torch.where(ends[-1] > 0, bins * width + inside, parts * numel // ranks)


def bounded(inner: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """All boundaries, from the inner ones; no region wider than ``widest_numel``.

    In c_j = b_j − j·widest, "no region is wider" reads "c never rises", from c_0 = 0 on, so a running minimum enforces
    it; the last regions are held up from below in the same way, and b stays sorted.
    """
    widest = widest_numel(numel, ranks)
    steps = torch.arange(1, ranks, dtype=torch.int64, device=inner.device) * widest
    if ranks > 1:
        inner = torch.cummin((inner - steps).clamp(max=0), dim=0).values + steps
        inner = torch.maximum(inner, numel - (ranks * widest - steps))
    bounds = torch.full((ranks + 1,), numel, dtype=torch.int64, device=inner.device)
    bounds[:1].zero_()
    bounds[1:-1].copy_(inner)
    return bounds
