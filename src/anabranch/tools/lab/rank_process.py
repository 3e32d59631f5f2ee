"""RankProcess: the process that the lab has started on one host, its output and its end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import IO

from anabranch.tools.lab.hosts import Host
from anabranch.tools.lab.namespaces import inside

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
