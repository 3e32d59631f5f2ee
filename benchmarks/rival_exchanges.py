"""Published exchanges that Ok-Topk is compared with, under the same contract and the same count of words.

dense       2n(P−1)/P words: an all-reduce
topk        2k(P−1): an all-gather of every rank's top-k; the simplest exchange, and the oracle for the others
gtopk       4k·log₂P: top-k merged up a tree and sent down again
dsa         between 4k(P−1)/P and (2k+n)(P−1)/P: sums at owners, all of them gathered (SparCML's split all-gather)
gaussian    2k(P−1), if its threshold selects k: an all-gather of what passes a Gaussian's quantile
"""

from collections.abc import Generator, Mapping, Sequence
from statistics import NormalDist
from typing import Protocol

import torch
import torch.distributed as dist
from benchmarks.trainings import pairs_at, top_count, top_pairs

from anabranch.exchange.communicator import MAX, Communicator
from anabranch.exchange.interface import Steps, record_stream
from anabranch.exchange.residuals.bucket_states import BucketState, uniform_boundaries
from anabranch.exchange.sparse import select

MAX_NUMEL = 2**31 - 1  # positions in the bucket are sent as int32 here


class ExchangeFunction(Protocol):
    """The signature of all exchanges: steps after which the gradient is the average of what was applied."""

    def __call__(
        self, gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
    ) -> Steps: ...


def dense_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,  # noqa: ARG001
) -> Steps:
    """All-reduce of residual plus gradient; the residual is zero afterwards. Never synchronises with the host."""
    select.accumulate(gradient, state.residual)
    total = state.residual * (1.0 / divisor)
    yield comm.all_reduce(total, "dense")
    record_stream(total)
    fine = torch.isfinite(total).all()
    state.residual.copy_(torch.where(fine, 0.0, gradient))
    gradient.copy_(torch.where(fine, total, torch.nan))
    state.step += 1


