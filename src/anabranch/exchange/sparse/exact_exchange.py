"""The published exchange: counts first, then messages of exactly their size. It runs on CPUs, and on GPUs if asked for.

Thresholds are exact every ``threshold_period`` steps (exactly k values are then applied, ties aside) and sampled from
the step itself in between. At most 2k values are offered, and applied, the largest first. Where one owner has more
than four times the mean to gather, owners first hand each other bytes until all have the same number: with lengths
6, 0, 0 the bytes 0 … 5 are divided into 0-1, 2-3, 4-5, so owner 0 sends bytes 2-3 to owner 1 and 4-5 to owner 2.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.exchange.interface import Steps, record_stream
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse import select
from anabranch.exchange.sparse.encoding import join_bodies, message_head, split_bodies
from anabranch.exchange.sparse.thresholds import kth_magnitude, owner_threshold, record_step, sampled_magnitude
from anabranch.values.kinds.formats import Encoding, Sizes
from anabranch.values.kinds.options import OkTopk

CHUNK_NUMEL = 1 << 17  # elements: several such chunks fit into a core's cache
IMBALANCE = 4  # times the mean: from here on, moving pairs to other owners takes less time than waiting for one owner


class Pairs(NamedTuple):
    """Values and their positions, in order of position."""

    positions: torch.Tensor
    values: torch.Tensor

    def largest(self, count: int) -> "Pairs":
        """The ``count`` pairs of largest magnitude, still in order of position."""
        if len(self.values) <= count:
            return self
        kept = torch.topk(self.values.abs(), count, sorted=False).indices.sort().values
        return Pairs(self.positions[kept], self.values[kept])

    def packed(self) -> torch.Tensor:
        """The pairs as int32 [m, 2]: bits of the values, and positions."""
        return torch.stack([self.values.contiguous().view(torch.int32), self.positions.to(torch.int32)], dim=-1)

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each position, where it is in here (0 if nowhere), and whether it is. Needs at least one pair."""
        at = torch.searchsorted(self.positions, positions).clamp(max=len(self.positions) - 1)
        return at, self.positions[at] == positions


def exact_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk | None = None,
) -> Steps:
    """``oktopk.exchange`` at this density. The host learns the counts in every step."""
    options = options or OkTopk()
    sizes = Sizes.of(len(gradient), comm.size, density, options)
    residual = state.residual
    exact = (state.fresh or state.step % options.threshold_period == 0) and not sizes.selects_all
    local = (kth_magnitude(gradient + residual, sizes.k) if exact
             else sampled_magnitude((gradient, residual), sizes.k, state.step))  # fmt: skip
    state.local_threshold.copy_(local)
    if select.regions_due(state, sizes, options):
        yield from select.rebalance_regions(gradient, state, comm, sizes)
    passed, poison = accumulate(gradient, residual, local)

    offered = Pairs(passed, residual[passed]).largest(sizes.max_selected)
    offered, received = yield from _split(offered, state.boundaries, comm, sizes.encoding, poison)
    record_stream(*offered, passed, poison, local)
    sums, threshold, found = yield from _sums(received, state, comm, sizes, exact, options.deterministic)
    applied, heads = yield from _gather(sums, threshold, found, state, comm, sizes)

    poisoned = heads[:, 0].amin() < 0
    if bool(poisoned):
        select.undo(gradient, residual)
    else:
        _apply(applied, offered, gradient, residual, divisor)
        if sizes.encoding.rounds:
            _keep_rounding_error(sums, applied, residual, state.boundaries[comm.rank])
    record_step(state, torch.tensor(len(passed)), heads, comm.rank, poisoned)


