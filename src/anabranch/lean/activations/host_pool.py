"""A pool of host buffers, kept from step to step since allocating pinned memory is slow."""

from collections import deque
from dataclasses import dataclass

import torch

from anabranch.lean.activations.host_copies import CopyDone

MAX_OVERSIZE = 1.25  # a free buffer may be this many times larger than asked for
MAX_HELD = 2  # times the most bytes that were ever in use at once may be allocated


@dataclass(slots=True)
class HostBuffer:
    """Bytes on the host, and the last copy that reads them: nothing may write to them before it is done."""

    memory: torch.Tensor
    last_read: CopyDone = None

    @property
    def nbytes(self) -> int:
        """How many bytes it holds."""
        return self.memory.numel()


class HostPool:
    """Hands out host buffers and takes them back. Allocates at most ``limit_nbytes``, if given."""

    def __init__(self, pinned: bool, limit_nbytes: int | None = None, device: str = "cpu") -> None:
        self.nbytes = 0  # allocated, in use or free
        self.allocations = 0
        self._max_used_nbytes = 0
        self._pinned = pinned
        self._device = device
        self._limit_nbytes = limit_nbytes
        self._free: dict[int, deque[HostBuffer]] = {}  # by size
        self._returned: deque[HostBuffer] = deque()  # not yet sorted into _free

    @property
    def free_nbytes(self) -> int:
        """How many of the allocated bytes are not in use."""
        self._sort_returned()
        return sum(nbytes * len(buffers) for nbytes, buffers in self._free.items())

    def take(self, nbytes: int) -> HostBuffer | None:
        """Return a buffer of at least that size; None if the limit does not allow another."""
        self._sort_returned()
        most = max(nbytes * MAX_OVERSIZE, nbytes + 1)
        fitting = [size for size, free in self._free.items() if free and nbytes <= size <= most]
        if fitting:
            return self._free[min(fitting)].popleft()  # returned first, so its last read is most likely done
        if self._limit_nbytes is not None and not self._shrink(self._limit_nbytes - nbytes):
            return None
        self._max_used_nbytes = max(self._max_used_nbytes, self.nbytes - self.free_nbytes + nbytes)
        self._shrink(MAX_HELD * self._max_used_nbytes - nbytes)  # sizes that are no longer asked for must not stay
        self.nbytes += nbytes
        self.allocations += 1
        return HostBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned, device=self._device))

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back. One atomic operation, since autograd frees graphs on any thread at any moment."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        self._sort_returned()
        self._shrink(0)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.nbytes, deque()).append(buffer)

    def _shrink(self, limit_nbytes: int) -> bool:
        """Free unused buffers, largest first, until at most that much is allocated; return whether that sufficed.

        torch itself keeps the memory until the copies that it knows of are done.
        """
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.nbytes > limit_nbytes:
                self._free[size].popleft()
                self.nbytes -= size
        return self.nbytes <= limit_nbytes
