"""The examples run as their readers would run them: under torchrun, as DDP and as anabranch, also after a crash.

Runs that are only compared with these have the same ranks without torchrun, which takes 3 s of CPU for each of them.
"""

import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import DEFAULT, patch

import pytest
import torch
import torch.distributed as dist

import anabranch as ab
from anabranch.tools.demo.text import CharTransformer
from ranks import on_ranks
from torchrun import DEADLINE_S, KILLER, aborted_at_its_end, torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 140
WRAPS = ("anabranch.DataParallel(model", "use_anabranch(", "AnabranchStrategy(", "ab.replicate(model")


def losses_under_torchrun(ranks: int, folder: Path, *program: str | Path, restarts: int = 0) -> tuple[list[float], str]:
    """The losses that an example wrote and what it printed."""
    path = folder / "losses.json"
    for _ in range(5):
        try:
            done = torchrun(ranks, *program, "--losses", path, restarts=restarts)
        except subprocess.TimeoutExpired:
            if path.exists():  # it was through; at the end of a process torch sometimes hangs, also under plain DDP
                continue
            raise
        if not aborted_at_its_end(done):
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
    (line,) = [line for line in text.splitlines() if line.endswith("  # the one line")]
    (wrap,) = [wrap for wrap in WRAPS if wrap in line]
    assert text.count(wrap) == 1


@pytest.mark.slow
def test_an_example_has_the_losses_of_ddp_in_forked_ranks(tmp_path: Path) -> None:
    """Of two summands the order does not matter: with two ranks every layout gives the same bits."""
    program = (EXAMPLES / "char_transformer.py", "--steps", "15", "--wrap")
    ddp, _ = losses_of(2, tmp_path, *program, "ddp")
    ours, out = losses_of(2, tmp_path, *program, "anabranch")
    assert "after 15 steps on 2 ranks" in out and len(ours) == 15 and ours == ddp


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("example", "steps", "prints"),
    [("char_transformer.py", 40, "after 40 steps on 2 ranks"), ("digits.py", 50, "digits it has not seen")],
)
def test_the_losses_under_torchrun_are_those_of_ddp(example: str, steps: int, prints: str, tmp_path: Path) -> None:
    program = (EXAMPLES / example, "--steps", str(steps), "--wrap")
    ddp, _ = losses_of(2, tmp_path, *program, "ddp")
    ours, out = losses_under_torchrun(2, tmp_path, *program, "anabranch")
    assert prints in out
    assert len(ours) == steps and ours[-1] < ours[0]
    assert ours == ddp


@pytest.mark.campaign
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


def sparse_program(plan: Path) -> tuple[str | Path, ...]:
    """A run with deterministic sums under a plan, which is written here: it repeats bit by bit."""
    parameters = list(reversed(list(CharTransformer().named_parameters())))
    parts = [[name for name, p in parameters if (p.dim() > 1) == large] for large in (True, False)]
    ab.save(ab.Plan((ab.Bucket(tuple(parts[0]), collective="oktopk:0.05"), ab.Bucket(tuple(parts[1])))), plan)
    return EXAMPLES / "char_transformer.py", "--steps", "25", "--every", "10", "--compress", "0.05", "--plan", plan


@pytest.mark.campaign
def test_a_killed_sparse_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """What waits on each rank is in the checkpoint: with a plan and deterministic sums, as if nothing had happened."""
    killer, checkpoint = tmp_path / "killer.py", tmp_path / "run.pt"
    killer.write_text(KILLER)
    program = sparse_program(tmp_path / "plan.json")
    whole, _ = losses_of(3, tmp_path, *program)
    killed = torchrun(3, killer, "1", "17", *program, "--checkpoint", checkpoint)
    assert killed.returncode != 0 and "Signal 9 (SIGKILL)" in killed.stderr
    assert sorted(path.suffix for path in tmp_path.glob("run.step*")) == [f".step10-rank{rank}" for rank in range(3)]
    resumed, out = losses_of(3, tmp_path, *program, "--checkpoint", checkpoint)
    assert "sparse bucket to" in out
    assert resumed == whole
    fewer, out = losses_of(2, tmp_path, *program[:1], "--steps", "30", *program[3:], "--checkpoint", checkpoint)
    assert "30 steps on 2 ranks" in out and fewer[:20] == whole[:20] and len(fewer) == 30


@pytest.mark.campaign
def test_torchrun_restarts_a_sparse_run_bit_by_bit(tmp_path: Path) -> None:
    """A rank dies in step 17; under --max-restarts torchrun ends the other and starts both, which go on after 15."""
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    program = (*sparse_program(tmp_path / "plan.json"), "--every", "5")  # the last checkpoint has the final weights
    whole, restarted = tmp_path / "whole.pt", tmp_path / "restarted.pt"
    losses, _ = losses_of(2, tmp_path, *program, "--checkpoint", whole)
    for _ in range(5):
        restarted.unlink(missing_ok=True)
        done = torchrun(2, killer, "1", "17", *program, "--checkpoint", restarted, restarts=1)
        if not aborted_at_its_end(done):
            break
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert "25 steps on 2 ranks" in done.stdout and done.stdout.count("10 times backward") == 2
    final, expected = (torch.load(path, weights_only=True) for path in (restarted, whole))
    assert final["losses"] == expected["losses"] == losses and len(losses) == 25
    assert all(torch.equal(final["model"][name], weight) for name, weight in expected["model"].items())


@pytest.mark.campaign
def test_the_sharded_example_resumes_bit_by_bit_and_on_fewer_ranks(tmp_path: Path) -> None:
    """Two nodes of two ranks; 10 of 14 steps, then the rest, then four more on two nodes of one rank."""
    program = (EXAMPLES / "sharded.py", "--compress", "0.05", "--steps")
    whole, out = losses_under_torchrun(4, tmp_path, *program, "14")
    assert "after 14 steps on 4 ranks" in out and "between 2 nodes, by oktopk:0.05" in out
    kept = ("--checkpoint", tmp_path / "run")
    first, _ = losses_under_torchrun(4, tmp_path, *program, "10", *kept)
    resumed, _ = losses_under_torchrun(4, tmp_path, *program, "14", *kept)
    assert first + resumed == whole
    fewer, _ = losses_under_torchrun(2, tmp_path, *program, "18", *kept)
    assert len(fewer) == 4 and max(fewer) < whole[0]


@pytest.mark.campaign
def test_the_sharded_example_finds_a_plan_and_has_the_same_losses(tmp_path: Path) -> None:
    program = (EXAMPLES / "sharded.py", "--compress", "none", "--steps", "6")
    losses, _ = losses_under_torchrun(2, tmp_path, *program)
    planned, out = losses_under_torchrun(2, tmp_path, *program, "--plan", tmp_path / "plan.json")
    assert "A unit per block: 4 units" in out and "ms simulated" in out
    again, out = losses_under_torchrun(2, tmp_path, *program, "--plan", tmp_path / "plan.json")
    assert "ms simulated" not in out
    assert planned == again == losses
