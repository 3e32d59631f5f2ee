"""Copies between a device and host memory, ordered by events: the host waits only in ``synchronize``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

CopyDone = torch.cuda.Event | None  # when a copy has finished; None: it had when the call returned


class HostCopies(Protocol):
    """Copies to host memory and back. The caller allocates both sides and keeps them until the copy is done."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:
        """Copy to the host, behind the work issued so far on the current stream and behind ``after``."""
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:
        """Copy to the device, behind ``after`` alone: not behind the current stream."""
        ...

    def after_current_stream(self) -> None:
        """Let later copies to the device start behind the work issued so far on the current stream.

        Needed where their target is new: its memory may have been freed by work that still runs.
        """
        ...

    def on_device_copy_stream(self) -> AbstractContextManager[object]:
        """Make the stream of copies to the device the current one: waits inside are issued on it."""
        ...

    def wait(self, done: CopyDone) -> None:
        """Let the work issued from now on, on the current stream, start behind a copy."""
        ...

    def is_done(self, done: CopyDone) -> bool:
        """Whether a copy has finished; does not wait."""
        ...

    def synchronize(self) -> None:
        """Block the host until every copy to the host has finished."""
        ...


class BlockingCopies:
    """For models on the CPU, and the twin of ``CudaCopies`` in tests: every copy is done when its call returns."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:  # noqa: ARG002
        target.copy_(source)
        return None

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:  # noqa: ARG002
        target.copy_(source)
        return None

    def after_current_stream(self) -> None:
        pass

    def on_device_copy_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, done: CopyDone) -> None:
        pass

    def is_done(self, done: CopyDone) -> bool:  # noqa: ARG002
        return True

    def synchronize(self) -> None:
        pass


class CudaCopies:
    """One stream for each direction, since the link carries both at once.

    Callers allocate and free device memory in the order of the stream that computes, and let that stream wait for
    the copies: so memory in use follows from the program, not from how far ahead the host is. ``record_stream`` is not
    used: it frees memory only when the host finds the copy finished. A host that is a whole forward ahead finds none
    of them finished and allocates everything anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host: torch.cuda.Stream = torch.cuda.Stream(device)
        self._to_device: torch.cuda.Stream = torch.cuda.Stream(device)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        return _copy_on(self._to_host, source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone] = ()) -> CopyDone:
        return _copy_on(self._to_device, source, target, after)

    def after_current_stream(self) -> None:
        self._to_device.wait_stream(torch.cuda.current_stream(self._device))

    def on_device_copy_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._to_device)

    def wait(self, done: CopyDone) -> None:
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def is_done(self, done: CopyDone) -> bool:
        return done is None or done.query()

    def synchronize(self) -> None:
        self._to_host.synchronize()


def _copy_on(
    stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[CopyDone]
) -> CopyDone:
    for done in after:
        if done is not None:
            stream.wait_event(done)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    finished: torch.cuda.Event = stream.record_event()
    return finished


def copies_for(device: torch.device) -> HostCopies:
    """Return the copies that reach ``device``."""
    return CudaCopies(device) if device.type == "cuda" else BlockingCopies()
