"""Selection with error feedback, in torch operations of fixed shapes: the reference for every GPU kernel.

One step of a bucket is four passes. None of them synchronises with the host:

    offer            acc = residual + gradient; pack what passes the local threshold, region by region
    sums_at_owner    add what all ranks offered of my region; pack the sums
    select_sums      pack the sums that pass the owner's threshold
    finish           gradient = what was applied, averaged; residual = acc less what was offered and applied

Packed pairs are int32 [..., 2]: the bits of a float32 value and its position in its region, −1 in unused slots. Where
more values pass than there are slots, the first in order of position are packed; the others stay in the residual.
Between ``offer`` and ``finish`` the gradient's buffer holds the old residual, so that a step can be undone without
extra memory.

Regions say which rank owns which part of a bucket, so that every owner has about equally many values to add. They are
given by their boundaries, P+1 int64 numbers 0 = b_0 ≤ … ≤ b_P = n; rank r owns [b_r, b_{r+1}). Each rank proposes the
positions that divide its own selected values into P equal runs, and the mean of the proposals is taken (the mean of
sorted vectors is sorted). With selected positions 2, 3, 8, 9 of n = 10 and P = 2 a rank proposes b_1 = 8.
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.exchange.interface import Steps, record_stream
from anabranch.exchange.residuals.bucket_states import BucketState, uniform_boundaries
from anabranch.values.kinds.formats import CHUNK_NUMEL, Sizes, widest_numel
from anabranch.values.kinds.options import OkTopk

# Sums of this magnitude count as not finite: rounding may raise a sum by 1/256 before it is sent.
SUM_LIMIT = torch.finfo(torch.float32).max * (1 - 2**-7)


class Selected(NamedTuple):
    """What a rank offers, or an owner applies.

    packed   pairs int32 [P, capacity, 2] to all owners, or [capacity, 2] from one
    passed   int32: how many values of each region passed, or how many sums
    poison   bool: some value was not finite, or too large: to be added to a residual, or for a finite average
    """

    packed: torch.Tensor
    passed: torch.Tensor
    poison: torch.Tensor


def passing(values: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """A mask of the values whose magnitude is at least the threshold. Zeros never pass, whatever the threshold."""
    return (values.abs() >= threshold) & (values != 0)


def running_count(mask: torch.Tensor) -> torch.Tensor:
    """Count the set elements up to and including each position; int32 where that suffices."""
    return mask.cumsum(0, dtype=torch.int32 if len(mask) < 2**31 else torch.int64)


def propose_boundaries(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: torch.Tensor, ranks: int
) -> torch.Tensor:
    """The inner boundaries (int64 [P−1]) that divide what passes of residual + gradient into P equal runs.

    Works a chunk at a time, so that no temporary is large.
    """
    counts = [passing(a + b, threshold).sum() for a, b in _chunks(residual, gradient)]
    ends = torch.stack(counts).cumsum(0)
    # Which of the selected values, counted from 1, begin regions 1 … P−1 if each is to have equally many.
    wanted = torch.arange(1, ranks, dtype=torch.int64, device=residual.device) * ends[-1] // ranks + 1
    found = uniform_boundaries(len(residual), ranks, residual.device)[1:-1]
    for number, (a, b) in enumerate(_chunks(residual, gradient)):
        before = ends[number] - counts[number]
        at = torch.searchsorted(running_count(passing(a + b, threshold)).to(torch.int64), wanted - before)
        here = (wanted > before) & (wanted <= ends[number])
        found = torch.where(here, number * CHUNK_NUMEL + at, found)
    return found


def regions_due(state: BucketState, sizes: Sizes, options: OkTopk) -> bool:
    """Whether this step begins with new regions; the same on every rank."""
    return sizes.selects_all or state.fresh or state.step % options.region_period == 0


def rebalance_regions(gradient: torch.Tensor, state: BucketState, comm: Communicator, sizes: Sizes) -> Steps:
    """``state.boundaries`` ← by what passes ``state.local_threshold`` on all ranks."""
    if sizes.selects_all:
        state.boundaries.copy_(uniform_boundaries(len(gradient), comm.size, gradient.device))
        return
    proposed = propose_boundaries(gradient, state.residual, state.local_threshold, comm.size)
    yield comm.all_reduce(proposed, "regions")
    record_stream(proposed)
    state.boundaries.copy_(mean_boundaries(proposed, len(gradient), comm.size))


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


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_NUMEL) for tensor in tensors), strict=True)


def accumulate(gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual ← residual + gradient, gradient ← the old residual; True (a bool on the device) if the step is poisoned.

    It is, if an element of the gradient is not below ``SUMMABLE_BELOW``. So residuals stay so small that their sum over
    the ranks is finite.
    """
    total = residual + gradient
    poison = ~all_finite(gradient, below=SUMMABLE_BELOW)
    gradient.copy_(residual)
    residual.copy_(total)
    return poison


def undo(gradient: torch.Tensor, residual: torch.Tensor) -> None:
    """After ``accumulate``, for a poisoned step: restore the residual and fill the gradient with NaN."""
    residual.copy_(gradient)
    gradient.fill_(torch.nan)


def offer(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: torch.Tensor, boundaries: torch.Tensor, capacity: int
) -> Selected:
    """Accumulate, and pack up to ``capacity`` values of each region whose magnitude reaches the threshold.

    ``passed`` counts all values that did, also those beyond the capacity.
    """
    poison = accumulate(gradient, residual)
    running = running_count(passing(residual, threshold))
    packed, counts = pack(residual, running, boundaries, capacity)
    return Selected(packed, counts, poison)


