"""Ctrl-C of a bench and of a demo: they end soon, and no process and no file of theirs is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ranks import patience
from tools.lab.lab_process import until
from torchrun import marked

START_S = 90.0  # until ranks train: they import torch first
SIGNAL_S = 10.0
TORCHRUN = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m"]
DEMO = ["anabranch", "demo", "--rate", "unshaped", "--steps", "40", "--keep"]
BENCH = [*TORCHRUN, "anabranch", "bench", "--trace", "resnet50", "--report"]
TRAINS = {"demo": "DDP: 40 steps in", "bench": "resnet50"}  # what is said while ranks train


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "whom"), [("demo", "group"), ("demo", "command"), ("bench", "group"), ("bench", "command")]
)
def test_ctrl_c_leaves_nothing_behind(what: str, whom: str, tmp_path: Path) -> None:
    """A terminal sends it to the command's group, in which ranks of torchrun are not; a scheduler to the command."""
    mark, words, scratch = f"MARK={tmp_path}", tmp_path / "words", tmp_path / "scratch"
    scratch.mkdir()
    argv = [*(DEMO if what == "demo" else BENCH), str(tmp_path / "kept")]
    with words.open("wb") as out:
        command = subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdout=out,
            stderr=out,
            env={**os.environ, "MARK": str(tmp_path), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest may run in a shell's background
        )
    try:
        until(lambda: TRAINS[what] in words.read_text() or command.poll() is not None, START_S)
        assert command.poll() is None and len(marked(mark)) >= 3, words.read_text()
        os.killpg(command.pid, signal.SIGINT) if whom == "group" else command.send_signal(signal.SIGINT)
        end = time.monotonic() + SIGNAL_S * patience()
        while time.monotonic() < end and (command.poll() is None or marked(mark)):
            time.sleep(0.1)
        left = [(Path("/proc") / f"{pid}/cmdline").read_text().replace("\0", " ") for pid in marked(mark)]
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = command.wait()
    assert left == [] and code != 0, words.read_text()
    assert not (tmp_path / "kept").exists(), "a page of half a demo"
    assert [path.name for path in scratch.iterdir() if path.name.startswith("anabranch")] == []
