"""Communicator: what exchanges need of a process group. ``benchmarks/virtual.py`` has one of virtual ranks."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from anabranch.exchange.interface import Group, all_gather, issued

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class ZeroBuffer:
    """Shared zero buffer; users re-zero it after use."""

    def __init__(self) -> None:
        self._zeros = torch.zeros(0)

    def zeros(self, numel: int, device: torch.device) -> torch.Tensor:
        """The first ``numel`` elements of the buffer, float32. The buffer grows where it is too small."""
        if len(self._zeros) < numel or self._zeros.device != device:
            self._zeros = torch.zeros(numel, dtype=torch.float32, device=device)
        return self._zeros[:numel]


class StreamWork(dist.Work):
    """An operation that was issued on the current stream of a GPU: whatever follows on that stream runs after it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream(device)
        self._end = torch.cuda.Event()
        self._end.record(self._stream)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the host never waits
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())


class Communicator(ZeroBuffer):
    """One rank's view of its process group (Gloo or NCCL). Operations are issued at once and return the work to yield.

    ``phase`` says what a message is for: word counts and errors name it. Tensors are split along their first
    dimension; without counts, into equal parts. Exchanges on one communicator run one after another, so they may
    share its zero buffer.

    On a GPU operations run on the current stream, which is the lane's, and not on the group's own as asynchronous ones
    do: a stream that waits for another may hold up the computation behind it, where hardware queues are few (under MPS,
    or CUDA_DEVICE_MAX_CONNECTIONS=1). ResNet-50, int8, 4 NCCL hosts on one GPU: 74 ms a step before, 60 since.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        phase: str,
        output_counts: Sequence[int] | None = None,
        given_counts: Sequence[int] | None = None,
    ) -> dist.Work:
        """Send part j of ``given`` to rank j; ``output`` receives the parts from all ranks, in rank order."""
        outputs, inputs = (None if counts is None else list(counts) for counts in (output_counts, given_counts))
        return self._issue(dist.all_to_all_single, phase, output, given, outputs, inputs)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> dist.Work:
        """Gather the parts of all ranks, all of one size, in rank order."""
        return self._issue(all_gather, phase, output, part)

    def all_gather_uneven(
        self, output: torch.Tensor, part: torch.Tensor, counts: Sequence[int], phase: str
    ) -> dist.Work:
        """Gather the parts of all ranks in rank order, where the part of rank r has ``counts[r]`` rows."""
        # One all-to-all of copies: Gloo has no uneven all-gather, and padding would send more bytes.
        copies = part.repeat(self.size, *[1] * (part.dim() - 1))
        return self.all_to_all(output, copies, phase, counts, [len(part)] * self.size)

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: dist.ReduceOp.RedOpType = SUM) -> dist.Work:
        """Replace ``tensor`` by its sum (or maximum) over the ranks."""
        return self._issue(dist.all_reduce, phase, tensor, op)

    def _issue(
        self, operation: Callable[..., dist.Work | None], phase: str, tensor: torch.Tensor, *args: Any
    ) -> dist.Work:
        if not tensor.is_cuda:
            return issued(operation(tensor, *args, group=self._group, async_op=True), phase)
        operation(tensor, *args, group=self._group, async_op=False)
        return StreamWork(tensor.device)


class Communicators(dict[Group, Communicator]):
    """The communicator of each process group, made when it is first asked for."""

    def __missing__(self, group: Group) -> Communicator:
        self[group] = made = Communicator(group)
        return made
