"""The examples run as their readers would run them: under torchrun, as DDP and as anabranch, also after a crash.

Runs that are only compared with these have the same ranks without torchrun, which takes 3 s of CPU for each of them.
"""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import DEFAULT, patch

import pytest
import torch.distributed as dist

import anabranch as ab
from anabranch.demo.text import CharTransformer
from ranks import on_ranks, patience

EXAMPLES = Path(__file__).parents[1] / "examples"
DEADLINE_S = 80
MAX_LINES = 140

# Runs an example, and kills its own rank on the way into the n-th backward: python killer.py RANK N EXAMPLE ...
KILLER = """
import os, runpy, signal, sys
import torch

victim, fatal, *sys.argv = sys.argv[1:]
backward, calls = torch.Tensor.backward, 0

def mortal(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == victim and calls == int(fatal):
        os.kill(os.getpid(), signal.SIGKILL)
    backward(*args, **kwargs)

torch.Tensor.backward = mortal
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def torchrun(ranks: int, *program: str | Path) -> subprocess.CompletedProcess[str]:
    """Both streams and the exit code of a program under torchrun; in the end none of its processes is left."""
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(ranks),
    ]
    process = subprocess.Popen(
        [sys.executable, *launch, *map(str, program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S * patience())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def losses_under_torchrun(ranks: int, folder: Path, *program: str | Path) -> tuple[list[float], str]:
    """The losses that an example wrote and what it printed.

    Gloo's threads may outlive Python and abort a program that is through, under plain DDP too (3 of 12 runs here,
    docs/log.md): such a run is done again.
    """
    path = folder / "losses.json"
    for _ in range(5):
        done = torchrun(ranks, *program, "--losses", path)
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(path.read_text())
    path.unlink()
    return losses, done.stdout


def example(rank: int, program: list[str]) -> str:
    """Run an example in the group that this rank is in already; what it printed.

    The group outlives the example: torch sometimes hangs where one goes with the last variable (6 of 60 runs of DDP).
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = program
    group = patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT)
    with group, redirect_stdout(io.StringIO()) as out:
        runpy.run_path(program[0], run_name="__main__")
    return out.getvalue()


def losses_of(ranks: int, folder: Path, *program: str | Path) -> tuple[list[float], str]:
    """The same from ranks that are forked, not started."""
    path = folder / "losses.json"
    out = on_ranks(example, ranks, [str(part) for part in (*program, "--losses", path)], timeout_s=DEADLINE_S)
    losses: list[float] = json.loads(path.read_text())
    path.unlink()
    return losses, out[0]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_are_short_and_change_one_line(example: str) -> None:
    text = (EXAMPLES / example).read_text()
    assert len(text.splitlines()) < MAX_LINES
    (line,) = [line for line in text.splitlines() if "# the one line" in line]
    wrap = "use_anabranch(" if "use_anabranch" in text else "anabranch.DataParallel(model"
    assert wrap in line and text.count(wrap) == 1


@pytest.mark.parametrize(
    ("example", "steps", "prints"),
    [("char_transformer.py", 40, "after 40 steps on 2 ranks"), ("digits.py", 50, "digits it has not seen")],
)
def test_the_losses_are_those_of_ddp(example: str, steps: int, prints: str, tmp_path: Path) -> None:
    """Of two summands the order does not matter: with two ranks every layout gives the same bits."""
    program = (EXAMPLES / example, "--steps", str(steps), "--wrap")
    ddp, _ = losses_of(2, tmp_path, *program, "ddp")
    ours, out = losses_under_torchrun(2, tmp_path, *program, "anabranch")
    assert prints in out
    assert len(ours) == steps and ours[-1] < ours[0]
    assert ours == ddp


