"""The other exchanges that Ok-Topk is compared with, under the same contract and the same counting of words.

dense       2n(P−1)/P words: an all-reduce
topk        2k(P−1): an all-gather of everyone's top-k
gtopk       4k·log₂P: top-k merged up a tree and sent down again
dsa         between 4k(P−1)/P and (2k+n)(P−1)/P: sums at owners, all of them gathered (SparCML's split all-gather)
gaussian    2k(P−1), if its threshold selects k: an all-gather of what passes a Gaussian's quantile
"""

from collections.abc import Generator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from anabranch.bench.allgather import (
    allgather_exchange,
    apply_all,
    begin,
    clear,
    pairs_at,
    top_pairs,
    wanted,
)
from anabranch.comm.communicator import Communicator
from anabranch.comm.exchange import Steps, record_stream
from anabranch.sparse import regions, select
from anabranch.sparse.state import BucketState
from anabranch.sparse.thresholds import gaussian_magnitude


class Exchange(Protocol):
    """What all exchanges are: steps after which the gradient is the average of what was applied."""

    def __call__(
        self, gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
    ) -> Steps:
        """See ``oktopk.exchange``."""
        ...


def dense_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,  # noqa: ARG001
) -> Steps:
    """Everything that waits and everything new, all-reduced; the residual is zero afterwards. No host waits."""
    select.accumulate(gradient, state.residual)
    total = state.residual * (1.0 / divisor)
    yield comm.all_reduce(total, "dense")
    record_stream(total)
    fine = torch.isfinite(total).all()
    state.residual.copy_(torch.where(fine, 0.0, gradient))
    gradient.copy_(torch.where(fine, total, torch.nan))
    state.step += 1


def gtopk_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """Pairs of ranks merge their top-k and keep k, up a binary tree of any number of ranks, then down again.

    What a merge drops is a sum of several ranks' values; the rank that drops it keeps it in its own residual, so that
    nothing is lost (the published scheme returns it to nobody if the place wins by another branch).
    """
    poisoned = yield from begin(gradient, state, comm)
    if poisoned:
        return
    mine = top_pairs(state.residual, wanted(len(gradient), density))
    clear(state.residual, mine)
    distances = [1 << level for level in range((comm.size - 1).bit_length())]
    for distance in distances:
        other = yield from _passed(mine, comm, distance, "up")
        if len(other):
            mine = _merged(mine, other, state.residual)
    for distance in reversed(distances):
        above = yield from _passed(mine, comm, distance, "down")
        mine = above if len(above) else mine
    apply_all(gradient, [mine], divisor)


def dsa_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """Everyone's top-k, added at the owners of equal regions; every sum is gathered, as values alone where shorter."""
    poisoned = yield from begin(gradient, state, comm)
    if poisoned:
        return
    numel = len(gradient)
    bounds = regions.uniform(numel, comm.size, gradient.device)
    mine = top_pairs(state.residual, wanted(numel, density))
    counts = torch.searchsorted(mine[:, 1].contiguous(), bounds.to(torch.int32)).diff().to(torch.int32)
    expected = torch.empty_like(counts)
    yield comm.all_to_all(expected, counts, "counts")
    coming = expected.tolist()
    received = torch.empty(sum(coming), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_to_all(received, mine, "split", coming, counts.tolist())
    clear(state.residual, mine)

    gradient.zero_()
    for part in received.split(coming):
        select.add(gradient, part[None])
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
            select.add(gradient, piece.view(1, -1, 2))
        else:
            gradient[start:end] = piece.view(torch.float32)
    gradient.div_(divisor)


def gaussian_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """All-gather of whatever passes the threshold that would select k, were the values Gaussian."""
    poisoned = yield from begin(gradient, state, comm)
    if poisoned:
        return
    threshold = gaussian_magnitude(state.residual, density)
    mine = pairs_at(state.residual, select.passing(state.residual, threshold).nonzero().flatten())
    lengths = torch.empty(comm.size, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int32, device=mine.device), "counts")
    counts = lengths.tolist()
    everyone = torch.empty(sum(counts), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_gather_uneven(everyone, mine, counts, "gather")
    clear(state.residual, mine)
    apply_all(gradient, everyone.split(counts), divisor)


RIVALS: Mapping[str, Exchange] = {
    "dense": dense_exchange,
    "topk": allgather_exchange,
    "gtopk": gtopk_exchange,
    "dsa": dsa_exchange,
    "gaussian": gaussian_exchange,
}


def _passed(
    mine: torch.Tensor, comm: Communicator, distance: int, phase: str
) -> Generator[dist.Work, None, torch.Tensor]:
    """One level of the tree: the pairs that reach me from my partner, if I am on the receiving side, else none.

    At distance d rank 2d·i is the parent of rank 2d·i + d. Everyone knows who sends what, so no counts travel.
    """
    going, coming = [0] * comm.size, [0] * comm.size
    place = comm.rank % (2 * distance)
    if place == 0 and comm.rank + distance < comm.size:
        (coming if phase == "up" else going)[comm.rank + distance] = len(mine)
    elif place == distance:
        (going if phase == "up" else coming)[comm.rank - distance] = len(mine)
    received = torch.empty(sum(coming), 2, dtype=torch.int32, device=mine.device)
    yield comm.all_to_all(received, mine[: sum(going)], phase, coming, going)
    return received


def _merged(mine: torch.Tensor, other: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The k largest of the sums of two lists of k pairs; the others are added to the residual."""
    both = torch.cat([mine, other])
    places, where = torch.unique(both[:, 1].to(torch.int64), return_inverse=True)
    sums = torch.zeros(len(places), dtype=torch.float32, device=both.device)
    for half in (slice(0, len(mine)), slice(len(mine), None)):
        sums.index_add_(0, where[half], both[half, 0].contiguous().view(torch.float32))
    kept = torch.topk(sums.abs(), len(mine), sorted=False).indices.sort().values
    dropped = torch.ones_like(sums, dtype=torch.bool)
    dropped[kept] = False
    residual[places[dropped]] += sums[dropped]
    return torch.stack([sums[kept].view(torch.int32), places[kept].to(torch.int32)], dim=-1)
