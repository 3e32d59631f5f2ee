"""Regions: which rank owns which part of a bucket, so that every owner has about equally many values to add.

Regions are given by their boundaries, P+1 int64 numbers 0 = b_0 ≤ … ≤ b_P = n; rank r owns [b_r, b_{r+1}). Each rank
proposes the positions that divide its own selected values into P equal runs, and the mean of the proposals is taken
(the mean of sorted vectors is sorted). With selected positions 2, 3, 8, 9 of n = 10 and P = 2 a rank proposes b_1 = 8.
"""

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.values.kinds.formats import widest_numel


def uniform(numel: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """Boundaries of regions of equal size, ±1."""
    return torch.arange(ranks + 1, dtype=torch.int64, device=device) * numel // ranks


def mean_boundaries(summed: torch.Tensor, numel: int, ranks: int) -> torch.Tensor:
    """The boundaries, from the sum over the ranks of their proposals. No region is wider than ``widest_numel``.

    With c_j = b_j − j·widest, "no region is wider" reads "c never rises", from c_0 = 0 on, so a running minimum
    enforces it. The last regions are bounded from below in the same way. b stays sorted.
    """
    widest = widest_numel(numel, ranks)
    steps = torch.arange(1, ranks, dtype=torch.int64, device=summed.device) * widest
    inner = summed // ranks
    if ranks > 1:
        inner = torch.cummin((inner - steps).clamp(max=0), dim=0).values + steps
        inner = torch.maximum(inner, numel - (ranks * widest - steps))
    bounds = torch.full((ranks + 1,), numel, dtype=torch.int64, device=summed.device)
    bounds[:1].zero_()
    bounds[1:-1].copy_(inner)
    return bounds


def region_buffer(numel: int, comm: Communicator, device: torch.device) -> torch.Tensor:
    """Zeros for the sums of any region of a bucket of ``numel`` elements. Zero them again after use."""
    return comm.zeros(widest_numel(numel, comm.size), device)
