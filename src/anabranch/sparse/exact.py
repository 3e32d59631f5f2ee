"""The published exchange: counts first, then messages of exactly their size. The reference, and the way on Gloo.

Thresholds are exact every ``threshold_period`` steps (exactly k values are then applied, ties aside) and sampled from
the step itself in between. At most 2k values are offered, and applied, the largest first. Where one owner has more
than four times the mean to gather, owners first hand each other slots until all have the same number: with lengths
6, 0, 0 the global slots 0 … 5 are parted into 0-1, 2-3, 4-5, so owner 0 sends slots 2-3 to owner 1 and 4-5 to owner 2.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.comm.communicator import Communicator
from anabranch.comm.exchange import Steps, record_stream
from anabranch.sparse import regions, select
from anabranch.sparse.encoding import decode, encode, head, rounded
from anabranch.sparse.fixed import note, owner_threshold
from anabranch.sparse.options import OkTopk
from anabranch.sparse.sizes import Encoding, Sizes, widest_numel
from anabranch.sparse.state import BucketState
from anabranch.sparse.thresholds import kth_magnitude, sampled_magnitude

MOST = 2  # times k: what may be offered, and applied, when a threshold has failed
CHUNK = 1 << 17  # elements: what fits a core's cache several times
IMBALANCE = 4  # times the mean: from here on, moving pairs to other owners costs less than waiting for one of them


class Pairs(NamedTuple):
    """Values and where they belong, in order of position."""

    positions: torch.Tensor
    values: torch.Tensor

    def largest(self, most: int) -> "Pairs":
        """The ones of largest magnitude, still in order of position."""
        if len(self.values) <= most:
            return self
        kept = torch.topk(self.values.abs(), most, sorted=False).indices.sort().values
        return Pairs(self.positions[kept], self.values[kept])


Rows = Generator[dist.Work, None, torch.Tensor]


def exact_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk | None = None,
) -> Steps:
    """See ``oktopk.exchange``; float32 only. The host learns the counts in every step."""
    options = options or OkTopk()
    if len(gradient) == 0:
        return
    sizes = Sizes.of(len(gradient), comm.size, density, options)
    residual = state.residual
    again = (state.fresh or state.step % options.threshold_period == 0) and not sizes.everything
    local = (kth_magnitude(gradient + residual, sizes.k) if again
             else sampled_magnitude((gradient, residual), sizes.k, state.step))  # fmt: skip
    state.local_threshold.copy_(local)
    passed, poison = accumulated(gradient, residual, local)
    if state.fresh or state.step % options.region_period == 0:
        proposed = regions.proposal_of(passed, len(residual), comm.size)
        yield comm.all_reduce(proposed, "regions")
        state.boundaries.copy_(regions.agreed(proposed, len(residual), comm.size))

    offered = Pairs(passed, residual[passed]).largest(MOST * sizes.k)
    offered = offered._replace(values=rounded(offered.values, sizes.encoding))
    received = yield from _split(offered, state.boundaries, comm, sizes.encoding, poison)
    record_stream(*offered, passed, poison, local)
    sums, threshold, found = yield from _sums(received, state, comm, sizes, again, options.deterministic)
    applied, heads = yield from _gather(sums, threshold, found, state, comm, sizes)

    poisoned = heads[:, 0].amin() < 0
    if bool(poisoned):
        select.undo(gradient, residual)
    else:
        gradient.zero_()
        gradient[applied.positions] = applied.values / divisor
        went = torch.searchsorted(applied.positions, offered.positions).clamp(max=max(0, len(applied.positions) - 1))
        cleared = (
            (applied.positions[went] == offered.positions) if len(applied.positions) else torch.zeros_like(went).bool()
        )
        residual[offered.positions] -= torch.where(cleared, offered.values, 0.0)
        if sizes.encoding.rounds:
            _keep_rounding(sums, applied, residual, state.boundaries[comm.rank])
    note(state, torch.tensor(len(passed)), heads, comm.rank, poisoned)


def accumulated(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``select.accumulate``, and the positions of what passes; True if not all is finite.

    A chunk at a time, so that a CPU reads and writes each element once, in its cache, and makes no large temporaries.
    """
    least = threshold.clamp(min=torch.finfo(threshold.dtype).smallest_normal * 2**-23)  # so that zeros never pass
    found, poison = [], torch.zeros((), dtype=torch.bool, device=gradient.device)
    for start in range(0, len(gradient), CHUNK):
        new, old = gradient[start : start + CHUNK], residual[start : start + CHUNK]
        total = old + new
        new.copy_(old)
        old.copy_(total)
        poison |= ~torch.isfinite(total.sum())  # one inf or NaN makes a sum that is neither; large values are looked at
        found.append((total.abs_() >= least).nonzero().flatten().add_(start))
    if bool(poison):
        poison = ~torch.isfinite(residual).all()
    return torch.cat(found), poison


def _split(
    offered: Pairs, boundaries: torch.Tensor, comm: Communicator, wire: Encoding, poison: torch.Tensor
) -> Generator[dist.Work, None, list[torch.Tensor] | None]:
    """Send each region's values to its owner: what every rank sent of mine, or None if any rank is poisoned."""
    edges = torch.searchsorted(offered.positions, boundaries)
    counts = (edges[1:] - edges[:-1]).to(torch.int32)
    expected = torch.empty_like(counts)
    yield comm.all_to_all(expected, torch.where(poison, -1, counts), "counts")
    record_stream(counts, expected)
    coming = expected.tolist()
    # A poisoned rank says so to all, so all of them leave here together.
    if min(coming) < 0 or bool(poison):
        return None
    owners = torch.repeat_interleave(torch.arange(comm.size, device=counts.device), counts)
    given = encode(_pairs(offered.positions - boundaries[owners], offered.values), wire)
    output = torch.empty(sum(coming), wire.pair_nbytes, dtype=torch.uint8, device=given.device)
    yield comm.all_to_all(output, given, "split", coming, counts.tolist())
    return list(decode(output, wire).split(coming))


