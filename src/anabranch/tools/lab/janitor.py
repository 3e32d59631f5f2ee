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
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PATIENCE_S = 20.0  # for processes to die after SIGKILL: a driver may have to let go of a GPU
PAUSE_S = 0.02
MPS_ANSWER_S = 10.0


@contextmanager
def janitor(mark: str, mps_folder: str = "", namespaces: Sequence[int] = ()) -> Iterator["subprocess.Popen[bytes]"]:
    """Cleans up, as ``clean_up`` does, when this context ends, which waits for it, or when this process dies."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, mps_folder, *map(str, namespaces)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=tuple(namespaces),
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    try:
        yield process
    finally:
        process.communicate()  # closes the pipe
        if process.returncode != 0:  # the janitor itself was killed
            clean_up(mark, mps_folder, namespaces)


def clean_up(mark: str, mps_folder: str, namespaces: Sequence[int]) -> list[int]:
    """Kill all processes of a lab and remove its MPS daemon's folder; returns the ids of processes that did not die.

    A lab's processes are in its namespaces, given by open descriptors, or were started with ``mark``, an entry of the
    environment, NAME=value. While a descriptor is open, the kernel gives its namespace's number to no other namespace.
    """
    inside = {Path(f"/proc/self/fd/{descriptor}").readlink() for descriptor in namespaces}
    assert Path("/proc/thread-self/ns/net").readlink() not in inside, "the janitor must be outside"
    left = _kill_all(mark, inside)
    if mps_folder:
        pipes = f"{mps_folder}/pipe"  # where processes find the daemon
        mps_error({**os.environ, MPS_PIPES: pipes}, text="quit\n")  # a daemon that does not quit is killed now
        left += _kill_all(f"{MPS_PIPES}={pipes}")
        shutil.rmtree(mps_folder, ignore_errors=True)
    return left


def mps_error(environment: dict[str, str], *options: str, text: str = "") -> str | None:
    """Run the MPS control program with ``text`` as its input; None on success, else its message or the system's."""
    # Into a file, not a pipe: the daemon keeps its output open, so a pipe would never end.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                [MPS_CONTROL, *options],
                input=text,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=MPS_ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        output.seek(0)
        message = " ".join(output.read().split())
    failed = done.returncode != 0 or message.lower().startswith("cannot find mps")
    return f"exit code {done.returncode}: {message or 'no message'}" if failed else None


def _kill_all(entry: str, namespaces: Collection[Path] = ()) -> list[int]:
    """Kill until two searches in a row find no process, because one may have forked during the first search."""
    deadline = time.monotonic() + PATIENCE_S
    empty_searches = 0
    while empty_searches < 2:
        processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        found = [pid for pid in processes if pid != os.getpid() and _kill_if_ours(pid, entry, namespaces)]
        if found and time.monotonic() > deadline:
            return found
        empty_searches = 0 if found else empty_searches + 1
        time.sleep(PAUSE_S if found else 0)
    return []


def _kill_if_ours(pid: int, entry: str, namespaces: Collection[Path]) -> bool:
    """Kill this process if it belongs to the lab; returns whether it does."""
    try:
        descriptor = os.pidfd_open(pid)  # stays with one process, while the id may be another's a moment later
    except OSError:  # it has ended
        return False
    try:
        ours = _is_ours(pid, entry, namespaces)
        if ours:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return ours
    finally:
        os.close(descriptor)


def _is_ours(pid: int, entry: str, namespaces: Collection[Path]) -> bool:
    """Whether it is in one of these namespaces or was started with this entry in its environment; not if it has ended
    or may not be inspected."""
    try:
        if Path(f"/proc/{pid}/ns/net").readlink() in namespaces:
            return True
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def main(mark: str, mps_folder: str, *namespaces: str) -> int:
    """Wait for the lab to end, ignoring signals, then clean up; returns 1 if a process is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    left = clean_up(mark, mps_folder, [int(number) for number in namespaces])
    if left:
        print(f"anabranch lab: processes {left} of the lab did not end: kill them by hand", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
