"""Slots: the only memory in which a bucket's gradient, or its residual, is one tensor on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.futures import Future

from anabranch.planning.memory import ALIGNMENT, SLOTS, ring_nbytes


class Slot(NamedTuple):
    """A slot in use. ``tensor`` is not initialised."""

    number: int
    tensor: torch.Tensor


class SlotRing:
    """Memory for ``SLOTS`` buckets at a time, for as long as the plan is in force.

    Buckets take it in their order, alternately from its begin and from its end, so that two neighbours never meet.
    ``acquire`` waits for the slot's last user: the host waits on a CPU, the current stream on a GPU.
    """

    def __init__(self, bucket_nbytes: Sequence[int], device: torch.device) -> None:
        self._memory = torch.empty(ring_nbytes(bucket_nbytes), dtype=torch.uint8, device=device)
        self._last_use: list[Future[torch.Tensor] | None] = [None] * SLOTS
        self._next = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return the next slot as a tensor of ``numel`` elements, behind its last user."""
        index = self._next
        self._next = (index + 1) % SLOTS
        if (last := self._last_use[index]) is not None:
            last.wait()
        nbytes = numel * dtype.itemsize
        start = 0 if index == 0 else len(self._memory) - -(-nbytes // ALIGNMENT) * ALIGNMENT
        return Slot(index, self._memory[start : start + nbytes].view(dtype))

    def release_after(self, slot: Slot, last_use: Future[torch.Tensor]) -> None:
        """Let the slot be acquired again when ``last_use`` is complete."""
        self._last_use[slot.number] = last_use

    @property
    def idle(self) -> bool:
        """Whether all users are done, so that ``wait`` would not wait."""
        return all(last is None or last.done() for last in self._last_use)

    def wait(self) -> None:
        """Wait for all users, and raise the exception of one that failed."""
        for index, last in enumerate(self._last_use):
            if last is not None:
                last.wait()
            self._last_use[index] = None


class FreshSlots:
    """A slot of its own for every bucket of a step, as large as the bucket.

    Memory is taken when a bucket is complete, so when the activations of the layers behind it are gone. None is kept
    between steps.

    at_once   so many buckets have memory at the same time: ``acquire`` first waits for the user of the oldest slot, and
              frees it; the host waits on a CPU, the current stream on a GPU. None: all keep theirs until ``free``
    """

    def __init__(self, device: torch.device, at_once: int | None = SLOTS) -> None:
        self._device = device
        self._at_once = at_once
        self._next = 0
        self._tensors: dict[int, torch.Tensor] = {}  # by slot, the oldest first
        self._uses: dict[int, Future[torch.Tensor]] = {}  # by slot

    def acquire(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return memory for a bucket of ``numel`` elements."""
        while self._at_once is not None and len(self._tensors) >= self._at_once:
            oldest = next(iter(self._tensors))
            if oldest in self._uses:
                self._uses.pop(oldest).wait()
            _release(self._tensors.pop(oldest))
        slot = Slot(self._next, torch.empty(numel, dtype=dtype, device=self._device))
        self._next += 1
        self._tensors[slot.number] = slot.tensor
        return slot

    def release_after(self, slot: Slot, last_use: Future[torch.Tensor]) -> None:
        """Note when a bucket's exchange is over."""
        self._uses[slot.number] = last_use

    @property
    def idle(self) -> bool:
        """Whether all users are done, so that ``wait`` would not wait."""
        return all(last.done() for last in self._uses.values())

    def wait(self) -> None:
        """Wait for all exchanges, and raise the exception of one that failed."""
        uses, self._uses = self._uses, {}
        for last in uses.values():
            last.wait()

    def free(self) -> None:
        """Free all memory: the step is over, and nobody reads an average any more."""
        tensors, self._tensors = self._tensors, {}
        for tensor in tensors.values():
            _release(tensor)


def _release(tensor: torch.Tensor) -> None:
    """Free the memory. To drop the tensor is not enough: a lane keeps its last works, and these what they sent."""
    tensor.untyped_storage().resize_(0)
