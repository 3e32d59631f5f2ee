"""The dense collectives: what a bucket can name, each leaving the average of the group in the buffer it was given.

A collective is a generator of steps. Each step issues one asynchronous operation and yields its work; whoever drives
it (the ordered executor on Gloo, the comm hook itself on NCCL) sees to it that the work is done, or ordered on the
stream, before asking for the next step. So no collective ever waits inside another's callback.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
Steps = Iterator[dist.Work]
Collective = Callable[[torch.Tensor, Group, float], Steps]


def dense(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """All-reduce in the buffer's own precision; scaled first, as DDP does, so the sum of many ranks cannot overflow."""
    buffer.mul_(1.0 / divisor)
    yield issued(dist.all_reduce(buffer, group=group, async_op=True))


def bf16(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """bfloat16 on the wire, sums in float32: half the bytes of float32, and rounding that does not grow with ranks.

    Every rank rounds its contribution, receives all contributions to its own share, adds them in float32, rounds the
    average, and everyone gathers the shares. Each value is rounded twice, however many ranks there are; all ranks end
    with the same bits. A buffer that is not float32 goes by ``dense``.
    """
    if buffer.dtype != torch.float32:
        yield from dense(buffer, group, divisor)
        return
    ranks = dist.get_world_size(group)
    share = -(-buffer.numel() // ranks)
    offered = torch.zeros(ranks * share, dtype=torch.bfloat16, device=buffer.device)
    offered[: buffer.numel()].copy_(buffer)
    received = torch.empty_like(offered)
    yield issued(dist.all_to_all_single(received, offered, group=group, async_op=True))
    hold(offered, received)
    average = received.view(ranks, share).sum(dim=0, dtype=torch.float32).mul_(1.0 / divisor)
    yield issued(gather(offered, average.to(torch.bfloat16), group))
    buffer.copy_(offered[: buffer.numel()])


class Traffic(NamedTuple):
    """What one rank sends and receives for a bucket, and the share of its elements that is exchanged.

    Computed from sizes, for rings and direct messages: without what the transport adds.
    """

    sent_nbytes: int
    received_nbytes: int
    density: float


def traffic(kind: str, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
    """What a dense collective of this kind costs the wire; None if it is of another kind."""
    if kind not in COLLECTIVES:
        return None
    if kind == "bf16" and dtype == torch.float32:
        nbytes = 2 * (ranks - 1) * -(-numel // ranks) * torch.bfloat16.itemsize
    else:
        nbytes = 2 * (ranks - 1) * numel * dtype.itemsize // ranks
    return Traffic(nbytes, nbytes, 1.0)


COLLECTIVES: Mapping[str, Collective] = {"dense": dense, "bf16": bf16}


def gather(output: torch.Tensor, part: torch.Tensor, group: Group) -> dist.Work | None:
    """All-gather of equal parts into one tensor; torch 2.13 renamed the operation and warns about the old name."""
    operation = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = operation(output, part, group=group, async_op=True)
    return work


def issued(work: dist.Work | None, what: str = "a bucket") -> dist.Work:
    """The work of an asynchronous operation; torch returns None to a rank that is not in the group."""
    if work is None:
        raise RuntimeError(f"this rank is not a member of the process group on which it was to send {what}")
    return work


def all_finite(*tensors: torch.Tensor, below: float = inf) -> torch.Tensor:
    """Whether all elements of all of them are finite: a bool on their device, without a copy of any.

    In two kernels for each, since Lean asks for every gradient: the largest magnitude, NaN if one is, is less than inf,
    or than ``below``.
    """
    found = [torch.linalg.vector_norm(tensor, inf) < below for tensor in tensors if tensor.numel()]
    if not found:  # nothing has no largest element
        return torch.ones((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return found[0] if len(found) == 1 else torch.stack(found).all()


def hold(*tensors: torch.Tensor) -> None:
    """Keep memory from being handed out again before the current stream is done with it.

    The first part of an exchange may run on the caller's stream and the rest on the lane's; torch's allocator knows
    only the stream on which a tensor was made.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
