"""Host buffers that copies from a device go to, kept from step to step: to allocate pinned memory is slow."""

from collections import deque
from dataclasses import dataclass

import torch

SNUG = 1.25  # a free buffer may be this many times too large
SPARE = 2  # times what was ever used at once may be held


@dataclass(slots=True)
class Buffer:
    """Bytes on the host, and the last copy that reads them: nothing may be written over them before it is done."""

    space: torch.Tensor
    read: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it holds."""
        return self.space.numel()


class HostPool:
    """Hands out host buffers and takes them back; holds at most ``limit_nbytes``, if given."""

    def __init__(self, pinned: bool, limit_nbytes: int | None = None) -> None:
        self.nbytes = 0  # allocated, in use or free
        self.allocations = 0
        self._most_used = 0
        self._pinned, self._limit_nbytes = pinned, limit_nbytes
        self._free: dict[int, deque[Buffer]] = {}
        self._returned: deque[Buffer] = deque()

    @property
    def free_nbytes(self) -> int:
        """What nobody uses now."""
        self._sort_returned()
        return sum(nbytes * len(buffers) for nbytes, buffers in self._free.items())

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer of at least that size, or None if the limit does not allow another."""
        self._sort_returned()
        fits = [size for size, free in self._free.items() if free and nbytes <= size <= max(nbytes * SNUG, nbytes + 1)]
        if fits:
            return self._free[min(fits)].popleft()  # the one returned first: its last copy is most likely over
        if self._limit_nbytes is not None and not self._make_room(self._limit_nbytes - nbytes):
            return None
        self._most_used = max(self._most_used, self.nbytes - self.free_nbytes + nbytes)
        self._make_room(SPARE * self._most_used - nbytes)  # sizes that no longer come must not stay for ever
        self.nbytes += nbytes
        self.allocations += 1
        return Buffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Does one atomic thing: autograd frees graphs on any thread and at any moment."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Let go of what nobody uses."""
        self._sort_returned()
        self._make_room(0)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.nbytes, deque()).append(buffer)

    def _make_room(self, limit_nbytes: int) -> bool:
        """Free what is not in use, largest first, until no more than that is allocated; whether it sufficed.

        Torch itself keeps the memory until the copies that it knows of are done.
        """
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.nbytes > limit_nbytes:
                self._free[size].popleft()
                self.nbytes -= size
        return self.nbytes <= limit_nbytes
