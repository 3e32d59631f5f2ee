"""RankProcess: the process that the lab has started on one host, and what is known of it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import IO

from anabranch.lab.hosts import Host
from anabranch.lab.namespaces import inside

LAST_LINES = 30
LAST_NBYTES = 64 << 10
DEATH_S = 1.0


def _signal(number: int) -> str:
    """Its name; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(eq=False)
class RankProcess:
    """One rank, or torchrun with all ranks of one host.

    ``words`` holds what it prints; None if that goes where the lab's own words go. ``swept`` says that it was still
    running when the lab came to an end, ``several`` that it is torchrun with several ranks.
    """

    name: str
    process: subprocess.Popen[bytes]
    words: IO[bytes] | None
    swept: bool = False
    several: bool = False

    @property
    def code(self) -> int | None:
        """Its exit code as a shell would tell it, 128 and the signal's number after a signal; None while it runs."""
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def fate(self) -> str:
        """How it ended, as the rest of a sentence."""
        if self.swept:
            return "still running, so ended by the lab"
        code = self.process.returncode
        return f"killed by {_signal(-code)}" if code is not None and code < 0 else f"exit code {code}"

    def send(self, number: int) -> None:
        """A signal to it and to the processes beside it, as a terminal would send it; nothing if it has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def last_lines(self) -> list[str]:
        """The end of what it printed."""
        if self.words is None:
            return []
        size = self.words.seek(0, os.SEEK_END)
        self.words.seek(max(0, size - LAST_NBYTES))
        return self.words.read().decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self) -> None:
        """Take its exit code, once it is known to have ended, and let go of what it printed."""
        with suppress(subprocess.TimeoutExpired):  # the janitor has told of those that do not end
            self.process.wait(DEATH_S)
        if self.words is not None:
            self.words.close()


def start(host: Host, name: str, command: Sequence[str], environment: Mapping[str, str], loud: bool) -> RankProcess:
    """Start ``command`` on a host, in a session of its own; if ``loud``, it prints where this process prints."""
    # An unnamed file: nobody has to read while the program runs, and nobody has to remove it.
    words = None if loud else tempfile.TemporaryFile()  # noqa: SIM115 (close() ends it)
    if loud and sys.stdout is not None:
        sys.stdout.flush()  # what came before it shall stand before it
    with nullcontext() if host.namespace is None else inside(host.namespace):
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=None if words is None else subprocess.STDOUT,
            start_new_session=True,
        )
    return RankProcess(name, process, words)
