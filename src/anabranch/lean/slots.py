"""Slots: the only memory in which a bucket's gradient, or its residual, is one tensor on the device."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.futures import Future

SLOTS = 2  # one for the bucket whose exchange runs, one for the next bucket


class Slot(NamedTuple):
    """A slot in use. ``tensor`` is not initialised."""

    number: int
    tensor: torch.Tensor


class Slots(Protocol):
    """Hands out memory for buckets."""

    def acquire(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return memory for a bucket of ``numel`` elements."""
        ...

    def release_after(self, slot: Slot, last_use: Future[torch.Tensor]) -> None:
        """Note when a bucket's exchange is over."""
        ...

    def wait(self) -> None:
        """Wait for all exchanges, and raise the exception of one that failed."""
        ...

    def free(self) -> None:
        """Free what need not be kept between steps: the step is over."""
        ...


class SlotRing:
    """``SLOTS`` slots, each as large as the largest bucket, used in turn.

    ``acquire`` waits for the slot's last user: the host waits on a CPU, the current stream on a GPU.
    """

    def __init__(self, bucket_nbytes: Sequence[int], device: torch.device) -> None:
        largest = max(bucket_nbytes, default=0)
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._last_use: list[Future[torch.Tensor] | None] = [None] * SLOTS
        self._next = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Slot:
        """Return the next slot as a tensor of ``numel`` elements, behind its last user."""
        index = self._next
        self._next = (index + 1) % SLOTS
        if (last := self._last_use[index]) is not None:
            last.wait()
        return Slot(index, self._memory[index][: numel * dtype.itemsize].view(dtype))

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

    def free(self) -> None:
        pass


class FreshSlots:
    """A slot of its own for every bucket of a step, for averages that live until all are known.

    Memory is taken when a bucket is complete, so when the activations of the layers behind it are gone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []  # of this step
        self._uses: list[Future[torch.Tensor]] = []  # of this step

    def acquire(self, numel: int, dtype: torch.dtype) -> Slot:
        self._tensors.append(torch.empty(numel, dtype=dtype, device=self._device))
        return Slot(len(self._tensors) - 1, self._tensors[-1])

    def release_after(self, slot: Slot, last_use: Future[torch.Tensor]) -> None:  # noqa: ARG002 - none is used again
        self._uses.append(last_use)

    def wait(self) -> None:
        uses, self._uses = self._uses, []
        for last in uses:
            last.wait()

    def free(self) -> None:
        tensors, self._tensors = self._tensors, []
        for (
            tensor
        ) in tensors:  # to drop the tensor is not enough: a lane keeps its last works, and these what they sent
            tensor.untyped_storage().resize_(0)
