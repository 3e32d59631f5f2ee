"""Top-k all-gather: every rank sends its k largest values to everyone. The oracle: nothing in it is clever.

2k(P−1) words per rank: it grows with the ranks. Everything offered is applied.
"""

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from anabranch.comm.communicator import MAX, Communicator
from anabranch.comm.exchange import Steps, record_stream
from anabranch.sparse import select
from anabranch.sparse.state import BucketState

MOST_NUMEL = 2**31 - 1  # places in the bucket travel as int32 here


def allgather_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float
) -> Steps:
    """The contract of ``oktopk.exchange``; applies the sum of everyone's exact top-k."""
    poisoned = yield from begin(gradient, state, comm)
    if poisoned:
        return
    mine = top_pairs(state.residual, wanted(len(gradient), density))
    everyone = torch.empty(comm.size, *mine.shape, dtype=torch.int32, device=mine.device)
    yield comm.all_gather(everyone, mine[None], "gather")
    clear(state.residual, mine)
    apply_all(gradient, everyone.unbind(), divisor)


def begin(gradient: torch.Tensor, state: BucketState, comm: Communicator) -> Generator[dist.Work, None, bool]:
    """Accumulate and agree whether any rank is poisoned; if so the step is undone and over. Counts the step."""
    if len(gradient) > MOST_NUMEL:
        raise ValueError(f"this exchange sends places as int32, and a bucket of {len(gradient)} elements has too many")
    flag = select.accumulate(gradient, state.residual).to(torch.int32).reshape(1)
    yield comm.all_reduce(flag, "poison", MAX)
    record_stream(flag)
    state.step += 1
    poisoned = bool(flag.item())
    if poisoned:
        select.undo(gradient, state.residual)
    return poisoned


def wanted(numel: int, density: float) -> int:
    """k: at least one value, at most all."""
    return min(numel, max(1, round(density * numel)))


def top_pairs(values: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [k, 2]: the bits and places of the k largest magnitudes, in order of place."""
    return pairs_at(values, torch.topk(values.abs(), k, sorted=False).indices.sort().values)


def pairs_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """int32 [m, 2]: the bits of the values at these places, and the places."""
    return torch.stack([values[places].view(torch.int32), places.to(torch.int32)], dim=-1)


def clear(residual: torch.Tensor, offered: torch.Tensor) -> None:
    """Zero where something was offered, in an exchange that applies all that is."""
    residual[offered[:, 1].to(torch.int64)] = 0.0


def apply_all(gradient: torch.Tensor, parts: Sequence[torch.Tensor], divisor: float) -> None:
    """gradient ← the sum of the parts, in their order, so that all ranks get the same bits; divided."""
    gradient.zero_()
    for part in parts:
        select.add(gradient, part[None])
    gradient.div_(divisor)
