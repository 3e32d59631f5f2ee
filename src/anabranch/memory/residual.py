"""Where what waits to be sent lives: in place, where gradients are added to it as they come, or in host memory.

In host memory it comes to the device while the bucket before it is computed, and goes back behind its exchange. Two
slots of the largest bucket are enough. On a GPU copies run on streams of their own; each waits, on the device, for the
event after which its source is whole and its target free.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch.futures import Future

from anabranch.memory.slots import Slot, Slots
from anabranch.runtime.collectives import Remembered


class Residuals(Protocol):
    """What waits of the sparse buckets of one model."""

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """The sparse buckets have these sizes from now on."""
        ...

    def at_hand(self, state: Remembered) -> Mapping[str, torch.Tensor] | None:
        """What gradients can be added to as they come, by parameter; None if it must be fetched first."""
        ...

    def prefetch(self, state: Remembered) -> None:
        """Its bucket comes next."""
        ...

    def fetch(self, state: Remembered) -> Mapping[str, torch.Tensor]:
        """What gradients are to be added to now, on the current stream."""
        ...

    def lend(self, state: Remembered, until: Future[torch.Tensor]) -> None:
        """Its bucket was launched."""
        ...

    def put_back(self, state: Remembered) -> None:
        """Its exchange is over, on the current stream."""
        ...

    def settle(self) -> None:
        """Wait on the host until all is where it belongs."""
        ...


class InPlace:
    """On the device for ever: it is the memory in which gradients add up."""

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """Needs nothing."""

    def at_hand(self, state: Remembered) -> Mapping[str, torch.Tensor] | None:
        """See ``Residuals``."""
        return state.pieces()

    def prefetch(self, state: Remembered) -> None:
        """It is there."""

    def fetch(self, state: Remembered) -> Mapping[str, torch.Tensor]:
        """See ``Residuals``."""
        return state.pieces()

    def lend(self, state: Remembered, until: Future[torch.Tensor]) -> None:
        """Nobody else wants it."""

    def put_back(self, state: Remembered) -> None:
        """It stays."""

    def settle(self) -> None:
        """It is where it belongs."""


class Visit(NamedTuple):
    """What waits of one bucket, on the device: its slot, its home in host memory, and when the copy is there."""

    slot: Slot
    home: torch.Tensor
    there: torch.cuda.Event | None


class InHostMemory:
    """In pinned host memory, and on the device only from its bucket's backward to the end of its exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = Slots([], device)
        self._visits: dict[tuple[str, ...], Visit] = {}
        self._lent: dict[tuple[str, ...], Slot] = {}  # between fetch() and lend(), when a lane may have put it back
        self._freed: dict[int, torch.cuda.Event] = {}  # by slot: its last content is back in host memory
        self._home: dict[tuple[str, ...], torch.cuda.Event] = {}  # by bucket: the same
        self._coming, self._going = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """See ``Residuals``."""
        self.settle()
        self._slots, self._freed, self._home = Slots(nbytes, self._device), {}, {}
        if self._coming is not None:  # whoever had that memory before may still be using it
            self._coming.wait_stream(torch.cuda.current_stream(self._device))
        if self._coming is not None:  # the allocator may have taken them from what the current stream still uses
            self._coming.wait_stream(torch.cuda.current_stream(self._device))

    def at_hand(self, state: Remembered) -> Mapping[str, torch.Tensor] | None:
        """It is away; one that was just made on the device goes to host memory now, before the next one is made."""
        if state.residual.is_cuda and state.names not in self._visits:
            torch.cuda.current_stream(self._device).synchronize()
            state.residual = torch.empty_like(state.residual, device="cpu", pin_memory=True).copy_(state.residual)
        return None

    def prefetch(self, state: Remembered) -> None:
        """See ``Residuals``."""
        if state.names in self._visits:
            return
        home, there = state.residual, None
        with torch.cuda.stream(self._coming) if self._coming is not None else nullcontext():
            slot = self._slots.take(home.numel(), home.dtype)
            if self._coming is not None:
                for event in (self._freed.get(slot.number), self._home.get(state.names)):
                    if event is not None:
                        self._coming.wait_event(event)
            slot.tensor.copy_(home, non_blocking=True)
            if self._coming is not None:
                there = self._coming.record_event()
        self._visits[state.names] = Visit(slot, home, there)

    def fetch(self, state: Remembered) -> Mapping[str, torch.Tensor]:
        """See ``Residuals``."""
        self.prefetch(state)
        visit = self._visits[state.names]
        if visit.there is not None:
            torch.cuda.current_stream(self._device).wait_event(visit.there)
        state.residual = visit.slot.tensor
        self._lent[state.names] = visit.slot
        return state.pieces()

    def lend(self, state: Remembered, until: Future[torch.Tensor]) -> None:
        """See ``Residuals``."""
        self._slots.lend(self._lent.pop(state.names), until)

    def put_back(self, state: Remembered) -> None:
        """See ``Residuals``."""
        visit = self._visits.pop(state.names)
        if self._going is None:
            visit.home.copy_(visit.slot.tensor)
        else:
            self._going.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._going):
                visit.home.copy_(visit.slot.tensor, non_blocking=True)
                self._freed[visit.slot.number] = self._home[state.names] = self._going.record_event()
        state.residual = visit.home

    def settle(self) -> None:
        """See ``Residuals``."""
        self._slots.settle()
        if self._going is not None:
            self._going.synchronize()
