"""The janitor: a process that outlives the lab's own and ends everything that is in the lab, however the lab ended.

It is the only way in which a lab is taken down. It is started before the first rank, waits for the end of a pipe that
nobody but the lab's process can write to, and so learns of a normal end, Ctrl-C, a crash and SIGKILL in the same way.
It is run as a file by itself, so it imports nothing but the standard library.
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
class Remains:
    """What belongs to a lab: processes in its namespaces or started with ``mark``, and the daemon in ``mps_folder``.

    ``mark`` is an entry of the environment, NAME=value. Namespaces are given by open descriptors: as long as one is
    open, the kernel gives its number to no other namespace.
    """

    mark: str
    mps_folder: str | None = None
    namespaces: Sequence[int] = ()

    def tidy(self) -> list[int]:
        """End all of it at once and without asking; the ids of processes that would not die."""
        places = {_identity(os.fstat(descriptor)) for descriptor in self.namespaces}
        assert _identity(Path("/proc/thread-self/ns/net").stat()) not in places, "the janitor must stand outside"
        left = _sweep(lambda pid: _place(pid) in places or _has(pid, self.mark))
        if self.mps_folder is not None:
            entry = mps_entry(self.mps_folder)
            _quit_mps(entry)
            left += _sweep(lambda pid: _has(pid, entry))
            shutil.rmtree(self.mps_folder, ignore_errors=True)
        return left


class Janitor:
    """A janitor at work, as a context: what remains of the lab is tidied up after it, or when this process dies."""

    def __init__(self, remains: Remains) -> None:
        self.remains = remains
        waits, self._holds = os.pipe()
        arguments = [remains.mark, remains.mps_folder or "", *map(str, remains.namespaces)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments],
                stdin=waits,
                stdout=subprocess.DEVNULL,
                pass_fds=tuple(remains.namespaces),
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            )
        finally:
            os.close(waits)

    def __enter__(self) -> "Janitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Have it done now, once; a second call does nothing."""
        if self._holds >= 0:
            os.close(self._holds)
            self._holds = -1
            if self._process.wait() != 0:  # somebody has ended it
                self.remains.tidy()


def mps_entry(folder: str) -> str:
    """The entry of the environment that leads to the MPS daemon in this folder."""
    return f"{MPS_PIPES}={folder}/pipe"


def _quit_mps(entry: str) -> None:
    """Ask the daemon to end, as its manual says; one that does not answer is swept away."""
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


def _sweep(belongs: Callable[[int], bool]) -> list[int]:
    """Kill until nobody is found twice in a row: a process may have forked behind the first look."""
    deadline = time.monotonic() + PATIENCE_S
    looks_without = 0
    while looks_without < 2:
        found = [pid for pid in _processes() if _killed(pid, belongs)]
        if found and time.monotonic() > deadline:
            return found
        looks_without = 0 if found else looks_without + 1
        time.sleep(PAUSE_S if found else 0)
    return []


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]  # noqa: PTH208


def _killed(pid: int, belongs: Callable[[int], bool]) -> bool:
    """Whether this process belonged to the lab, and was sent SIGKILL."""
    if not belongs(pid):
        return False
    # The number may have gone to another process since. A descriptor stays with one, so ask again once it is open.
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if belongs(pid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return True


def _place(pid: int) -> tuple[int, int] | None:
    """The network namespace of a process; None for one that is gone, or not ours to see."""
    try:
        return _identity(Path(f"/proc/{pid}/ns/net").stat())
    except OSError:
        return None


def _has(pid: int, entry: str) -> bool:
    """Whether a process was started with this entry in its environment."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def main(arguments: Sequence[str]) -> int:
    """Wait for the lab to end, whatever signals come meanwhile, and tidy up: 1 if something is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, mps_folder, *namespaces = arguments
    while os.read(0, 1):
        pass
    left = Remains(mark, mps_folder or None, [int(number) for number in namespaces]).tidy()
    if left:
        print(f"anabranch lab: processes {left} of the lab do not end: kill them by hand", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
