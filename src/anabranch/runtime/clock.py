"""Instants that cost next to nothing to take: the host's clock, or events on a CUDA stream read back later."""

from time import perf_counter
from typing import Protocol

import torch


class Clock(Protocol):
    """Marks are opaque until ``settle()``; then ``between`` gives the seconds from one to another."""

    def mark(self) -> object:
        """This instant, in the order of the work issued so far."""
        ...

    def settle(self) -> None:
        """Wait until every mark taken so far has a time."""
        ...

    def between(self, start: object, end: object) -> float:
        """Seconds from ``start`` to ``end``, both taken from this clock."""
        ...

    def settled(self, mark: object) -> bool:
        """Whether this mark has a time already."""
        ...


class HostClock:
    """For work that runs where it is called: the CPU."""

    def mark(self) -> float:
        """The host's time."""
        return perf_counter()

    def settle(self) -> None:
        """Host marks are settled when taken."""

    def between(self, start: object, end: object) -> float:
        """Seconds between two host times."""
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def settled(self, mark: object) -> bool:
        """Always: the host knows its time."""
        return mark is not None


class CudaClock:
    """For work on a GPU: an event recorded on the stream that is current at the mark; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind all work issued so far on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def between(self, start: object, end: object) -> float:
        """Seconds between two events."""
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3

    def settled(self, mark: object) -> bool:
        """Whether the device has passed the event."""
        return isinstance(mark, torch.cuda.Event) and mark.query()


def clock_for(device: torch.device) -> Clock:
    """The clock that sees work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
