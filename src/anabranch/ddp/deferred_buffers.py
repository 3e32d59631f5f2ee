"""Buffers (BatchNorm's running statistics) sent behind the gradients instead of before the forward.

DDP lets every forward see rank 0's buffers by broadcasting them, one message per dtype, before the forward, where
nothing hides it. Here rank 0's buffers travel behind the last gradient bucket, in one message, and the next forward
installs them. Between the two a program may change rank 0's buffers (load a checkpoint, reset statistics); so that
every forward still sees exactly what DDP would show it, rank 0 confirms with one byte that they are unchanged, and if
they are not, all ranks broadcast as DDP does.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from anabranch.comm.agree import Group
from anabranch.comm.exchange import Steps
from anabranch.comm.lanes import Lane, Message


class DeferredBuffers:
    """One model's buffers on their way from rank 0; ``control`` is a group that carries host memory."""

    def __init__(self, current: Callable[[], Sequence[torch.Tensor]], control: Group) -> None:
        self._current, self._control = current, control
        self._sent: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._message: torch.Tensor | None = None
        self._arrived: torch.futures.Future[torch.Tensor] | None = None

    def send(self, lane: Lane) -> None:
        """Broadcast rank 0's buffers behind what the lane already carries. Every rank calls it in the same step."""
        if self._arrived is not None:
            return
        self._sent = _widest_first(self._current())
        if not self._sent:
            return
        with torch.no_grad():
            flat = [_flatten_dense_tensors(alike) for alike in _alike(self._sent)]
            self._message = torch.cat([part.view(torch.uint8) for part in flat])
        self._versions = [buffer._version for buffer in self._sent]
        steps = _broadcast(self._message, lane.group)
        self._arrived = lane.submit(Message(steps, self._message, "the broadcast of buffers from rank 0"))

    def drain(self) -> None:
        """Wait until what was sent has arrived."""
        if self._arrived is not None:
            self._arrived.wait()

    def discard(self) -> None:
        """Let go of what was sent: under join() rank 0 may not be the one whose buffers count."""
        self.drain()
        self._arrived = None

    def close(self) -> None:
        """Let go of the group."""
        self._arrived = None
        del self._control

    def install(self) -> bool:
        """Put what arrived into the buffers; False, on all ranks alike, if DDP's own broadcast is needed instead."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return False
        arrived.wait()
        message = self._message
        assert message is not None
        if not self._confirmed(self._same_shapes()):
            return False
        if dist.get_rank(self._control) != 0:
            groups = _alike(self._sent)
            parts = message.split([sum(b.numel() * b.element_size() for b in alike) for alike in groups])
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._sent)):
                for alike, part in zip(groups, parts, strict=True):  # a kernel per dtype, not one per buffer
                    torch._foreach_copy_(alike, _unflatten_dense_tensors(part.view(alike[0].dtype), alike))
        return True

    def _same_shapes(self) -> bool:
        """Buffers that were added, removed or replaced: DDP needs that to happen alike on every rank, and so do we."""
        now = _widest_first(self._current())
        same = len(now) == len(self._sent) and all(
            new.shape == old.shape and new.dtype == old.dtype and new.device == old.device
            for new, old in zip(now, self._sent, strict=True)
        )
        if same and any(new is not old for new, old in zip(now, self._sent, strict=True)):
            self._sent, self._versions = now, [-1] * len(now)  # replaced: not what was sent
        return same

    def _confirmed(self, same_shapes: bool) -> bool:
        """Whether rank 0's buffers are still those it sent, by version counter (writes through .data go unseen)."""
        unchanged = same_shapes and self._versions == [buffer._version for buffer in self._sent]
        answer = torch.tensor([unchanged], dtype=torch.uint8)
        dist.broadcast(answer, group_src=0, group=self._control)
        return bool(answer.item())


def _widest_first(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In the order of the message: each dtype together, and none at an odd address for its elements."""
    return sorted(buffers, key=lambda buffer: (-buffer.element_size(), str(buffer.dtype)))


def _alike(buffers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Runs of the same dtype."""
    return [list(run) for _, run in groupby(buffers, key=lambda buffer: buffer.dtype)]


def _broadcast(message: torch.Tensor, group: Group) -> Steps:
    work = dist.broadcast(message, group_src=0, group=group, async_op=True)
    assert work is not None
    yield work