def accumulate(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``select.accumulate``; returns the positions of what passes the threshold, and True if the step is poisoned.

    Works a chunk at a time, so that a CPU reads and writes each element once, in its cache, without large temporaries.
    """
    least = threshold.clamp(min=torch.finfo(threshold.dtype).smallest_normal * 2**-23)  # so that zeros never pass
    found, poison = [], torch.zeros((), dtype=torch.bool, device=gradient.device)
    for start in range(0, len(gradient), CHUNK_NUMEL):
        new, old = gradient[start : start + CHUNK_NUMEL], residual[start : start + CHUNK_NUMEL]
        total = old + new
        poison |= ~all_finite(new, below=SUMMABLE_BELOW)
        new.copy_(old)
        old.copy_(total)
        found.append((total.abs_() >= least).nonzero().flatten().add_(start))
    return torch.cat(found), poison


def _apply(applied: Pairs, offered: Pairs, gradient: torch.Tensor, residual: torch.Tensor, divisor: float) -> None:
    """gradient ← what is applied / divisor; residual ← residual − what this rank offered and is applied."""
    gradient.zero_()
    if len(applied.positions) == 0:
        return
    gradient[applied.positions] = applied.values / divisor
    _, cleared = applied.find(offered.positions)
    residual[offered.positions] -= torch.where(cleared, offered.values, 0.0)


def _split(
    offered: Pairs, boundaries: torch.Tensor, comm: Communicator, encoding: Encoding, poison: torch.Tensor
) -> Generator[dist.Work, None, tuple[Pairs, list[torch.Tensor] | None]]:
    """Send each region's values to its owner. Returns what I offered, as owners read it, and what every rank sent of
    mine; None if any rank is poisoned."""
    edges = torch.searchsorted(offered.positions, boundaries)
    counts = (edges[1:] - edges[:-1]).to(torch.int32)
    expected = torch.empty_like(counts)
    yield comm.all_to_all(expected, torch.where(poison, -1, counts), "counts")
    record_stream(counts, expected)
    coming, going = expected.tolist(), counts.tolist()
    # A poisoned rank tells all others, so all ranks return here in the same step.
    if min(coming) < 0 or bool(poison):
        return offered, None
    owners = torch.repeat_interleave(torch.arange(comm.size, device=counts.device), counts)
    given = join_bodies(Pairs(offered.positions - boundaries[owners], offered.values).packed(), going, encoding)
    sizes = [encoding.body_nbytes(count) for count in coming]
    output = torch.empty(sum(sizes), dtype=torch.uint8, device=given.device)
    yield comm.all_to_all(output, given, "split", sizes, [encoding.body_nbytes(count) for count in going])
    sent = split_bodies(given, going, encoding)[:, 0].contiguous().view(torch.float32)
    return offered._replace(values=sent), list(split_bodies(output, coming, encoding).split(coming))


def _sums(
    received: list[torch.Tensor] | None,
    state: BucketState,
    comm: Communicator,
    sizes: Sizes,
    exact: bool,
    in_order: bool,
) -> Generator[dist.Work, None, tuple[Pairs | None, torch.Tensor, torch.Tensor]]:
    """My region's sums (positions in the region), the threshold to apply to them, and that of my own share."""
    if received is None:
        return None, state.threshold_bias, torch.zeros_like(state.threshold_bias)
    buffer = select.region_buffer(len(state.residual), comm, state.residual.device)
    for part in received if in_order and buffer.is_cuda else [torch.cat(received)]:
        select.add_pairs(buffer, part[None])
    width = int(state.boundaries[comm.rank + 1] - state.boundaries[comm.rank])
    positions = buffer[:width].nonzero().flatten()
    sums = Pairs(positions, buffer[positions])
    buffer[positions] = 0
    found, threshold = owner_threshold(sums.packed(), sizes, state.threshold_bias, state.step, comm.size)
    if exact:
        counts = torch.empty(comm.size, dtype=torch.int32, device=buffer.device)
        own_count = torch.tensor([len(positions)], dtype=torch.int32, device=buffer.device)
        yield comm.all_gather(counts, own_count, "threshold")
        lengths = counts.tolist()
        magnitudes = torch.empty(sum(lengths), dtype=torch.float32, device=buffer.device)
        yield comm.all_gather_uneven(magnitudes, sums.values.abs(), lengths, "threshold")
        threshold = kth_magnitude(magnitudes, sizes.k)
        known = (threshold > 0) & (found > 0)
        state.threshold_bias.copy_(torch.where(known, (threshold / found).log(), state.threshold_bias))
    return sums, threshold, found


def _gather(
    sums: Pairs | None,
    threshold: torch.Tensor,
    found: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    sizes: Sizes,
) -> Generator[dist.Work, None, tuple[Pairs, torch.Tensor]]:
    """The sums of all owners that pass, with their positions in the bucket, and the heads of all owners.

    Sums that rounding has made 0 are left out. A sum that is not below ``SUM_LIMIT`` poisons the step.
    """
    nothing = Pairs(state.boundaries[:0], state.residual[:0])
    selected, poison = nothing, torch.tensor(sums is None, device=found.device)
    if sums is not None:
        kept = select.passing(sums.values, threshold)
        selected = Pairs(sums.positions[kept], sums.values[kept])
        poison = ~all_finite(sums.values, below=select.SUM_LIMIT)
    mine = message_head(torch.tensor(len(selected.values), device=found.device), poison, found)
    heads = torch.empty(comm.size, 2, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(heads, mine[None], "counts")
    lengths = heads[:, 0].tolist()
    if min(lengths) < 0 or sum(lengths) == 0:
        return nothing, heads
    if (total := sum(lengths)) > sizes.max_selected:
        lengths = [sizes.max_selected * length // total for length in lengths]
        selected = selected.largest(lengths[comm.rank])
    body = join_bodies(selected.packed(), [len(selected.values)], sizes.encoding)
    held = nbytes = [sizes.encoding.body_nbytes(length) for length in lengths]
    if max(lengths) * comm.size > IMBALANCE * sum(lengths):  # bytes of all owners, in order, are handed out again
        held = equal_lengths(sum(nbytes), comm.size)
        given, body = body, torch.empty(held[comm.rank], dtype=body.dtype, device=body.device)
        coming, going = overlaps(held, nbytes, comm.rank), overlaps(nbytes, held, comm.rank)
        yield comm.all_to_all(body, given, "balance", coming, going)
    everything = torch.empty(sum(nbytes), dtype=torch.uint8, device=body.device)
    yield comm.all_gather_uneven(everything, body, held, "gather")
    pairs = split_bodies(everything, lengths, sizes.encoding)
    owners = torch.repeat_interleave(torch.tensor(lengths, device=body.device))
    values = pairs[:, 0].contiguous().view(torch.float32)
    sent = values != 0
    return Pairs((pairs[:, 1] + state.boundaries[owners])[sent], values[sent]), heads


def _keep_rounding_error(sums: Pairs | None, applied: Pairs, residual: torch.Tensor, start: torch.Tensor) -> None:
    """Add the rounding error of the sums that were applied to the owner's residual; its region begins at ``start``."""
    if sums is None or len(sums.positions) == 0 or len(applied.positions) == 0:
        return
    mine = sums.positions + start
    at, found = applied.find(mine)
    residual[mine] += torch.where(found, sums.values - applied.values[at], 0.0)


def equal_lengths(total: int, ranks: int) -> list[int]:
    """``total`` bytes in ``ranks`` parts of equal size, ±1."""
    return [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]


def overlaps(lengths: Sequence[int], others: Sequence[int], rank: int) -> list[int]:
    """Count ``rank``'s bytes that belong to each rank after they are handed out again.

    Both ``lengths`` and ``others`` divide the same bytes, in order, among the ranks.
    """
    begin = sum(lengths[:rank])
    ends = torch.tensor(others).cumsum(0)
    shared = ends.clamp(max=begin + lengths[rank]) - (ends - torch.tensor(others)).clamp(min=begin)
    return [int(count) for count in shared.clamp(min=0)]
