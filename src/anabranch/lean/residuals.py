"""Where what waits to be sent lives: in place, where gradients are added to it as they come, or in host memory.

In host memory it comes to the device while the bucket before it is computed, and goes back behind its exchange. Two
slots of the largest bucket are enough. Every copy waits for those after which its source is whole and its target free.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.futures import Future

from anabranch.activations.host_copies import Done
from anabranch.activations.transfers import transfers_for
from anabranch.comm.collectives import ResidualState
from anabranch.lean.slots import Slot, Slots


class Residuals(Protocol):
    """What waits of the sparse buckets of one model."""

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """The sparse buckets have these sizes from now on."""
        ...

    def at_hand(self, state: ResidualState) -> Mapping[str, torch.Tensor] | None:
        """What gradients can be added to as they come, by parameter; None if it must be fetched first."""
        ...

    def prefetch(self, state: ResidualState) -> None:
        """Its bucket comes next."""
        ...

    def fetch(self, state: ResidualState) -> Mapping[str, torch.Tensor]:
        """What gradients are to be added to now, on the current stream."""
        ...

    def lend(self, state: ResidualState, until: Future[torch.Tensor]) -> None:
        """Its bucket was launched."""
        ...

    def put_back(self, state: ResidualState) -> None:
        """Its exchange is over, on the current stream."""
        ...

    def settle(self) -> None:
        """Wait on the host until all is where it belongs."""
        ...


class InPlace:
    """On the device for ever: it is the memory in which gradients add up."""

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """Needs nothing."""

    def at_hand(self, state: ResidualState) -> Mapping[str, torch.Tensor] | None:
        """See ``Residuals``."""
        return state.pieces()

    def prefetch(self, state: ResidualState) -> None:
        """It is there."""

    def fetch(self, state: ResidualState) -> Mapping[str, torch.Tensor]:
        """See ``Residuals``."""
        return state.pieces()

    def lend(self, state: ResidualState, until: Future[torch.Tensor]) -> None:
        """Nobody else wants it."""

    def put_back(self, state: ResidualState) -> None:
        """It stays."""

    def settle(self) -> None:
        """It is where it belongs."""


class Visit(NamedTuple):
    """What waits of one bucket, on the device: its slot, its home in host memory, and when the copy is there."""

    slot: Slot
    home: torch.Tensor
    there: Done


class InHostMemory:
    """In pinned host memory, and on the device only from its bucket's backward to the end of its exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = Slots([], device)
        self._transfers = transfers_for(device)
        self._visits: dict[tuple[str, ...], Visit] = {}
        self._lent: dict[tuple[str, ...], Slot] = {}  # between fetch() and lend(), when a lane may have put it back
        self._freed: dict[int, Done] = {}  # by slot: when its last content is back in host memory
        self._home: dict[tuple[str, ...], Done] = {}  # by bucket: the same

    def lay_out(self, nbytes: Sequence[int]) -> None:
        """See ``Residuals``."""
        self.settle()
        self._slots, self._freed, self._home = Slots(nbytes, self._device), {}, {}
        self._transfers.begin()  # the allocator may have taken the slots from what the current stream still uses

    def at_hand(self, state: ResidualState) -> Mapping[str, torch.Tensor] | None:
        """It is away; one that was just made on the device goes to host memory now, before the next one is made."""
        if state.residual.is_cuda and state.names not in self._visits:
            torch.cuda.current_stream(self._device).synchronize()
            state.residual = torch.empty_like(state.residual, device="cpu", pin_memory=True).copy_(state.residual)
        return None

    def prefetch(self, state: ResidualState) -> None:
        """See ``Residuals``."""
        if state.names in self._visits:
            return
        home = state.residual
        with self._transfers.inward():  # whose stream it is that waits for the slot's last user
            slot = self._slots.take(home.numel(), home.dtype)
        after = (self._freed.get(slot.number), self._home.get(state.names))
        self._visits[state.names] = Visit(slot, home, self._transfers.bring(home, slot.tensor, after))

    def fetch(self, state: ResidualState) -> Mapping[str, torch.Tensor]:
        """See ``Residuals``."""
        self.prefetch(state)
        visit = self._visits[state.names]
        self._transfers.wait(visit.there)
        state.residual = visit.slot.tensor
        self._lent[state.names] = visit.slot
        return state.pieces()

    def lend(self, state: ResidualState, until: Future[torch.Tensor]) -> None:
        """See ``Residuals``."""
        self._slots.lend(self._lent.pop(state.names), until)

    def put_back(self, state: ResidualState) -> None:
        """See ``Residuals``."""
        visit = self._visits.pop(state.names)
        done = self._transfers.take_home(visit.slot.tensor, visit.home)
        self._freed[visit.slot.number] = self._home[state.names] = done
        state.residual = visit.home

    def settle(self) -> None:
        """See ``Residuals``."""
        self._slots.settle()
        self._transfers.settle()
