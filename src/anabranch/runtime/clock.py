"""Instants that cost next to nothing to take: the host's clock, or events on a CUDA stream read back later."""

from time import perf_counter
from typing import Protocol

import torch
from torch.distributed import Work


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

    def mark_end(self, works: list[Work]) -> object:
        """When these works, one after the other, are over; ``until`` reads it."""
        ...

    def until(self, start: object, free_s: float, launched: object, end: object) -> float:
        """Seconds from ``start`` to an end from ``mark_end``, of works launched at a mark on a lane free at free_s."""
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

    def mark_end(self, works: list[Work]) -> float:  # noqa: ARG002
        """Now: a host lane has waited for them."""
        return perf_counter()

    def until(self, start: object, free_s: float, launched: object, end: object) -> float:  # noqa: ARG002
        """The end was marked when it came."""
        return self.between(start, end)


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

    def mark_end(self, works: list[Work]) -> list[Work]:
        """The works themselves, which know how long they took: an event behind them could hold up computation."""
        return works

    def until(self, start: object, free_s: float, launched: object, end: object) -> float:
        """They began when launched and the lane was free, and took as long as they say."""
        assert isinstance(end, list)
        return max(self.between(start, launched), free_s) + float(sum(work._get_duration() for work in end)) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock that sees work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