@pytest.mark.parametrize(("ranks", "victim", "rounding"), [(2, 1, 0.0), (3, 2, 1e-5)])
def test_a_killed_run_resumes_to_the_losses_of_one_that_was_not(
    ranks: int, victim: int, rounding: float, tmp_path: Path
) -> None:
    """One rank dies in step 17 of 25; the last checkpoint is of step 10. The relaunch records and plans anew.

    The run that was not killed is one of DDP's. Of more than two summands the order matters to the last bit, and it
    changes with the layout; DDP's own also changes after its first step.
    """
    killer, checkpoint = tmp_path / "killer.py", tmp_path / "run.pt"
    killer.write_text(KILLER)
    program = (EXAMPLES / "char_transformer.py", "--steps", "25", "--every", "10")
    whole, _ = losses_of(ranks, tmp_path, *program, "--wrap", "ddp")
    killed = torchrun(ranks, killer, str(victim), "17", *program, "--checkpoint", checkpoint)
    assert killed.returncode != 0 and "Signal 9 (SIGKILL)" in killed.stderr
    assert checkpoint.exists() and not list(tmp_path.glob("*.unfinished"))
    resumed, out = losses_of(ranks, tmp_path, *program, "--checkpoint", checkpoint)
    assert f"25 steps on {ranks} ranks" in out
    assert resumed == pytest.approx(whole, rel=rounding, abs=0.0)


def sparse_plan(folder: Path) -> Path:
    """A file with a plan for CharTransformer: one sparse bucket of matrices, one dense bucket of all else."""
    parameters = list(reversed(list(CharTransformer().named_parameters())))
    parts = [[name for name, p in parameters if (p.dim() > 1) == large] for large in (True, False)]
    plan = ab.Plan((ab.Bucket(tuple(parts[0]), collective="oktopk:0.05"), ab.Bucket(tuple(parts[1]))))
    ab.save(plan, folder / "plan.json")
    return folder / "plan.json"


def test_a_killed_sparse_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """What waits on each rank is in the checkpoint: with a plan and deterministic sums, as if nothing had happened."""
    killer, checkpoint, plan = tmp_path / "killer.py", tmp_path / "run.pt", sparse_plan(tmp_path)
    killer.write_text(KILLER)
    program = (EXAMPLES / "char_transformer.py", "--steps", "25", "--every", "10", "--compress", "0.05", "--plan", plan)
    whole, _ = losses_of(3, tmp_path, *program)
    killed = torchrun(3, killer, "1", "17", *program, "--checkpoint", checkpoint)
    assert killed.returncode != 0 and "Signal 9 (SIGKILL)" in killed.stderr
    assert sorted(path.suffix for path in tmp_path.glob("run.step*")) == [f".step10-rank{rank}" for rank in range(3)]
    resumed, out = losses_of(3, tmp_path, *program, "--checkpoint", checkpoint)
    assert "sparse bucket to" in out
    assert resumed == whole
    fewer, out = losses_of(2, tmp_path, *program[:1], "--steps", "30", *program[3:], "--checkpoint", checkpoint)
    assert "30 steps on 2 ranks" in out and fewer[:20] == whole[:20] and len(fewer) == 30


# With frameworks, where they are installed.

FRAMEWORKS = [("transformers_trainer.py", "transformers"), ("accelerate_loop.py", "accelerate")]


@pytest.mark.parametrize(("example", "package"), FRAMEWORKS)
def test_the_losses_of_a_framework_are_those_of_ddp(example: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = (EXAMPLES / example, "--steps", "20", "--wrap")
    ddp, _ = losses_under_torchrun(2, tmp_path, *program, "ddp")
    ours, out = losses_under_torchrun(2, tmp_path, *program, "anabranch")
    assert "after 20 steps" in out and "DDP's own buckets" in out
    assert ours == ddp and ours[-1] < ours[0]


def test_accelerate_resumes_a_sparse_run_bit_by_bit(tmp_path: Path) -> None:
    """Stopped after 10 of 16 steps, and started again."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    plan = sparse_plan(tmp_path)
    program = (EXAMPLES / "accelerate_loop.py", "--compress", "0.05", "--plan", plan, "--steps")
    whole, out = losses_under_torchrun(2, tmp_path, *program, "16")
    assert "sparse bucket to" in out
    losses_under_torchrun(2, tmp_path, *program, "10", "--checkpoint", tmp_path / "run")
    resumed, _ = losses_under_torchrun(2, tmp_path, *program, "16", "--checkpoint", tmp_path / "run")
    assert resumed == whole[-12:]
