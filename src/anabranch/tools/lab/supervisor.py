"""Supervision of the lab's processes: start them, wait for all, pass signals on, and report the first failure."""

import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from anabranch.tools.lab.hosts import Host, inside

GRACE_S = 5.0  # for the others once one has failed, and for all once the lab was asked to stop
TIMED_OUT = 124  # the exit code of timeout(1)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 30
LAST_NBYTES = 64 << 10
DEATH_S = 1.0  # for the kernel to hand over the exit code of a process that was killed


@dataclass(eq=False)
class RankProcess:
    """One rank, or torchrun with all ranks of one host.

    ``output`` is the file that holds what it prints; None if it prints where the lab's own process prints.
    ``runs_torchrun`` says that it is torchrun with several ranks, ``ended_by_lab`` that it was still running when the
    lab stopped waiting. ``ended_at_s`` is when it ended by itself, in seconds since the epoch.
    """

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    runs_torchrun: bool = False
    ended_by_lab: bool = False
    ended_at_s: float | None = None

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell reports it: 128 plus the signal's number after a signal; None while it runs."""
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def ending(self) -> str:
        """How it ended, such as "exit code 1" or "killed by SIGSEGV"."""
        if self.ended_by_lab:
            return "still running, so ended by the lab"
        code = self.process.returncode
        return f"killed by {_signal_name(-code)}" if code is not None and code < 0 else f"exit code {code}"

    @property
    def failed_at_s(self) -> float | None:
        """When it failed, in seconds since the epoch; None if it has not.

        A program fails when it prints the traceback that is the end of its output. Threads and groups may keep it for
        many seconds after that, while other ranks, which lost their connection to it, end at once. Without such a
        traceback it fails when it ends with another exit code than 0.
        """
        if self.exit_code == 0:
            return None
        if self.output is not None and _ends_in_traceback(self.last_lines()):
            return os.fstat(self.output.fileno()).st_mtime
        return self.ended_at_s

    def send_signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal would; nothing happens if it has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def last_lines(self) -> list[str]:
        """The end of its output; empty if the lab does not keep it."""
        if self.output is None:
            return []
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - LAST_NBYTES))
        return self.output.read().decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self) -> None:
        """Reap the process, which the janitor has ended by now, and discard its output."""
        with suppress(subprocess.TimeoutExpired):  # the janitor has reported those that do not end
            self.process.wait(DEATH_S)
        if self.output is not None:
            self.output.close()


def start_process(
    host: Host, name: str, command: Sequence[str], environment: Mapping[str, str], keep_output: bool
) -> RankProcess:
    """Start ``command`` on a host, in a session of its own.

    With ``keep_output`` its output goes to a file for ``last_lines``; otherwise it prints where this process prints.
    """
    # An unnamed file: nobody has to read it while the program runs, and nobody has to remove it.
    output = tempfile.TemporaryFile() if keep_output else None  # noqa: SIM115 (close() closes it)
    if not keep_output and sys.stdout is not None:
        sys.stdout.flush()  # our own output comes before the program's
    with nullcontext() if host.namespace is None else inside(host.namespace):
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
    return RankProcess(name, process, output)


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


def _ends_in_traceback(lines: Sequence[str]) -> bool:
    """Whether the last lines are a traceback of Python: its frames are indented, and the error follows them."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    frames = [line for line in lines[starts[-1] + 1 :] if line.startswith("  ")] if starts else []
    return bool(frames) and not lines[-1].startswith("  ")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
