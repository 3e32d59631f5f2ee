"""The interface of an exchange: how the gradients of one bucket become their average on every rank.

An exchange is a generator. Each step issues one asynchronous operation and yields its work. The lane that runs the
exchange makes sure that the work is done (Gloo), or ordered on the stream (NCCL), before it asks for the next step. So
no exchange ever waits inside a future's callback, where Gloo hangs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from anabranch.values.plan import Bucket

Group = dist.ProcessGroup
Steps = Iterator[dist.Work]
Collective = Callable[[torch.Tensor, Group, float], Steps]  # (buffer, group, divisor)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients that may be compressed


class Traffic(NamedTuple):
    """Bytes that one rank sends and receives for a bucket, and the share of its elements that is exchanged.

    Computed from sizes, for rings and direct messages; headers and repeated packets are not counted.
    """

    sent_nbytes: int
    received_nbytes: int
    density: float


class Scaler(Protocol):
    """A loss scaler, such as torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """The factor by which losses are multiplied."""
        ...


class ExchangeFamily(ABC):
    """Exchanges of one algorithm, such as all dense ones, or Ok-Topk at several densities.

    kinds   the kinds to measure and to plan with
    """

    kinds: tuple[str, ...] = ()

    @abstractmethod
    def handles(self, kind: str) -> bool:
        """Whether a kind of this name belongs to this family."""

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this kind."""
        return self.handles(kind) and dtype in DTYPES

    @abstractmethod
    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """The exchange of one bucket in one step.

        Leaves in ``buffer`` the sum over the ranks of what each offered, divided by ``divisor``, with the same bits on
        all ranks; what a rank did not offer is in its residual. Called once per bucket and step, on every rank in the
        same order.
        """

    @abstractmethod
    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """Bytes of the last exchange of this bucket, computed without waiting for a device; None if unknown."""

    @abstractmethod
    def probe(self, kind: str) -> Collective:
        """An exchange of this kind for timing. It belongs to no bucket and does not touch the model's residuals."""

    def close(self) -> None:
        """Drop all references to process groups; exchanges that follow look their groups up again."""
        return


def all_gather(output: torch.Tensor, part: torch.Tensor, group: Group, async_op: bool = True) -> dist.Work | None:
    """Start an all-gather of equal parts into one tensor; torch 2.13 renamed the function that does it."""
    operation = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = operation(output, part, group=group, async_op=async_op)
    return work


def issued(work: dist.Work | None, what: str = "a bucket") -> dist.Work:
    """The work of an asynchronous operation; torch returns None on a rank that is not in the group."""
    if work is None:
        raise RuntimeError(f"this rank is not a member of the process group on which it was to send {what}")
    return work


def record_stream(*tensors: torch.Tensor) -> None:
    """Keep the allocator from reusing the memory of these tensors before the current stream has finished with it.

    The first step of an exchange may run on the caller's stream and the rest on the lane's, and torch's allocator knows
    only the stream on which a tensor was allocated.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels can work on this device: on a GPU, where Triton is installed."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
