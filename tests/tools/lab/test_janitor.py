"""The janitor ends what is in the lab and nothing else, whatever happens to the lab."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.tools.lab.hosts import inside, new_namespace
from anabranch.tools.lab.janitor import clean_up, janitor
from tools.lab.lab_process import alive, lab, needs_namespaces, pids, until

MARK = "ANABRANCH_LAB_ID=test-of-the-janitor"
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]

# It leaves its session, its parent dies, and all signals that can be ignored are: a daemon in all but name.
STUBBORN = """
import os, signal, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1] + f"/{os.getpid()}.pid", "w") as file: print(os.getpid(), file=file)
time.sleep(60)
"""


def marked() -> "subprocess.Popen[bytes]":
    name, _, value = MARK.partition("=")
    return subprocess.Popen(SLEEP, env={**os.environ, name: value})


def test_marked_processes_end_and_others_do_not() -> None:
    ours, another = marked(), subprocess.Popen(SLEEP)
    with janitor(MARK):
        assert ours.poll() is None
    assert ours.wait(60) == -signal.SIGKILL
    assert another.poll() is None
    another.kill()
    another.wait(60)


@needs_namespaces
def test_processes_in_its_namespaces_end_and_others_do_not() -> None:
    ours, theirs = new_namespace(), new_namespace()
    with inside(ours):
        inner = subprocess.Popen(SLEEP)
    with inside(theirs):
        another = subprocess.Popen(SLEEP)
    with janitor(MARK, namespaces=[ours]):
        pass
    assert inner.wait(60) == -signal.SIGKILL
    assert another.poll() is None
    another.kill()
    another.wait(60)
    os.close(ours)
    os.close(theirs)


def test_a_janitor_that_was_killed_is_replaced() -> None:
    ours = marked()
    with janitor(MARK) as process:
        process.kill()
    assert ours.wait(60) == -signal.SIGKILL


def test_it_survives_signals_that_are_meant_for_the_lab() -> None:
    with janitor(MARK) as process:
        until(lambda: "janitor" in Path(f"/proc/{process.pid}/cmdline").read_text())
        until(lambda: _ignores(process.pid, signal.SIGTERM))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert os.getsid(process.pid) != os.getsid(0)
    assert process.returncode == 0


def _ignores(pid: int, number: int) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_it_never_cleans_its_own_namespace() -> None:
    with Path("/proc/thread-self/ns/net").open() as home, pytest.raises(AssertionError, match="outside"):
        clean_up(MARK, "", [home.fileno()])


@pytest.mark.parametrize("links", ["real", "emulated"])
def test_sigkill_of_the_lab_leaves_nothing(links: str, tmp_path: Path) -> None:
    if links == "real" and needs_namespaces.args[0]:
        pytest.skip(needs_namespaces.kwargs["reason"])
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    interfaces = socket.if_nameindex()
    # Each rank has a daemon that has left its session, and goes on itself.
    program = f"echo $$ >rank$RANK.pid; {sys.executable} -S stubborn.py . & sleep 60"
    options = ["--emulate"] if links == "emulated" else []
    with lab("--hosts", "2", "--rate", "100mbit", *options, "--", "sh", "-c", program, folder=tmp_path) as process:
        started = pids(tmp_path, 4)
        assert all(map(alive, started))
        assert socket.if_nameindex() == interfaces
        if links == "real":
            home = Path("/proc/self/ns/net").stat().st_ino
            places = {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in started}
            assert len(places) == 2 and home not in places
        process.kill()
        until(lambda: not any(map(alive, started)))
    assert socket.if_nameindex() == interfaces
