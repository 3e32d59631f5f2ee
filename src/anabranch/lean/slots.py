"""Two slots: the only memory in which a bucket's gradient is one tensor, used in turn."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.futures import Future


class Slot(NamedTuple):
    """A slot in use; ``tensor`` holds anything at first."""

    number: int
    tensor: torch.Tensor


class Slots:
    """Memory for the bucket that travels and for the one that is next, each as large as the largest bucket.

    Whoever takes a slot waits for its last user: the host on a CPU, the current stream on a GPU.
    """

    def __init__(self, nbytes: Sequence[int], device: torch.device, count: int = 2) -> None:
        largest = max(nbytes, default=0)
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        self._last: list[Future[torch.Tensor] | None] = [None] * count
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> Slot:
        """The next slot, for so many elements."""
        index, self._next = self._next, (self._next + 1) % len(self._memory)
        if (last := self._last[index]) is not None:
            last.wait()
        return Slot(index, self._memory[index][: numel * dtype.itemsize].view(dtype))

    def lend(self, slot: Slot, until: Future[torch.Tensor]) -> None:
        """It is in use until then."""
        self._last[slot.number] = until

    def settle(self) -> None:
        """Wait for all users, and raise what stopped them."""
        for index, last in enumerate(self._last):
            if last is not None:
                last.wait()
            self._last[index] = None
