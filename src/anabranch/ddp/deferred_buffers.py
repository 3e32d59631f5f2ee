"""Buffers (BatchNorm's running statistics) sent after the gradients instead of before the forward.

DDP broadcasts rank 0's buffers before every forward, one message per dtype, and no computation overlaps with it. Here
rank 0's buffers are sent after the last gradient bucket, in one message, and the next forward installs them. In the
meantime a program may change rank 0's buffers (load a checkpoint, reset statistics). So that every forward still sees
exactly the buffers that DDP would give it, rank 0 confirms with one byte that they are unchanged; if they are not, all
ranks broadcast as DDP does.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from anabranch.exchange.agreement import explained
from anabranch.exchange.interface import Group, Steps
from anabranch.exchange.lanes import Lane, Message


class DeferredBuffers:
    """Broadcasts one model's buffers from rank 0 after each step.

    current   returns the model's buffers as they are now
    control   a group of the same ranks that can send host memory; set it before the first step that sends
    """

    control: Group | None = None

    def __init__(self, current: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._current = current
        self._sent: list[torch.Tensor] = []
        self._versions: list[int] = []  # version counters of the buffers when they were sent
        self._message: torch.Tensor | None = None
        self._arrived: torch.futures.Future[torch.Tensor] | None = None

    def send(self, lane: Lane) -> None:
        """Broadcast rank 0's buffers after what was submitted to the lane. Every rank calls it in the same step."""
        if self._arrived is not None:
            return
        self._sent = _in_message_order(self._current())
        if not self._sent:
            return
        with torch.no_grad():
            flat = [_flatten_dense_tensors(run) for run in _runs_of_one_dtype(self._sent)]
            self._message = torch.cat([part.view(torch.uint8) for part in flat])
        self._versions = [buffer._version for buffer in self._sent]
        steps = _broadcast(self._message, lane.group)
        self._arrived = lane.submit(Message((steps,), self._message, "the broadcast of buffers from rank 0"))

    def drain(self) -> None:
        """Wait until the buffers that were sent have arrived."""
        if self._arrived is not None:
            self._arrived.wait()

    def discard(self) -> None:
        """Wait for the buffers that were sent, and drop them: DDP broadcasts them itself this time."""
        self.drain()
        self._arrived = None

    def close(self) -> None:
        """Drop the references to process groups."""
        self._arrived = self.control = None

    def install(self) -> bool:
        """Copy the received values to the buffers; False, on all ranks, if DDP must broadcast them instead."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return False
        arrived.wait()
        message = self._message
        assert message is not None
        if not self._confirmed(self._same_shapes()):
            return False
        if dist.get_rank(self.control) != 0:
            runs = _runs_of_one_dtype(self._sent)
            parts = message.split([sum(b.numel() * b.element_size() for b in run) for run in runs])
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._sent)):
                for run, part in zip(runs, parts, strict=True):  # a kernel per dtype, not one per buffer
                    torch._foreach_copy_(run, _unflatten_dense_tensors(part.view(run[0].dtype), run))
        return True

    def _same_shapes(self) -> bool:
        """Whether the model's buffers have the shapes of those that were sent.

        Like DDP, this requires that buffers are added, removed and replaced in the same way on every rank.
        """
        now = _in_message_order(self._current())
        same = len(now) == len(self._sent) and all(
            new.shape == old.shape and new.dtype == old.dtype and new.device == old.device
            for new, old in zip(now, self._sent, strict=True)
        )
        if same and any(new is not old for new, old in zip(now, self._sent, strict=True)):
            self._sent = now
            self._versions = [-1] * len(now)  # replaced buffers count as changed
        return same

    @explained("ranks could not agree on the model's buffers")
    def _confirmed(self, same_shapes: bool) -> bool:
        """Whether rank 0's buffers are unchanged since it sent them, by version counter; misses writes to ``.data``."""
        unchanged = same_shapes and self._versions == [buffer._version for buffer in self._sent]
        answer = torch.tensor([unchanged], dtype=torch.uint8)
        dist.broadcast(answer, group_src=0, group=self.control)
        return bool(answer.item())


def _in_message_order(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sort by decreasing element size, then dtype: equal dtypes are adjacent and all parts of a message are aligned."""
    return sorted(buffers, key=lambda buffer: (-buffer.element_size(), str(buffer.dtype)))


def _runs_of_one_dtype(buffers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split into runs of buffers with the same dtype."""
    return [list(run) for _, run in groupby(buffers, key=lambda buffer: buffer.dtype)]


def _broadcast(message: torch.Tensor, group: Group) -> Steps:
    work = dist.broadcast(message, group_src=0, group=group, async_op=True)
    assert work is not None
    yield work
