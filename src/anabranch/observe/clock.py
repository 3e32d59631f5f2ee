"""Clocks whose marks cost next to nothing (the host's, or events on a CUDA stream), and how clocks of ranks compare."""

from dataclasses import dataclass
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Work

from anabranch.exchange.interface import Group

PING_ROUNDS = 25
ANCHOR_TRIES = 5
POLLER_TIMEOUT_S = 10.0  # for the poller to see what the device has already finished


class HostClock:
    """The clock for work that runs where it is called: the CPU. Its marks are host times in seconds.

    Marks of any clock are opaque until ``settle()``; then ``elapsed_s`` gives the seconds from one to another.
    """

    def mark(self) -> object:
        """This instant, in the order of the work issued so far."""
        return perf_counter()

    def settle(self) -> None:
        """Wait until every mark taken so far has a time. No-op: host marks have theirs when they are taken."""

    def elapsed_s(self, start: object, end: object) -> float:
        """Seconds from the mark ``start`` to the mark ``end``, both of this clock."""
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def settled(self, mark: object) -> bool:
        """Whether this mark has a time already."""
        return mark is not None

    def mark_end(self, launched: object, works: list[Work]) -> float:  # noqa: ARG002
        """The end of the last of these works, which run one after another and were launched at ``launched``.

        It is now: a host lane has waited for the works before it calls this.
        """
        return perf_counter()

    def elapsed_to_end_s(self, start: object, end: object) -> float:
        """Seconds from the mark ``start`` to an end from ``mark_end``; a CudaClock's is None if it was not observed."""
        return self.elapsed_s(start, end)

    def close(self) -> None:
        """Stop looking for ends. No-op: nothing looks for them."""


@dataclass(slots=True)
class PendingCompletion:
    """A launch and its last work, with the host times at which each was first seen to be complete."""

    launched: torch.cuda.Event
    last: Work
    launched_s: float | None = None
    ended_s: float | None = None

    def poll(self) -> bool:
        """Query both once, without waiting; whether both are complete."""
        now_s = perf_counter()
        if self.launched_s is None and self.launched.query():
            self.launched_s = now_s
        if self.launched_s is not None and self.last.is_completed():
            self.ended_s = now_s
        return self.ended_s is not None


class CompletionPoller:
    """A thread that queries works about ten thousand times a second whether they are complete, while there are any.

    Timed events recorded after the works, or NCCL's own timing, would be more precise. But under MPS both make messages
    on two communicators take turns, which costs all that a second lane gains (docs/log.md).
    """

    PERIOD_S = 50e-6  # requested; the timer slack of the system makes it about 0.1 ms

    def __init__(self) -> None:
        self._pending: list[PendingCompletion] = []
        self._lock = Lock()
        self._thread: Thread | None = None  # runs only while something is pending

    def watch(self, completion: PendingCompletion) -> None:
        """Fill in the times of ``completion`` when they are observed."""
        with self._lock:
            self._pending.append(completion)
            if self._thread is None:
                self._thread = Thread(target=self._poll, name="anabranch-completion-poller", daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all pending works were seen to be complete, but not longer than ``timeout_s``."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def close(self) -> None:
        """Stop polling; the times of works that are still pending stay None."""
        with self._lock:
            self._pending = []

    def _poll(self) -> None:
        while True:
            with self._lock:
                try:
                    self._pending = [completion for completion in self._pending if not completion.poll()]
                except RuntimeError:  # the device or NCCL has failed; the program's own calls raise that error
                    self._pending = []
                if not self._pending:
                    self._thread = None
                    return
            sleep(self.PERIOD_S)


class CudaClock:
    """The clock for work on a GPU. A mark is an event on the stream that is current; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._poller = CompletionPoller()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device, and until the poller has seen all ends."""
        torch.cuda.synchronize(self._device)
        self._poller.join(POLLER_TIMEOUT_S)

    def elapsed_s(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3

    def settled(self, mark: object) -> bool:
        return isinstance(mark, torch.cuda.Event) and mark.query()

    def mark_end(self, launched: object, works: list[Work]) -> PendingCompletion:
        """An end that the poller observes: an event recorded after the works could delay computation."""
        assert isinstance(launched, torch.cuda.Event)
        completion = PendingCompletion(launched, works[-1])
        self._poller.watch(completion)
        return completion

    def elapsed_to_end_s(self, start: object, end: object) -> float | None:
        """From ``start`` to the launch by the device's clock, from there to the end by the host's clock."""
        assert isinstance(end, PendingCompletion)
        if end.launched_s is None or end.ended_s is None:
            return None
        return self.elapsed_s(start, end.launched) + end.ended_s - end.launched_s

    def close(self) -> None:
        """End the polling thread."""
        self._poller.close()


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """The clock that can time work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Offset(NamedTuple):
    """A rank's host clock is ahead of rank 0's by ``ahead_s``, give or take ``error_s``, when its own says ``at_s``."""

    at_s: float
    ahead_s: float
    error_s: float


def clock_offsets(group: Group) -> list[Offset]:
    """The offset of every rank, on rank 0; an empty list on others. Collective; the group must send host memory."""
    ping, answer = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if dist.get_rank(group) != 0:
        for _ in range(PING_ROUNDS):
            dist.recv(ping, group_src=0, group=group)
            answer[0] = perf_counter()
            dist.send(answer, group_dst=0, group=group)
        return []
    found = [Offset(perf_counter(), 0.0, 0.0)]
    for other in range(1, dist.get_world_size(group)):
        tries = []
        for _ in range(PING_ROUNDS):
            sent_s = perf_counter()
            dist.send(ping, group_dst=other, group=group)
            dist.recv(answer, group_src=other, group=group)
            back_s = perf_counter()
            theirs_s = float(answer.item())
            tries.append(Offset(theirs_s, theirs_s - (sent_s + back_s) / 2, (back_s - sent_s) / 2))
        found.append(min(tries, key=lambda one: one.error_s))
    return found


class ClockAlignment(NamedTuple):
    """One rank's clock against rank 0's, from a measurement before a window and one after it."""

    before: Offset
    after: Offset

    @property
    def error_s(self) -> float:
        """Bound on the error of any time between the two measurements, if clocks drift evenly."""
        return max(self.before.error_s, self.after.error_s)

    def to_rank_0_time(self, at_s: float) -> float:
        """Rank 0's time when this rank's clock says ``at_s``."""
        known_at_s, ahead_s = [self.before.at_s, self.after.at_s], [self.before.ahead_s, self.after.ahead_s]
        return at_s - float(np.interp(at_s, known_at_s, ahead_s))


class HostAnchor(NamedTuple):
    """A mark of a clock and the host's time at it, within ``error_s``: a device has a clock of its own."""

    mark: object
    host_s: float
    error_s: float

    @classmethod
    def measure(cls, clock: Clock) -> "HostAnchor":
        """Take a mark now and bound the host's time at it; waits for the device."""
        tries = []
        for _ in range(ANCHOR_TRIES):
            clock.settle()
            before_s = perf_counter()
            mark = clock.mark()
            clock.settle()
            after_s = perf_counter()
            tries.append(cls(mark, (before_s + after_s) / 2, (after_s - before_s) / 2))
        return min(tries, key=lambda anchor: anchor.error_s)
