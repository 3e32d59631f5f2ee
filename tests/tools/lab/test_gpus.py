"""GPUs and MPS, with a fake control program: the daemon is private, is waited for, and ends with the lab."""

import os
import signal
import sys
from pathlib import Path

import pytest

from anabranch.tools.lab import gpus
from anabranch.values.errors import LabError
from tools.lab.lab_process import alive, lab, needs_namespaces, outcome, pids, until

# A daemon that lives in its pipe folder, like NVIDIA's. It answers from the second question on.
CONTROL = """#!/bin/sh
echo "$0 $*" >>"$FAKE/calls"
pid="$CUDA_MPS_PIPE_DIRECTORY/daemon"
if [ "$1" = -d ]; then
    test -z "$FAKE_REFUSES" || {{ echo "An instance is already running"; exit 1; }}
    {python} -S -c "import time; time.sleep(60)" &
    echo $! >"$pid"; cp "$pid" "$FAKE/daemon.pid"; echo started >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 0
fi
read question
echo "$question" >>"$FAKE/questions"
test -f "$pid" -a "$(wc -l <"$FAKE/questions")" -gt 1 || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
if [ "$question" = quit ] && [ -z "$FAKE_STUBBORN" ]; then kill "$(cat "$pid")"; fi
echo
"""
SMI = """#!/bin/sh
echo "GPU 0: NVIDIA H200 (UUID: GPU-aaaa-0)"
test -z "$FAKE_TWO" || echo "GPU 1: NVIDIA H200 (UUID: GPU-bbbb-1)"
"""
SHOW = 'echo "$CUDA_MPS_PIPE_DIRECTORY|$CUDA_VISIBLE_DEVICES|$NCCL_HOSTID|$CUDA_DEVICE_MAX_CONNECTIONS"'


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake programs are, and tell what they were asked."""
    for name, script in (("nvidia-cuda-mps-control", CONTROL.format(python=sys.executable)), ("nvidia-smi", SMI)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def left(fake: Path) -> list[Path]:
    return list(fake.glob("anabranch-mps-*"))


@needs_namespaces
def test_the_lab_has_a_daemon_of_its_own_and_ends_it(fake: Path) -> None:
    with lab("--hosts", "2", "--rate", "1gbit", "--backend", "nccl", "--", "sh", "-c", SHOW) as process:
        code, out, err = outcome(process)
    assert code == 0, err
    assert out.startswith(f"{fake}/anabranch-mps-") and out.endswith("/pipe||lab0|8\n")
    assert (fake / "questions").read_text().splitlines()[-1] == "quit"
    assert not left(fake) and not alive(pids(fake, 1)[0])


@needs_namespaces
@pytest.mark.parametrize("stubborn", [False, True])
def test_sigkill_of_the_lab_ends_the_daemon(fake: Path, stubborn: bool) -> None:
    """Also one that does not quit."""
    environment = {"FAKE_STUBBORN": "1"} if stubborn else {}
    program = f"echo $$ >{fake}/$RANK.pid; sleep 60"
    arguments = ("--hosts", "2", "--rate", "1gbit", "--backend", "nccl", "--", "sh", "-c", program)
    with lab(*arguments, environment=environment) as process:
        started = pids(fake, 3)
        process.send_signal(signal.SIGKILL)
        until(lambda: not any(map(alive, started)) and not left(fake))


@needs_namespaces
def test_the_user_s_own_daemon_is_used_and_left_running(fake: Path) -> None:
    theirs = fake / "theirs"
    theirs.mkdir()
    (theirs / "daemon").write_text("1\n")
    (fake / "questions").write_text("one\n")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(theirs)}
    arguments = ("--hosts", "2", "--rate", "1gbit", "--backend", "nccl", "--", "sh", "-c", SHOW)
    with lab(*arguments, environment=environment) as process:
        code, out, err = outcome(process)
    assert (code, out) == (0, f"{theirs}||lab0|8\n"), err
    assert "-d" not in (fake / "calls").read_text() and "quit" not in (fake / "questions").read_text()


@needs_namespaces
def test_enough_gpus_need_no_daemon(fake: Path) -> None:
    arguments = ("--hosts", "2", "--rate", "1gbit", "--backend", "nccl", "--", "sh", "-c", SHOW)
    with lab(*arguments, environment={"FAKE_TWO": "1"}) as process:
        code, out, err = outcome(process)
    assert (code, out) == (0, "|GPU-aaaa-0|lab0|\n"), err
    assert not (fake / "calls").exists()


def test_a_daemon_that_does_not_come_up(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "1")
    with pytest.raises(LabError, match=r"exit code 1: An instance is already running; its log: empty\. Without MPS"):
        gpus.start_mps(gpus.new_mps_folder())


def test_a_daemon_that_never_answers(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "MPS_START_S", 0.2)
    monkeypatch.setattr(gpus, "MPS_QUERY", "\n")
    folder = gpus.new_mps_folder()
    (fake / "nvidia-cuda-mps-control").write_text(
        "#!/bin/sh\n"
        "test x$1 = x-d || { echo Cannot find MPS control daemon process; exit 1; }\n"
        "echo bad >$CUDA_MPS_LOG_DIRECTORY/control.log\n"
    )
    with pytest.raises(LabError, match="Cannot find MPS control daemon process; its log: bad"):
        gpus.start_mps(folder)


@pytest.mark.parametrize(
    ("two", "visible", "expected"),
    [
        ("", None, ["GPU-aaaa-0"]),
        ("1", None, ["GPU-aaaa-0", "GPU-bbbb-1"]),
        ("1", "1", ["GPU-bbbb-1"]),
        ("1", "1,0", ["GPU-bbbb-1", "GPU-aaaa-0"]),
        ("1", "GPU-bbbb-1", ["GPU-bbbb-1"]),
        ("1", "", []),
        ("1", "-1", []),
    ],
)
def test_gpus_by_name(
    fake: Path, monkeypatch: pytest.MonkeyPatch, two: str, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.setenv("FAKE_TWO", two)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.available_gpus() == expected


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.available_gpus() == []
