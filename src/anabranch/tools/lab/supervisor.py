"""Supervision of the lab's processes: wait for all of them, pass signals on, and report the first failure."""

import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from anabranch.tools.lab.rank_process import RankProcess

GRACE_S = 5.0  # for the others once one has failed, and for all once the lab was asked to stop
TIMED_OUT = 124  # the exit code of timeout(1)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalReceiver:
    """A context in which a signal that asks the lab to stop makes ``descriptor`` readable instead of ending it.

    A signal that was ignored before, as under nohup, stays ignored.
    """

    def __enter__(self) -> "SignalReceiver":
        self.descriptor, self._wakeup = os.pipe()
        for end in (self.descriptor, self._wakeup):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._wakeup)

    def received(self) -> list[int]:
        """The stop signals that came since the last call."""
        try:
            return [number for number in os.read(self.descriptor, 64) if number in STOP_SIGNALS]
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python's own handler has written the number to the pipe."""


@dataclass
class Outcome:
    """Why the lab ended: a first failure, a signal, or the timeout; none of them after success."""

    first_failure: RankProcess | None = None
    stopped_by: int | None = None
    timed_out: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the lab."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first_failure is not None:
            return 1 if self.first_failure.ended_by_lab else self.first_failure.exit_code or 1
        return TIMED_OUT if self.timed_out else 0


class Supervisor:
    """Waits for several processes at once, and finds out which of them failed first."""

    def __init__(self, signals: SignalReceiver) -> None:
        self.processes: list[RankProcess] = []
        self._signals = signals
        # epoll, because it reports ends in the order in which they came.
        self._selector = selectors.EpollSelector()
        self._selector.register(signals.descriptor, selectors.EVENT_READ)

    def add(self, process: RankProcess) -> None:
        """Supervise this one, too."""
        self.processes.append(process)
        self._selector.register(os.pidfd_open(process.process.pid), selectors.EVENT_READ, process)

    def wait(self, timeout_s: float | None) -> Outcome:
        """Wait until all have ended, or until the grace period after a failure or a signal is over.

        Some may still be running then. A signal is passed on to all of them, once; a second signal ends the wait.
        """
        outcome = Outcome()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while any(process.exit_code is None for process in self.processes):
            if (left_s := deadline - time.monotonic()) <= 0:
                outcome.timed_out = outcome.first_failure is None and outcome.stopped_by is None
                break
            before = (outcome.first_failure, outcome.stopped_by)
            for key, _ in self._selector.select(None if math.isinf(left_s) else left_s):
                if key.data is not None:
                    self._process_ended(key, outcome)
                elif self._pass_signals_on(outcome):
                    deadline = 0.0
            if before != (outcome.first_failure, outcome.stopped_by):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for process in self.processes:
            process.ended_by_lab = process.exit_code is None
        if outcome.first_failure is not None:
            outcome.first_failure = self._first_to_fail()
        return outcome

    def _first_to_fail(self) -> RankProcess:
        """The process that failed before all others; it need not be the first that ended."""
        failed = [(at_s, process) for process in self.processes if (at_s := process.failed_at_s) is not None]
        return min(failed, key=lambda each: each[0])[1]

    def close(self) -> None:
        """Stop watching the processes, whether they run or not."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _process_ended(self, key: selectors.SelectorKey, outcome: Outcome) -> None:
        process: RankProcess = key.data
        self._selector.unregister(key.fd)
        os.close(key.fd)
        process.process.wait()
        process.ended_at_s = time.time()
        if process.exit_code != 0 and outcome.first_failure is None and outcome.stopped_by is None:
            outcome.first_failure = process

    def _pass_signals_on(self, outcome: Outcome) -> bool:
        """Pass the first signal on to all processes; whether a second one has come."""
        for number in self._signals.received():
            if outcome.stopped_by is not None:
                return True
            outcome.stopped_by = number
            for process in self.processes:
                # torchrun ends its ranks on SIGTERM, but some versions do not handle SIGHUP.
                process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)
        return False


def report_failure(outcome: Outcome, processes: Sequence[RankProcess], timeout_s: float | None) -> None:
    """Print to stderr why the lab ended, with the last output of the process that failed first; nothing on success."""
    lines: list[str] = []
    if outcome.stopped_by is not None:
        lines.append(f"anabranch lab: stopped by {signal.Signals(outcome.stopped_by).name}: {_endings(processes)}")
    elif outcome.first_failure is not None:
        lines += _failure(outcome.first_failure, "failed first")
        others = [process for process in processes if process is not outcome.first_failure]
        for process in others:
            # torchrun ends seconds after its failing rank: the first host to end need not be the first to fail.
            if process.runs_torchrun and process.exit_code:
                lines += _failure(process, "failed, too")
        if others:
            lines.append(f"anabranch lab: the others: {_endings(others)}")
    elif outcome.timed_out:
        lines.append(f"anabranch lab: not done after {timeout_s:g} s: {_endings(processes)}")
    with suppress(BrokenPipeError):  # the reader of stderr has gone; the exit code still counts
        for line in lines:
            print(line, file=sys.stderr)


def _endings(processes: Sequence[RankProcess]) -> str:
    """How they ended, equal endings together: "rank 0, rank 1: exit code 1; rank 3: killed by SIGABRT"."""
    names: dict[str, list[str]] = {}
    for process in processes:
        names.setdefault(process.ending, []).append(process.name)
    return "; ".join(f"{', '.join(alike)}: {ending}" for ending, alike in names.items())


def _failure(process: RankProcess, how: str) -> list[str]:
    lines = process.last_lines()
    if process.output is None:
        output = "its output is above"
    elif lines:
        output = "its last output:"
    else:
        output = "it printed nothing"
    return [
        f"anabranch lab: {process.name} {how} ({process.ending}); {output}",
        *(f"{process.name} | {line}" for line in lines),
    ]
