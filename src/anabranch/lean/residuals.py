"""Where the residuals of sparse buckets are stored: on the device, as they are or rounded, or in pinned host memory."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.futures import Future

from anabranch.exchange.residuals.state import BucketState
from anabranch.lean.activations.host_copies import CopyDone, copies_for
from anabranch.lean.slots import FreshSlots, Slot, SlotRing


class ResidualStore(Protocol):
    """The residuals of one model's sparse buckets, brought to the device for each bucket's exchange.

    Per backward pass and bucket: ``fetch`` before gradients are added, ``release_after`` when its exchange is launched,
    ``store`` on the lane when its exchange is over. Pieces are views of a residual by parameter name.
    """

    def allocate(self, bucket_nbytes: Sequence[int]) -> None:
        """Prepare for sparse buckets of these sizes; a plan has just changed."""
        ...

    def resident(self, state: BucketState) -> Mapping[str, torch.Tensor] | None:
        """Return the pieces to which gradients can be added as they come; None: ``fetch`` must be called first."""
        ...

    def prefetch(self, state: BucketState) -> None:
        """Start to bring the residual of the next bucket."""
        ...

    def fetch(self, state: BucketState) -> Mapping[str, torch.Tensor]:
        """Return the pieces on the device, for work on the current stream."""
        ...

    def release_after(self, state: BucketState, exchange: Future[torch.Tensor]) -> None:
        """Let the residual's device memory be used again when its bucket's exchange is over."""
        ...

    def store(self, state: BucketState) -> None:
        """Move the residual back to where it is stored, behind the exchange on the current stream."""
        ...

    def end_step(self) -> None:
        """Free what need not be kept between steps: all exchanges of a step are over."""
        ...

    def synchronize(self) -> None:
        """Block the host until every residual is where it is stored."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether an exchange is using residuals now; ``synchronize`` would wait for it."""
        ...


class DeviceResiduals:
    """Residuals that stay on the device: they are the memory in which gradients add up, so nothing ever moves."""

    def allocate(self, bucket_nbytes: Sequence[int]) -> None:
        pass

    def resident(self, state: BucketState) -> Mapping[str, torch.Tensor] | None:
        return state.pieces()

    def prefetch(self, state: BucketState) -> None:
        pass

    def fetch(self, state: BucketState) -> Mapping[str, torch.Tensor]:
        return state.pieces()

    def release_after(self, state: BucketState, exchange: Future[torch.Tensor]) -> None:
        pass

    def store(self, state: BucketState) -> None:
        pass

    def end_step(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    @property
    def in_use(self) -> bool:
        return False


class RoundedResiduals:
    """Residuals rounded to few bits, in float32 only from when their bucket is complete to the end of its exchange."""

    def __init__(self, device: torch.device) -> None:
        self._slots = FreshSlots(device)
        self._in_exchange: dict[tuple[str, ...], Slot] = {}  # between fetch() and release_after()

    def allocate(self, bucket_nbytes: Sequence[int]) -> None:
        pass

    def resident(self, state: BucketState) -> Mapping[str, torch.Tensor] | None:  # noqa: ARG002
        return None

    def prefetch(self, state: BucketState) -> None:
        pass

    def fetch(self, state: BucketState) -> Mapping[str, torch.Tensor]:
        slot = self._in_exchange[state.names] = self._slots.acquire(sum(state.numels), torch.float32)
        state.unpack(slot.tensor)
        return state.pieces()

    def release_after(self, state: BucketState, exchange: Future[torch.Tensor]) -> None:
        self._slots.release_after(self._in_exchange.pop(state.names), exchange)

    def store(self, state: BucketState) -> None:
        state.pack()

    def end_step(self) -> None:
        self._slots.wait()
        self._slots.free()

    def synchronize(self) -> None:
        self._slots.wait()

    @property
    def in_use(self) -> bool:
        return not self._slots.idle


class Fetched(NamedTuple):
    """A residual on the device: its slot, its tensor in host memory, and when the copy to the slot has finished."""

    slot: Slot
    host: torch.Tensor
    arrived: CopyDone


class HostResiduals:
    """Residuals in pinned host memory, on the device only from their bucket's backward to the end of its exchange.

    A residual comes to the device while the bucket before it is computed, and goes back behind its exchange. Two slots
    of the largest bucket are enough. Every copy waits for the copies that complete its source and free its target.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = SlotRing([], device)
        self._copies = copies_for(device)
        self._fetched: dict[tuple[str, ...], Fetched] = {}
        # Between fetch() and release_after(): by then a lane may already have taken it out of _fetched.
        self._in_exchange: dict[tuple[str, ...], Slot] = {}
        self._slot_stored: dict[int, CopyDone] = {}  # by slot: when its last content is back in host memory
        self._bucket_stored: dict[tuple[str, ...], CopyDone] = {}  # by bucket: the same

    def allocate(self, bucket_nbytes: Sequence[int]) -> None:
        self.synchronize()
        self._slots = SlotRing(bucket_nbytes, self._device)
        self._slot_stored = {}
        self._bucket_stored = {}
        self._copies.after_current_stream()  # the current stream may still use what the slots were allocated from

    def resident(self, state: BucketState) -> Mapping[str, torch.Tensor] | None:
        """Return None. A residual that was just made on the device moves to the host now, before the next is made."""
        if state.residual.is_cuda and state.names not in self._fetched:
            torch.cuda.current_stream(self._device).synchronize()
            state.residual = torch.empty_like(state.residual, device="cpu", pin_memory=True).copy_(state.residual)
        return None

    def prefetch(self, state: BucketState) -> None:
        if state.names in self._fetched:
            return
        host = state.residual
        with self._copies.on_device_copy_stream():  # which is to wait for the slot's last user
            slot = self._slots.acquire(host.numel(), host.dtype)
        after = (self._slot_stored.get(slot.number), self._bucket_stored.get(state.names))
        self._fetched[state.names] = Fetched(slot, host, self._copies.to_device(host, slot.tensor, after))

    def fetch(self, state: BucketState) -> Mapping[str, torch.Tensor]:
        self.prefetch(state)
        fetched = self._fetched[state.names]
        self._copies.wait(fetched.arrived)
        state.residual = fetched.slot.tensor
        self._in_exchange[state.names] = fetched.slot
        return state.pieces()

    def release_after(self, state: BucketState, exchange: Future[torch.Tensor]) -> None:
        self._slots.release_after(self._in_exchange.pop(state.names), exchange)

    def store(self, state: BucketState) -> None:
        fetched = self._fetched.pop(state.names)
        stored = self._copies.to_host(fetched.slot.tensor, fetched.host)
        self._slot_stored[fetched.slot.number] = stored
        self._bucket_stored[state.names] = stored
        state.residual = fetched.host

    def end_step(self) -> None:
        pass  # copies to the host go on while the next step begins

    def synchronize(self) -> None:
        self._slots.wait()
        self._copies.synchronize()

    @property
    def in_use(self) -> bool:
        return not self._slots.idle
