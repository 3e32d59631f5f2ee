"""The janitor: a process that outlives the lab's own process and ends everything in the lab, however the lab ended.

A lab is taken down in no other way. The janitor is started before the first rank and reads from a pipe whose other end
only the lab's process holds. So it notices a normal end, Ctrl-C, a crash and SIGKILL in the same way. It is run as a
file by itself, and therefore imports only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PATIENCE_S = 20.0  # for processes to die after SIGKILL: a driver may have to let go of a GPU
PAUSE_S = 0.02


@dataclass(frozen=True)
class LabResources:
    """What belongs to a lab: processes in its namespaces or started with ``mark``, and the daemon in ``mps_folder``.

    ``mark`` is an entry of the environment, NAME=value. Namespaces are given by open descriptors: while one is open,
    the kernel gives its number to no other namespace.
    """

    mark: str
    mps_folder: str | None = None
    namespaces: Sequence[int] = ()

    def clean_up(self) -> list[int]:
        """Kill all processes and remove the daemon's folder; returns the ids of processes that did not die."""
        inside = {_identity(os.fstat(descriptor)) for descriptor in self.namespaces}
        assert _identity(Path("/proc/thread-self/ns/net").stat()) not in inside, "the janitor must be outside"
        left = _kill_all(lambda pid: _namespace_of(pid) in inside or _has_entry(pid, self.mark))
        if self.mps_folder is not None:
            entry = mps_entry(self.mps_folder)
            _quit_mps(entry)
            left += _kill_all(lambda pid: _has_entry(pid, entry))
            shutil.rmtree(self.mps_folder, ignore_errors=True)
        return left


class Janitor:
    """A running janitor, as a context: it cleans up when the context ends, or when this process dies."""

    def __init__(self, resources: LabResources) -> None:
        self.resources = resources
        read_end, self._write_end = os.pipe()
        arguments = [resources.mark, resources.mps_folder or "", *map(str, resources.namespaces)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                pass_fds=tuple(resources.namespaces),
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        finally:
            os.close(read_end)

    def __enter__(self) -> "Janitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Clean up now and wait for it; a second call does nothing."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            if self.process.wait() != 0:  # the janitor itself was killed
                self.resources.clean_up()


def mps_entry(folder: str) -> str:
    """The entry of the environment by which processes find the MPS daemon in this folder."""
    return f"{MPS_PIPES}={folder}/pipe"


def _quit_mps(entry: str) -> None:
    """Ask the daemon to end, as its manual says. One that does not answer is killed afterwards."""
    name, _, value = entry.partition("=")
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [MPS_CONTROL],
            input=b"quit\n",
            env={**os.environ, name: value},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S / 2,
            check=False,
        )


def _kill_all(belongs: Callable[[int], bool]) -> list[int]:
    """Kill until two searches in a row find no process, because one may have forked during the first search."""
    deadline = time.monotonic() + PATIENCE_S
    empty_searches = 0
    while empty_searches < 2:
        found = [pid for pid in _processes() if _kill_if(pid, belongs)]
        if found and time.monotonic() > deadline:
            return found
        empty_searches = 0 if found else empty_searches + 1
        time.sleep(PAUSE_S if found else 0)
    return []


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]  # noqa: PTH208


def _kill_if(pid: int, belongs: Callable[[int], bool]) -> bool:
    """Kill this process if it belongs to the lab; returns whether it does."""
    if not belongs(pid):
        return False
    # The id may be another process's by now. A descriptor stays with one process, so ask again once it is open.
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if belongs(pid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return True


def _namespace_of(pid: int) -> tuple[int, int] | None:
    """The network namespace of a process; None if the process has ended or may not be inspected."""
    try:
        return _identity(Path(f"/proc/{pid}/ns/net").stat())
    except OSError:
        return None


def _has_entry(pid: int, entry: str) -> bool:
    """Whether a process was started with this entry in its environment."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def main(arguments: Sequence[str]) -> int:
    """Wait for the lab to end, ignoring signals, then clean up; returns 1 if a process is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, mps_folder, *namespaces = arguments
    while os.read(0, 1):
        pass
    left = LabResources(mark, mps_folder or None, [int(number) for number in namespaces]).clean_up()
    if left:
        print(f"anabranch lab: processes {left} of the lab did not end: kill them by hand", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
