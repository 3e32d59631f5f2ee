"""A program in the lab, from its start to its exit code: success, failures of every kind, signals, and torch itself."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.launch import run
from anabranch.tools.lab.supervisor import RankProcess, start_process
from anabranch.values.errors import LabError
from ranks import patience
from tools.lab.lab_process import alive, descriptors, lab, needs_namespaces, outcome, pids, until

REAL = pytest.param(Cluster([1e9] * 3), id="namespaces", marks=needs_namespaces)
EMULATED = pytest.param(Cluster([1e9] * 3, alpha_s=1e-5), id="emulated")
both = pytest.mark.parametrize("cluster", [REAL, EMULATED])

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", int(x[0]), "of", dist.get_world_size(), "in", os.environ["ANABRANCH_LAB"])
dist.barrier()
dist.destroy_process_group()
"""


def shell(cluster: Cluster, script: str, timeout_s: float | None = 100.0) -> int:
    return run(cluster, ["sh", "-c", script], timeout_s)


def without_note(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("anabranch lab: note"))


@both
def test_rank_0_prints_and_the_others_are_silent(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert shell(cluster, "echo out of $RANK; echo err of $RANK >&2") == 0
    out, err = capfd.readouterr()
    assert (out, without_note(err)) == ("out of 0\n", "err of 0\n")


@both
def test_the_first_failure_is_the_one_that_is_quoted(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 fails, rank 1 after the lab has noticed that (a process's id is there until then), rank 0 not at all."""
    monkeypatch.chdir(tmp_path)
    script = """
case $RANK in
2)  seq 100; echo the cause >&2; echo $$ >2.pid; exit 7;;
1)  until [ -s 2.pid ]; do sleep 0.02; done
    while kill -0 $(cat 2.pid) 2>/dev/null; do sleep 0.02; done
    echo a consequence; exit 1;;
esac"""
    assert shell(cluster, script) == 7
    _, err = capfd.readouterr()
    assert "rank 2 failed first (exit code 7); its last output:\n" in err
    assert "rank 2 | 100\nrank 2 | the cause\n" in err and "rank 2 | 50\n" not in err
    assert "the others: rank 0: exit code 0; rank 1: exit code 1\n" in err
    assert "consequence" not in err


SLOW_TO_END = """
import os, sys, threading, time
rank, ends = os.environ["RANK"], sys.argv[1] == "by itself"
def until(true):
    while not true():
        time.sleep(0.02)
def ended(pid):
    return not os.path.exists(f"/proc/{pid}")
if rank == "1":  # it fails when it has lost rank 2, and ends at once
    with open("1.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("1.part", "1.pid")
    until(lambda: os.path.exists("2.failed"))
    raise ConnectionError("a consequence")
if rank == "2":
    until(lambda: os.path.exists("1.pid"))
    first = open("1.pid").read()
    def after_the_traceback():
        threading.main_thread().join()
        time.sleep(0.1)  # a file's time has steps of some milliseconds
        open("2.failed", "w")
        until(lambda: ends and ended(first))
    threading.Thread(target=after_the_traceback).start()
    raise ArithmeticError("the cause")
until(lambda: ends and os.path.exists("1.pid") and ended(open("1.pid").read()))
"""


@pytest.mark.parametrize(
    ("how", "grace_s", "ending"),
    [("by itself", 100.0, "exit code 1"), ("by the lab", 0.3, "still running, so ended by the lab")],
)
def test_the_first_to_fail_is_quoted_although_another_ends_first(
    how: str,
    grace_s: float,
    ending: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 raises, but a thread of it goes on until rank 1 has gone, or for ever. Rank 0 waits for the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anabranch.tools.lab.supervisor.GRACE_S", grace_s)
    assert run(Cluster([1e9] * 3, alpha_s=1e-5), [sys.executable, "-c", SLOW_TO_END, how], 100.0) == 1
    _, err = capfd.readouterr()
    assert f"rank 2 failed first ({ending}); its last output:\n" in err
    assert "rank 2 | ArithmeticError: the cause\n" in err and "a consequence" not in err


@both
def test_a_rank_killed_by_a_signal(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it, as they would in a collective, and are not waited for."""
    monkeypatch.setattr("anabranch.tools.lab.supervisor.GRACE_S", 0.2)
    assert shell(cluster, "if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep 600", None) == 128 + signal.SIGSEGV
    _, err = capfd.readouterr()
    assert "rank 1 failed first (killed by SIGSEGV); it printed nothing\n" in err
    assert "the others: rank 0, rank 2: still running, so ended by the lab\n" in err


@needs_namespaces
def test_rank_0_is_not_quoted_twice(capfd: pytest.CaptureFixture[str]) -> None:
    assert shell(Cluster([1e9]), "echo the message >&2; exit 3") == 3
    _, err = capfd.readouterr()
    assert err.count("the message") == 1 and "rank 0 failed first (exit code 3); its output is above\n" in err


@both
def test_a_timeout(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert shell(cluster, "[ $RANK = 1 ] || sleep 60", timeout_s=1.0) == 124
    words = "not done after 1 s: rank 0, rank 2: still running, so ended by the lab; rank 1: exit code 0\n"
    assert words in capfd.readouterr().err


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(LabError, match="no-such-program: no such program on PATH"):
        run(Cluster([1e9]), ["no-such-program"])
    with pytest.raises(LabError, match="after --"):
        run(Cluster([1e9]), [])


def test_a_lab_inside_a_lab_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_LAB_ID", "another")
    with pytest.raises(LabError, match="a lab inside a lab"):
        run(Cluster([1e9]), ["true"])


def test_a_start_that_fails_ends_those_already_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[RankProcess] = []

    def fails_at_the_second(*arguments: Any, **options: Any) -> RankProcess:
        if started:
            raise OSError("no more processes")
        started.append(start_process(*arguments, **options))
        return started[0]

    monkeypatch.setattr("anabranch.tools.lab.launch.start_process", fails_at_the_second)
    with pytest.raises(OSError, match="no more processes"):
        shell(Cluster([1e9] * 2, alpha_s=0.0), "sleep 60")
    assert started[0].process.returncode == -signal.SIGKILL


@both
def test_nothing_is_left_of_a_lab(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, no signal handler, and no process that a rank has left behind."""
    monkeypatch.chdir(tmp_path)
    shell(cluster, "true")
    before = descriptors(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert shell(cluster, "(setsid sleep 60 & echo $! >$RANK.pid)") == 0
    assert not any(map(alive, pids(tmp_path, 3)))
    assert (descriptors(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# ------------------------------------------------------------------------------------------------------ signals

POLITE = """
trap 'echo $RANK was asked by {name} >>said; exit 0' {name}
echo $$ >$RANK.pid
while true; do sleep 0.05; done
"""
STUBBORN = """
trap 'echo >$RANK.asked' INT
trap '' TERM HUP
echo $$ >$RANK.pid
while true; do sleep 0.05; done
"""


@needs_namespaces
@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGINT, "INT", 130), (signal.SIGTERM, "TERM", 143), (signal.SIGHUP, "HUP", 129)],
)
def test_a_signal_reaches_every_rank_once(number: signal.Signals, name: str, code: int, tmp_path: Path) -> None:
    with lab("--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", POLITE.format(name=name), folder=tmp_path) as process:
        pids(tmp_path, 2)
        process.send_signal(number)
        done = outcome(process)
    assert done[0] == code, done
    assert f"stopped by {number.name}: rank 0, rank 1: exit code 0" in done[2]
    assert sorted((tmp_path / "said").read_text().splitlines()) == [f"{rank} was asked by {name}" for rank in (0, 1)]


@needs_namespaces
@pytest.mark.parametrize(("signals", "grace_s"), [(1, 3.0), (2, 1000.0)])
def test_ranks_that_ignore_it_are_killed(signals: int, grace_s: float, tmp_path: Path) -> None:
    """After the grace period, or at once after a second signal. Ctrl-C in a terminal reaches them through the lab only:
    each rank has a session of its own."""
    arguments = ("--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", STUBBORN)
    with lab(*arguments, folder=tmp_path, grace_s=grace_s * patience()) as process:
        started = pids(tmp_path, 2)
        assert len({os.getsid(pid) for pid in (process.pid, *started)}) == 3
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        until(lambda: len(list(tmp_path.glob("*.asked"))) == 2)
        if signals == 2:
            process.send_signal(signal.SIGINT)
        code, _, err = outcome(process)
    assert code == 130 and "rank 0, rank 1: still running, so ended by the lab" in err
    assert not any(map(alive, started))
    if signals == 1:
        assert time.monotonic() - began >= grace_s


@needs_namespaces
def test_two_labs_at_once(tmp_path: Path) -> None:
    """The end of one, and its janitor, leave the other alone."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    arguments = ("--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", STUBBORN)
    with lab(*arguments, folder=folders[0]) as one, lab(*arguments, folder=folders[1]) as other:
        first, second = (pids(folder, 2) for folder in folders)
        one.kill()
        until(lambda: not any(map(alive, first)))
        time.sleep(0.2)
        assert all(map(alive, second)) and other.poll() is None
        other.kill()
        until(lambda: not any(map(alive, second)))


# -------------------------------------------------------------------------------------------------------- torch


@pytest.mark.slow
@needs_namespaces
def test_gloo_over_three_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(ALL_REDUCE)
    assert run(Cluster([1e9] * 3), [sys.executable, str(tmp_path / "program.py")], 100) == 0
    assert capfd.readouterr().out == "sum 6 of 3 in 3 hosts, 1 Gbit/s links, network namespaces\n"


@pytest.mark.slow
@needs_namespaces
def test_gloo_over_two_hosts_of_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(ALL_REDUCE)
    assert run(Cluster([1e9] * 2, 2), [sys.executable, str(tmp_path / "program.py")], 100) == 0
    assert "sum 10 of 4 in 2 hosts of 2 ranks, 1 Gbit/s links, network namespaces\n" in capfd.readouterr().out


@needs_namespaces
def test_a_failing_rank_of_several_on_a_host(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.tools.lab.supervisor.GRACE_S", 0.2)
    assert shell(Cluster([1e9], 2), "[ $RANK = 1 ] && { echo cause >&2; exit 9; }; sleep 60", 100) == 9
    err = capfd.readouterr().err
    assert "rank 1 failed first (exit code 9); its last output:\nrank 1 | cause\n" in err
