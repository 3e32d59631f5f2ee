"""Copies between a device and host buffers, ordered by events alone: the host never waits for one."""

from typing import Protocol

import torch

from anabranch.activations.host_pool import Buffer

Done = torch.cuda.Event | None  # None: it was done when it was asked for


class Copies(Protocol):
    """Copies of raw bytes out to the host and back, each of which says when it is done."""

    def out(self, source: torch.Tensor, buffer: Buffer) -> Done:
        """Copy bytes that the work issued so far produces."""
        ...

    def back(self, buffer: Buffer, nbytes: int, written: Done) -> tuple[torch.Tensor, Done]:
        """Copy bytes to new memory on the device, once they have been written."""
        ...

    def wait(self, done: Done) -> None:
        """Let all work issued from now on come after a copy."""
        ...

    def is_done(self, done: Done) -> bool:
        """Whether a copy is over; does not wait."""
        ...


class HostCopies:
    """The twin for models on the CPU: the same life cycle with copies that are done at once."""

    def out(self, source: torch.Tensor, buffer: Buffer) -> Done:
        """Copy now."""
        buffer.space[: source.numel()].copy_(source)
        return None

    def back(self, buffer: Buffer, nbytes: int, written: Done) -> tuple[torch.Tensor, Done]:  # noqa: ARG002
        """Copy now."""
        return buffer.space[:nbytes].clone(), None

    def wait(self, done: Done) -> None:
        """Nothing is under way."""

    def is_done(self, done: Done) -> bool:  # noqa: ARG002
        """Always."""
        return True


class CudaCopies:
    """One stream for each direction, as the link carries both at once.

    Memory on the device is always allocated and freed in the order of the stream that computes, and that stream waits
    for the copies: so how much is in use follows from the program and not from how far ahead the host is.
    ``record_stream`` would free memory only when the host looks and finds the copy over; a host that is a whole
    forward ahead finds none of them over, and allocates everything anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward: torch.cuda.Stream = torch.cuda.Stream(device)
        self._backward: torch.cuda.Stream = torch.cuda.Stream(device)

    def out(self, source: torch.Tensor, buffer: Buffer) -> Done:
        """Behind the work issued so far, and behind whatever still reads the buffer."""
        stream = self._outward
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if buffer.read is not None:
            stream.wait_event(buffer.read)
            buffer.read = None
        with torch.cuda.stream(stream):
            buffer.space[: source.numel()].copy_(source, non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
        return done

    def back(self, buffer: Buffer, nbytes: int, written: Done) -> tuple[torch.Tensor, Done]:
        """Behind the work issued so far: it may still use the memory that is handed out anew."""
        space = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        stream = self._backward
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if written is not None:
            stream.wait_event(written)
        with torch.cuda.stream(stream):
            space.copy_(buffer.space[:nbytes], non_blocking=True)
        buffer.read = stream.record_event()
        return space, buffer.read

    def wait(self, done: Done) -> None:
        """Only the current stream does; the host goes on."""
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def is_done(self, done: Done) -> bool:
        """Ask the driver."""
        return done is None or done.query()


def copies_for(device: torch.device) -> Copies:
    """The copies that reach ``device``."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
