"""Labs as processes, for tests: start one, see which processes it has, and whether this machine can run one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from anabranch.tools.lab import preflight
from anabranch.tools.lab.cluster import Cluster
from anabranch.values.errors import LabError
from ranks import patience

PATIENCE_S = 60.0  # reached only by a failure: the machine may be busy


def _why_not() -> str:
    try:
        preflight.check(Cluster([1e9]), [])
    except LabError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def _signals_count() -> None:
    """Also where the tests run in the background, or under nohup, and a child would ignore them, too."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


WITH_GRACE = """
import sys
from anabranch.tools.cli.main import main
from anabranch.tools.lab import supervisor
supervisor.GRACE_S = float(sys.argv[1])
sys.exit(main(["lab", *sys.argv[2:]]))
"""


@contextmanager
def lab(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    grace_s: float | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """``anabranch lab`` as a process of its own, which is ended if the test does not; ``grace_s`` for its ranks."""
    start = ["-m", "anabranch", "lab"] if grace_s is None else ["-c", WITH_GRACE, str(grace_s)]
    process = subprocess.Popen(
        [sys.executable, *start, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        cwd=folder,
        preexec_fn=_signals_count,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S * patience())


def outcome(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a lab that ends by itself."""
    out, err = process.communicate(timeout=PATIENCE_S * patience())
    return process.returncode, out, err


def until(true: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for it, not for ever."""
    deadline = time.monotonic() + seconds * patience()
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether it is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptors() -> set[str]:
    """Those that this process has open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def pids(folder: Path, count: int) -> list[int]:
    """What ``count`` processes have written to files of their own in ``folder``, once all have: their ids."""

    def written() -> list[int]:
        return [int(text) for path in folder.glob("*.pid") if (text := path.read_text()).endswith("\n")]

    until(lambda: len(written()) == count)
    return written()
