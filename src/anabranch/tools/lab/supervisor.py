"""Supervision of the lab's processes: start them, wait for all, pass signals on, and report the first failure."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
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
    """One rank.

    ``output`` is the file that holds what it prints; None if it prints where the lab's own process prints.
    ``ended_by_lab`` says that it was still running when the lab stopped waiting; ``ended_at_s`` is when it ended by
    itself, in seconds since the epoch.
    """

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    ended_by_lab: bool = False
    ended_at_s: float = math.inf

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
        if code is None or code >= 0:
            return f"exit code {code}"
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        return f"killed by {names.get(-code, f'signal {-code}')}"

    @property
    def failed_at_s(self) -> float:
        """When it failed, in seconds since the epoch; infinite if it has not.

        A program fails when it prints the traceback that is the end of its output. Threads and groups may keep it for
        many seconds after that, while other ranks, which lost their connection to it, end at once. Without such a
        traceback it fails when it ends with another exit code than 0.
        """
        if self.exit_code == 0:
            return math.inf
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


def start_process(host: Host, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
    """Start a rank on its host, in a session of its own.

    Rank 0 prints where this process prints, and the output of others goes to a file for ``last_lines``.
    """
    # An unnamed file: nobody has to read it while the program runs, and nobody has to remove it.
    output = tempfile.TemporaryFile() if rank != 0 else None  # noqa: SIM115 (close() closes it)
    if output is None and sys.stdout is not None:
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
    return RankProcess(f"rank {rank}", process, output)


class Supervisor:
    """Waits for several processes at once, and finds out which of them failed first; it closes them in the end.

    In this context a signal that asks the lab to stop does not end this process. One that was ignored before, as under
    nohup, stays ignored. ``first_failure``, ``stopped_by`` (a signal) and ``timed_out`` say why the lab ended; none of
    them after success.
    """

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []
        self.first_failure: RankProcess | None = None
        self.stopped_by: int | None = None
        self.timed_out = False
        self._events: SimpleQueue[RankProcess | int] = SimpleQueue()  # a process that has ended, or a signal

    def __enter__(self) -> "Supervisor":
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._events.put(number))  # which a handler may do
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for process in self.processes:
            process.close()

    def add(self, process: RankProcess) -> None:
        """Supervise this one, too."""
        self.processes.append(process)
        Thread(target=self._await_end, args=(process,), daemon=True).start()

    def _await_end(self, process: RankProcess) -> None:
        with suppress(ChildProcessError):  # it has been reaped by now
            os.waitid(os.P_PID, process.process.pid, os.WEXITED | os.WNOWAIT)  # leaves it to be reaped
        process.ended_at_s = time.time()
        self._events.put(process)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until all have ended, or until the grace period after a failure or a signal is over.

        Some may still be running then. A signal is passed on to all of them, once; a second signal ends the wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ending = False
        while any(process.exit_code is None for process in self.processes):
            try:
                event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                self.timed_out = not ending
                break
            if isinstance(event, RankProcess):
                event.process.wait()
                if event.exit_code != 0 and not ending:
                    self.first_failure = event
            elif self.stopped_by is not None:
                break
            else:
                self.stopped_by = event
                for process in self.processes:
                    process.send_signal(event)
            if not ending and (self.first_failure is not None or self.stopped_by is not None):
                ending, latest = True, time.monotonic() + GRACE_S
                deadline = latest if deadline is None else min(deadline, latest)
        for process in self.processes:
            process.ended_by_lab = process.exit_code is None
        if self.first_failure is not None:  # it need not be the first that ended
            self.first_failure = min(self.processes, key=lambda process: process.failed_at_s)

    @property
    def exit_code(self) -> int:
        """The exit code of the lab."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first_failure is not None:
            return 1 if self.first_failure.ended_by_lab else self.first_failure.exit_code or 1
        return TIMED_OUT if self.timed_out else 0

    def report(self, timeout_s: float | None) -> None:
        """Print to stderr why the lab ended, with the last output of the first failure; nothing on success."""
        lines: list[str] = []
        if self.stopped_by is not None:
            name = signal.Signals(self.stopped_by).name
            lines.append(f"anabranch lab: stopped by {name}: {_endings(self.processes)}")
        elif self.first_failure is not None:
            lines += _failure(self.first_failure)
            if others := [process for process in self.processes if process is not self.first_failure]:
                lines.append(f"anabranch lab: the others: {_endings(others)}")
        elif self.timed_out:
            lines.append(f"anabranch lab: not done after {timeout_s:g} s: {_endings(self.processes)}")
        with suppress(BrokenPipeError):  # the reader of stderr has gone; the exit code still counts
            for line in lines:
                print(line, file=sys.stderr)


def _endings(processes: Sequence[RankProcess]) -> str:
    """How they ended, equal endings together: "rank 0, rank 1: exit code 1; rank 3: killed by SIGABRT"."""
    names: dict[str, list[str]] = {}
    for process in processes:
        names.setdefault(process.ending, []).append(process.name)
    return "; ".join(f"{', '.join(alike)}: {ending}" for ending, alike in names.items())


def _failure(process: RankProcess) -> list[str]:
    lines = process.last_lines()
    output = "its last output:" if lines else "it printed nothing"
    if process.output is None:
        output = "its output is above"
    title = f"anabranch lab: {process.name} failed first ({process.ending}); {output}"
    return [title, *(f"{process.name} | {line}" for line in lines)]


def _ends_in_traceback(lines: Sequence[str]) -> bool:
    """Whether the last lines are a traceback of Python: its frames are indented, and the error follows them."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    frames = [line for line in lines[starts[-1] + 1 :] if line.startswith("  ")] if starts else []
    return bool(frames) and not lines[-1].startswith("  ")
