"""Transfers of what waits between its home in host memory and its slot on the device, ordered by events alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from anabranch.activations.host_copies import Done


class Transfers(Protocol):
    """Copies between memory that both sides keep; each says when it is done."""

    def begin(self) -> None:
        """The slots are new: bring nothing before what was issued so far is done with their memory."""
        ...

    def inward(self) -> AbstractContextManager[object]:
        """Within it, what is waited for is waited for by the copies that are brought next."""
        ...

    def bring(self, home: torch.Tensor, room: torch.Tensor, after: Sequence[Done]) -> Done:
        """Copy to the device, once these are done."""
        ...

    def take_home(self, room: torch.Tensor, home: torch.Tensor) -> Done:
        """Copy to the host what the work issued so far leaves."""
        ...

    def wait(self, done: Done) -> None:
        """Let all work issued from now on come after a copy."""
        ...

    def settle(self) -> None:
        """Wait on the host until all that was taken home is there."""
        ...


class HostTransfers:
    """For models on the CPU: copies that are done at once."""

    def begin(self) -> None:
        """Nothing is under way."""

    def inward(self) -> AbstractContextManager[object]:
        """There is one place to wait."""
        return nullcontext()

    def bring(self, home: torch.Tensor, room: torch.Tensor, after: Sequence[Done]) -> Done:  # noqa: ARG002
        """Copy now."""
        room.copy_(home)
        return None

    def take_home(self, room: torch.Tensor, home: torch.Tensor) -> Done:
        """Copy now."""
        home.copy_(room)
        return None

    def wait(self, done: Done) -> None:
        """It is done."""

    def settle(self) -> None:
        """It is there."""


class CudaTransfers:
    """One stream for each direction, as the link carries both at once; the host never waits but in ``settle``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward: torch.cuda.Stream = torch.cuda.Stream(device)
        self._outward: torch.cuda.Stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        """See ``Transfers``."""
        self._inward.wait_stream(torch.cuda.current_stream(self._device))

    def inward(self) -> AbstractContextManager[object]:
        """See ``Transfers``."""
        return torch.cuda.stream(self._inward)

    def bring(self, home: torch.Tensor, room: torch.Tensor, after: Sequence[Done]) -> Done:
        """See ``Transfers``."""
        for done in after:
            if done is not None:
                self._inward.wait_event(done)
        with torch.cuda.stream(self._inward):
            room.copy_(home, non_blocking=True)
        there: torch.cuda.Event = self._inward.record_event()
        return there

    def take_home(self, room: torch.Tensor, home: torch.Tensor) -> Done:
        """See ``Transfers``."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            home.copy_(room, non_blocking=True)
        there: torch.cuda.Event = self._outward.record_event()
        return there

    def wait(self, done: Done) -> None:
        """See ``Transfers``."""
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def settle(self) -> None:
        """See ``Transfers``."""
        self._outward.synchronize()


def transfers_for(device: torch.device) -> Transfers:
    """Those that reach ``device``."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