def _sums(
    received: list[torch.Tensor] | None,
    state: BucketState,
    comm: Communicator,
    sizes: Sizes,
    again: bool,
    in_order: bool,
) -> Generator[dist.Work, None, tuple[Pairs | None, torch.Tensor, torch.Tensor]]:
    """My region's sums (positions in the region), the threshold to apply to them, and the one of my own share."""
    if received is None:
        return None, state.threshold_bias, torch.zeros_like(state.threshold_bias)
    buffer = comm.zeros(widest_numel(len(state.residual), comm.size), state.residual.device)
    for part in received if in_order and buffer.is_cuda else [torch.cat(received)]:
        select.add(buffer, part[None])
    width = int(state.boundaries[comm.rank + 1] - state.boundaries[comm.rank])
    positions = buffer[:width].nonzero().flatten()
    sums = Pairs(positions, buffer[positions])
    buffer[positions] = 0
    found, threshold = owner_threshold(_pairs(*sums), sizes, state, comm.size)
    if again:
        magnitudes = yield from _everyone(sums.values.abs(), comm, "threshold")
        threshold = kth_magnitude(magnitudes, sizes.k)
        exact = (threshold > 0) & (found > 0)
        state.threshold_bias.copy_(torch.where(exact, (threshold / found).log(), state.threshold_bias))
    return sums, threshold, found


def _gather(
    sums: Pairs | None,
    threshold: torch.Tensor,
    found: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    sizes: Sizes,
) -> Generator[dist.Work, None, tuple[Pairs, torch.Tensor]]:
    """Everyone's sums that pass, with their positions in the bucket, and the heads of all owners."""
    nothing = Pairs(state.boundaries[:0], state.residual[:0])
    taken, poison = nothing, torch.tensor(sums is None, device=found.device)
    if sums is not None:
        travelling = rounded(sums.values, sizes.encoding)
        kept = select.passing(sums.values, threshold) & (travelling != 0)
        taken, poison = Pairs(sums.positions[kept], travelling[kept]), ~torch.isfinite(travelling).all()
    mine = head(torch.tensor(len(taken.values), device=found.device), poison, found)
    heads = torch.empty(comm.size, 2, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(heads, mine[None], "counts")
    lengths = heads[:, 0].tolist()
    if min(lengths) < 0 or sum(lengths) == 0:
        return nothing, heads
    most = MOST * sizes.k
    if (total := sum(lengths)) > most:
        lengths = [most * length // total for length in lengths]
        taken = taken.largest(lengths[comm.rank])
    rows = encode(_pairs(*taken), sizes.encoding)
    held = lengths
    if max(lengths) * comm.size > IMBALANCE * sum(lengths):
        held = balanced(sum(lengths), comm.size)
        rows = yield from _rebalance(rows, lengths, held, comm)
    everything = torch.empty(sum(lengths), sizes.encoding.pair_nbytes, dtype=torch.uint8, device=rows.device)
    yield comm.all_gather_uneven(everything, rows, held, "gather")
    pairs = decode(everything, sizes.encoding)
    owners = torch.repeat_interleave(torch.tensor(lengths, device=rows.device))
    return Pairs(pairs[:, 1] + state.boundaries[owners], pairs[:, 0].contiguous().view(torch.float32)), heads


def _rebalance(rows: torch.Tensor, lengths: Sequence[int], held: Sequence[int], comm: Communicator) -> Rows:
    """The rows that are mine if all rows, in order, are handed out anew, ``held[j]`` to owner j."""
    coming = overlaps(held, lengths, comm.rank)
    output = torch.empty(sum(coming), rows.shape[1], dtype=rows.dtype, device=rows.device)
    yield comm.all_to_all(output, rows, "balance", coming, overlaps(lengths, held, comm.rank))
    return output


def _everyone(part: torch.Tensor, comm: Communicator, phase: str) -> Rows:
    """Everyone's values, however many each has."""
    counts = torch.empty(comm.size, dtype=torch.int32, device=part.device)
    yield comm.all_gather(counts, torch.tensor([len(part)], dtype=torch.int32, device=part.device), phase)
    lengths = counts.tolist()
    output = torch.empty(sum(lengths), dtype=part.dtype, device=part.device)
    yield comm.all_gather_uneven(output, part, lengths, phase)
    return output


def _keep_rounding(sums: Pairs | None, applied: Pairs, residual: torch.Tensor, start: torch.Tensor) -> None:
    """Into the owner's residual: what rounding took off the sums that were applied."""
    if sums is None or len(sums.positions) == 0 or len(applied.positions) == 0:
        return
    mine = sums.positions + start
    slot = torch.searchsorted(applied.positions, mine).clamp(max=len(applied.positions) - 1)
    went = applied.positions[slot] == mine
    residual[mine] += torch.where(went, sums.values - applied.values[slot], 0.0)


def _pairs(positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values.contiguous().view(torch.int32), positions.to(torch.int32)], dim=-1)


def balanced(total: int, ranks: int) -> list[int]:
    """``total`` slots in ``ranks`` parts of equal size, ±1."""
    return [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]


def overlaps(lengths: Sequence[int], others: Sequence[int], rank: int) -> list[int]:
    """How many of ``rank``'s slots each of the others has, if both hand out the same slots in order."""
    begin = sum(lengths[:rank])
    ends = torch.tensor(others).cumsum(0)
    shared = ends.clamp(max=begin + lengths[rank]) - (ends - torch.tensor(others)).clamp(min=begin)
    return [int(count) for count in shared.clamp(min=0)]
