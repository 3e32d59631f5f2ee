"""What a sparse exchange needs of a process group, so that the same exchange runs on real ranks and on virtual ones."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from anabranch.comm.dense import Group, gather, issued

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class ZeroBuffer:
    """Shared zero buffer; users re-zero it after use."""

    def __init__(self) -> None:
        self._zeros = torch.zeros(0)

    def zeros(self, numel: int, device: torch.device) -> torch.Tensor:
        """So many, float32."""
        if len(self._zeros) < numel or self._zeros.device != device:
            self._zeros = torch.zeros(numel, dtype=torch.float32, device=device)
        return self._zeros[:numel]


class Comm(Protocol):
    """A rank's view of its group. Every operation is issued at once and returns the work to yield.

    ``phase`` says what a message is for: tables of traffic and errors name it. Tensors are split along their first
    dimension; without counts, into equal parts.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 … size−1."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def zeros(self, numel: int, device: torch.device) -> torch.Tensor:
        """See ``ZeroBuffer``; exchanges on one ``Comm`` follow each other."""
        ...

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        phase: str,
        output_counts: Sequence[int] | None = None,
        given_counts: Sequence[int] | None = None,
    ) -> dist.Work:
        """Part j of ``given`` goes to rank j; ``output`` holds what the ranks sent here, in rank order."""
        ...

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> dist.Work:
        """Everyone's part, all of one size, in rank order."""
        ...

    def all_gather_uneven(
        self, output: torch.Tensor, part: torch.Tensor, counts: Sequence[int], phase: str
    ) -> dist.Work:
        """Everyone's part in rank order, where rank r's has ``counts[r]`` rows."""
        ...

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: dist.ReduceOp.RedOpType = SUM) -> dist.Work:
        """The sum (or maximum) over the ranks, in place."""
        ...


class GroupComm(ZeroBuffer):
    """A ``Comm`` over a process group of torch.distributed: Gloo or NCCL."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """See ``Comm``."""
        return self._rank

    @property
    def size(self) -> int:
        """See ``Comm``."""
        return self._size

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        phase: str,
        output_counts: Sequence[int] | None = None,
        given_counts: Sequence[int] | None = None,
    ) -> dist.Work:
        """See ``Comm``."""
        outputs, inputs = (None if counts is None else list(counts) for counts in (output_counts, given_counts))
        return issued(dist.all_to_all_single(output, given, outputs, inputs, group=self._group, async_op=True), phase)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> dist.Work:
        """See ``Comm``."""
        return issued(gather(output, part, self._group), phase)

    def all_gather_uneven(
        self, output: torch.Tensor, part: torch.Tensor, counts: Sequence[int], phase: str
    ) -> dist.Work:
        """See ``Comm``. Sent as one all-to-all of copies: Gloo has no uneven all-gather, and padding costs bytes."""
        copies = part.repeat(self._size, *[1] * (part.dim() - 1))
        return self.all_to_all(output, copies, phase, counts, [len(part)] * self._size)

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: dist.ReduceOp.RedOpType = SUM) -> dist.Work:
        """See ``Comm``."""
        return issued(dist.all_reduce(tensor, op=op, group=self._group, async_op=True), phase)