def topk_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """All-gather of every rank's exact top-k; their sum is applied, so everything offered is."""
    poisoned = yield from _begin(gradient, state, comm)
    if poisoned:
        return
    mine = top_pairs(state.residual, top_count(len(gradient), density))
    everyone = torch.empty(comm.size, *mine.shape, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(everyone, mine[None], "gather")
    _clear(state.residual, mine)
    _apply(gradient, everyone.unbind(), divisor)


def gtopk_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """Pairs of ranks merge their top-k and keep k, up a binary tree of any number of ranks, then down again.

    What a merge drops is a sum of several ranks' values. The rank that drops it keeps it in its own residual, so that
    nothing is lost. (The published scheme loses it where the position is selected through another branch.)
    """
    poisoned = yield from _begin(gradient, state, comm)
    if poisoned:
        return
    mine = top_pairs(state.residual, top_count(len(gradient), density))
    _clear(state.residual, mine)
    distances = [1 << level for level in range((comm.size - 1).bit_length())]
    for distance in distances:
        other = yield from _receive(mine, comm, distance, "up")
        if len(other):
            mine = _merge(mine, other, state.residual)
    for distance in reversed(distances):
        above = yield from _receive(mine, comm, distance, "down")
        mine = above if len(above) else mine
    _apply(gradient, [mine], divisor)


def dsa_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """Top-k of every rank, added at the owners of equal regions; all sums are gathered, as plain values if shorter."""
    poisoned = yield from _begin(gradient, state, comm)
    if poisoned:
        return
    numel = len(gradient)
    bounds = uniform_boundaries(numel, comm.size, gradient.device)
    mine = top_pairs(state.residual, top_count(numel, density))
    counts = torch.searchsorted(mine[:, 1].contiguous(), bounds.to(torch.int32)).diff().to(torch.int32)
    expected = torch.empty_like(counts)
    yield comm.all_to_all(expected, counts, "counts")
    coming = expected.tolist()
    received = torch.empty(sum(coming), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_to_all(received, mine, "split", coming, counts.tolist())
    _clear(state.residual, mine)

    gradient.zero_()
    for part in received.split(coming):
        select.add_pairs(gradient, part[None])
    low, high = int(bounds[comm.rank]), int(bounds[comm.rank + 1])
    region = gradient[low:high]
    sums = pairs_at(gradient, region.nonzero().flatten() + low)
    lengths = torch.empty(comm.size, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(lengths, torch.tensor([len(sums)], dtype=torch.int32, device=mine.device), "counts")
    words = [min(2 * pairs, int(size)) for pairs, size in zip(lengths.tolist(), bounds.diff(), strict=True)]
    part = sums.flatten() if 2 * len(sums) < len(region) else region.view(torch.int32).clone()
    everything = torch.empty(sum(words), dtype=torch.int32, device=mine.device)
    yield comm.all_gather_uneven(everything, part, words, "gather")
    gradient.zero_()
    for owner, piece in enumerate(everything.split(words)):
        start, end = int(bounds[owner]), int(bounds[owner + 1])
        if len(piece) < end - start:
            select.add_pairs(gradient, piece.view(1, -1, 2))
        else:
            gradient[start:end] = piece.view(torch.float32)
    gradient.div_(divisor)


def gaussian_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """All-gather of what passes the threshold that would select k values if they were Gaussian."""
    poisoned = yield from _begin(gradient, state, comm)
    if poisoned:
        return
    threshold = gaussian_magnitude(state.residual, density)
    mine = pairs_at(state.residual, select.passing(state.residual, threshold).nonzero().flatten())
    lengths = torch.empty(comm.size, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int32, device=mine.device), "counts")
    counts = lengths.tolist()
    everyone = torch.empty(sum(counts), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_gather_uneven(everyone, mine, counts, "gather")
    _clear(state.residual, mine)
    _apply(gradient, everyone.split(counts), divisor)


RIVALS: Mapping[str, ExchangeFunction] = {
    "dense": dense_exchange,
    "topk": topk_exchange,
    "gtopk": gtopk_exchange,
    "dsa": dsa_exchange,
    "gaussian": gaussian_exchange,
}


def gaussian_magnitude(values: torch.Tensor, density: float) -> torch.Tensor:
    """The magnitude that a Gaussian of the values' mean and deviation exceeds with probability ``density``.

    Cheap, but wrong for gradients, whose tails are heavier than a Gaussian's.
    """
    if density >= 1:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    spread = values.std(correction=0)
    return values.mean().abs() + spread * NormalDist().inv_cdf(1 - density / 2)


def _begin(gradient: torch.Tensor, state: BucketState, comm: Communicator) -> Generator[dist.Work, None, bool]:
    """Accumulate, and agree whether any rank is poisoned; if so, the step is undone and over. Counts the step."""
    if len(gradient) > MAX_NUMEL:
        raise ValueError(
            f"a bucket has {len(gradient)} elements, and this exchange sends positions as int32: "
            f"expected at most {MAX_NUMEL}, use smaller buckets"
        )
    flag = select.accumulate(gradient, state.residual).to(torch.int32).reshape(1)
    yield comm.all_reduce(flag, "poison", MAX)
    record_stream(flag)
    state.step += 1
    poisoned = bool(flag.item())
    if poisoned:
        select.undo(gradient, state.residual)
    return poisoned


def _clear(residual: torch.Tensor, offered: torch.Tensor) -> None:
    """Zero the residual where something was offered, in an exchange that applies everything offered."""
    residual[offered[:, 1].to(torch.int64)] = 0.0


def _apply(gradient: torch.Tensor, parts: Sequence[torch.Tensor], divisor: float) -> None:
    """gradient ← the sum of the parts / divisor; added in their order, so that all ranks get the same bits."""
    gradient.zero_()
    for part in parts:
        select.add_pairs(gradient, part[None])
    gradient.div_(divisor)


def _receive(
    mine: torch.Tensor, comm: Communicator, distance: int, phase: str
) -> Generator[dist.Work, None, torch.Tensor]:
    """One level of the tree: the pairs that my partner sends me, if I am on the receiving side, else none.

    At distance d rank 2d·i is the parent of rank 2d·i + d. Every rank knows who sends what, so no counts are sent.
    """
    going, coming = [0] * comm.size, [0] * comm.size
    offset = comm.rank % (2 * distance)
    if offset == 0 and comm.rank + distance < comm.size:
        (coming if phase == "up" else going)[comm.rank + distance] = len(mine)
    elif offset == distance:
        (going if phase == "up" else coming)[comm.rank - distance] = len(mine)
    received = torch.empty(sum(coming), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_to_all(received, mine[: sum(going)], phase, coming, going)
    return received


def _merge(mine: torch.Tensor, other: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The k largest sums of two lists of k pairs; all other sums are added to the residual."""
    both = torch.cat([mine, other])
    positions, where = torch.unique(both[:, 1].to(torch.int64), return_inverse=True)
    sums = torch.zeros(len(positions), dtype=torch.float32, device=both.device)
    for half in (slice(0, len(mine)), slice(len(mine), None)):
        sums.index_add_(0, where[half], both[half, 0].contiguous().view(torch.float32))
    kept = torch.topk(sums.abs(), len(mine), sorted=False).indices.sort().values
    dropped = torch.ones_like(sums, dtype=torch.bool)
    dropped[kept] = False
    residual[positions[dropped]] += sums[dropped]
    return torch.stack([sums[kept].view(torch.int32), positions[kept].to(torch.int32)], dim=-1)
