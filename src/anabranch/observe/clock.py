"""Instants that cost next to nothing to take: the host's clock, or events on a CUDA stream read back later."""

from dataclasses import dataclass
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Protocol

import torch
from torch.distributed import Work

SETTLE_S = 10.0  # for a thread to see what is already past


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

    def mark_end(self, launched: object, works: list[Work]) -> object:
        """When these works, one after the other, launched at a mark, are over: the last of them ends it."""
        ...

    def until(self, start: object, end: object) -> float | None:
        """Seconds from the mark ``start`` to an end from ``mark_end``; None if that was not seen."""
        ...

    def close(self) -> None:
        """Stop whatever looks for ends."""
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

    def mark_end(self, launched: object, works: list[Work]) -> float:  # noqa: ARG002
        """Now: a host lane has waited for them."""
        return perf_counter()

    def until(self, start: object, end: object) -> float:
        """The end was marked when it came."""
        return self.between(start, end)

    def close(self) -> None:
        """Nothing looks."""


@dataclass(slots=True)
class Sighting:
    """Host times at which a launch and the end of its last work were first seen to be past."""

    launched: torch.cuda.Event
    last: Work
    launched_s: float | None = None
    ended_s: float | None = None

    def look(self) -> bool:
        """Look once; whether both are past."""
        now_s = perf_counter()
        if self.launched_s is None and self.launched.query():
            self.launched_s = now_s
        if self.launched_s is not None and self.last.is_completed():
            self.ended_s = now_s
        return self.ended_s is not None


class CompletionPoller:
    """A thread that looks ten thousand times a second which of some works are over, while there are any.

    Events with timing behind the works would say it better, and so would NCCL's own timing. But under MPS both make
    messages on two communicators take turns, which costs all that a second lane gains (docs/log.md).
    """

    PERIOD_S = 50e-6  # asked for; with the system's own slack about 0.1 ms

    def __init__(self) -> None:
        self._pending: list[Sighting] = []
        self._lock = Lock()
        self._thread: Thread | None = None  # none when there is nothing to see

    def watch(self, sighting: Sighting) -> None:
        """Fill in its times as they pass."""
        with self._lock:
            self._pending.append(sighting)
            if self._thread is None:
                self._thread = Thread(target=self._look, name="anabranch-lookout", daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until everything that is over has been seen to be."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def close(self) -> None:
        """Look no more: whoever waits for what is not seen by now will not be told."""
        with self._lock:
            self._pending = []

    def _look(self) -> None:
        while True:
            with self._lock:
                try:
                    self._pending = [sighting for sighting in self._pending if not sighting.look()]
                except RuntimeError:  # the device or NCCL has failed, which the program itself will hear of
                    self._pending = []
                if not self._pending:
                    self._thread = None
                    return
            sleep(self.PERIOD_S)


class CudaClock:
    """For work on a GPU: an event recorded on the stream that is current at the mark; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lookout = CompletionPoller()

    def mark(self) -> torch.cuda.Event:
        """An event behind all work issued so far on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device, and until the lookout has seen all ends."""
        torch.cuda.synchronize(self._device)
        self._lookout.join(SETTLE_S)

    def between(self, start: object, end: object) -> float:
        """Seconds between two events."""
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3

    def settled(self, mark: object) -> bool:
        """Whether the device has passed the event."""
        return isinstance(mark, torch.cuda.Event) and mark.query()

    def mark_end(self, launched: object, works: list[Work]) -> Sighting:
        """To be seen by a thread that looks: an event behind the works could hold up computation."""
        assert isinstance(launched, torch.cuda.Event)
        sighting = Sighting(launched, works[-1])
        self._lookout.watch(sighting)
        return sighting

    def until(self, start: object, end: object) -> float | None:
        """From ``start`` to the launch by the device's clock, from there by the host's."""
        assert isinstance(end, Sighting)
        if end.launched_s is None or end.ended_s is None:
            return None
        return self.between(start, end.launched) + end.ended_s - end.launched_s

    def close(self) -> None:
        """End the lookout's thread."""
        self._lookout.close()


def clock_for(device: torch.device) -> Clock:
    """The clock that sees work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