def sums_at_owner(received: torch.Tensor, buffer: torch.Tensor, in_order: bool = True) -> torch.Tensor:
    """Add the pairs [P, m, 2] that all ranks offered of my region: the sums, as pairs [P·m, 2] in order of position.

    ``buffer`` is float32, as wide as the widest region, zero before and after. ``in_order`` adds in the order of
    ranks, which gives the same bits every time; without it a GPU may add in any order. Sums of zero are left out:
    to clear values that cancel, they would have to be sent back to their ranks, and the next gradients change them.
    """
    add_pairs(buffer, received, in_order)
    ends = torch.arange(2, device=buffer.device) * len(buffer)  # torch.tensor(…, device="cuda") would synchronise
    packed, _ = pack(buffer, running_count(buffer != 0), ends, received.shape[0] * received.shape[1])
    buffer.zero_()
    return packed[0]


def select_sums(sums: torch.Tensor, threshold: torch.Tensor, capacity: int, limit: float = inf) -> Selected:
    """Up to ``capacity`` of an owner's sums (pairs [m, 2]) that pass the threshold. All must be below ``limit``."""
    values = sums[:, 0].contiguous().view(torch.float32)
    running = running_count(passing(values, threshold) & (sums[:, 1] >= 0))
    slots = torch.arange(capacity, dtype=running.dtype, device=sums.device)
    chosen = torch.searchsorted(running, slots + 1).clamp(max=len(running) - 1)
    unused = torch.stack([torch.zeros_like(slots), -torch.ones_like(slots)], dim=1).to(torch.int32)
    packed = torch.where((slots < running[-1])[:, None], sums[chosen], unused)
    return Selected(packed, running[-1].to(torch.int32), ~all_finite(values, below=limit))


def finish(
    gathered: torch.Tensor,
    offered: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    boundaries: torch.Tensor,
    divisor: float,
    poisoned: torch.Tensor,
) -> None:
    """gradient ← gathered values / divisor, 0 elsewhere; residual ← residual − what was offered and is applied.

    For float32 values that leaves exactly 0 there; for rounded ones, the rounding error. If ``poisoned`` the residual
    becomes what it was before ``offer``, bit by bit, and the gradient NaN. ``gathered`` are pairs [P, m, 2] of the
    owners, ``offered`` pairs [P, capacity, 2] of this rank.
    """
    residual.copy_(torch.where(poisoned, gradient, residual))
    gradient.copy_(torch.where(poisoned, torch.nan, torch.zeros_like(gradient)))
    positions, values = unpack(gathered, boundaries)
    # Each position occurs once, so on zeros this is a copy; unused slots add 0 and need no branch.
    gradient.index_add_(0, positions, values)
    positions, values = unpack(offered, boundaries)
    clear = (gradient[positions] != 0) & ~poisoned
    residual.index_add_(0, positions, torch.where(clear, -values, 0.0))
    gradient.div_(divisor)


def keep_rounding_error(
    packed: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor, start: torch.Tensor, poisoned: torch.Tensor
) -> None:
    """Add what rounding has changed in the sums an owner packed to its own residual; its region begins at ``start``.

    ``sent`` are the same pairs as everyone has decoded them. A sum that was rounded to 0 was not applied.
    """
    before, after = (pairs[:, 0].contiguous().view(torch.float32) for pairs in (packed, sent))
    positions = (packed[:, 1].to(torch.int64) + start).clamp(min=0, max=len(residual) - 1)
    applied = (packed[:, 1] >= 0) & (after != 0) & ~poisoned
    residual.index_add_(0, positions, torch.where(applied, before - after, 0.0))


def pack(
    values: torch.Tensor, running: torch.Tensor, boundaries: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs int32 [P, capacity, 2] of the first selected values of each region, and how many there were (int32 [P]).

    Slot s of region r holds the element at which ``running`` first reaches (count before the region) + s + 1. Bisection
    finds it, so the cost beyond the running count grows with the slots, not with the elements.
    """
    before = torch.where(boundaries > 0, running[(boundaries - 1).clamp(min=0)], 0)
    counts = before[1:] - before[:-1]
    slots = torch.arange(capacity, dtype=running.dtype, device=running.device)
    wanted = before[:-1, None] + slots + 1
    positions = torch.searchsorted(running, wanted).clamp(max=len(running) - 1)
    used = slots < counts[:, None]
    packed = torch.empty(*positions.shape, 2, dtype=torch.int32, device=running.device)
    packed[..., 0] = torch.where(used, values[positions].view(torch.int32), 0)
    packed[..., 1] = torch.where(used, positions - boundaries[:-1, None], -1)
    return packed, counts.to(torch.int32)


def unpack(pairs: torch.Tensor, boundaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the bucket (int64) and values of pairs [P, m, 2], flat; unused slots are zeros at position 0."""
    used = pairs[..., 1] >= 0
    positions = torch.where(used, pairs[..., 1] + boundaries[:-1, None], 0)
    values = torch.where(used, pairs[..., 0].contiguous().view(torch.float32), 0.0)
    return positions.flatten(), values.flatten()


def add_pairs(buffer: torch.Tensor, pairs: torch.Tensor, in_order: bool = True) -> None:
    """buffer[position] += value for pairs [P, m, 2]; ``in_order`` of ranks, so that sums always have the same bits."""
    used = pairs[..., 1] >= 0
    positions = torch.where(used, pairs[..., 1], 0).to(torch.int64)
    values = torch.where(used, pairs[..., 0].contiguous().view(torch.float32), 0.0)
    if buffer.is_cuda and in_order:  # one launch per rank, because within a rank no position occurs twice
        for position, value in zip(positions, values, strict=True):
            buffer.index_add_(0, position, value)
    else:
        buffer.index_add_(0, positions.flatten(), values.flatten())  # a CPU adds the pairs one by one, in order
