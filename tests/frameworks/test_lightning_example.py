"""examples/lightning_module.py as its readers run it: as DDP and as anabranch, with a rank that is killed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch as ab
from anabranch.frameworks.comm_state import unpacked
from torchrun import KILLER, aborted_at_its_end, torchrun

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_module.py"
EPOCHS, STEPS = 3, 30  # steps in an epoch


def trained(folder: Path, *options: str | Path, killed_in: int | None = None) -> tuple[dict[str, Any], str]:
    """The last checkpoint and what was printed; rank 1 may be killed in a step, and torchrun restarts both."""
    killer = folder / "killer.py"
    killer.write_text(KILLER)
    program: tuple[str | Path, ...] = (EXAMPLE, "--epochs", str(EPOCHS), *options)
    for attempt in range(5):
        keep = folder / f"keep-{len(options)}-{killed_in}-{attempt}"
        launched = program if killed_in is None else (killer, "1", str(killed_in), *program)
        done = torchrun(2, *launched, "--keep", keep, restarts=0 if killed_in is None else 1)
        if not aborted_at_its_end(done):
            break
    assert done.returncode == 0, done.stderr
    if killed_in is not None:  # both ranks were started again, and went on from the end of the epoch before
        assert "failed (exitcode: -9) local_rank: 1" in done.stderr
        assert done.stdout.count(f"{EPOCHS * STEPS - killed_in // STEPS * STEPS} times backward") == 2
    assert f"after {EPOCHS * STEPS} steps on 2 ranks" in done.stdout
    return torch.load(keep / "last.ckpt", weights_only=True), done.stdout


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(weight, other["state_dict"][name]) for name, weight in one["state_dict"].items())


def test_the_example_trains_as_ddp_also_if_a_rank_is_killed(tmp_path: Path) -> None:
    """Of two summands the order does not matter: with two ranks every layout gives the same bits."""
    ddp, _ = trained(tmp_path, "--wrap", "ddp")
    ours, out = trained(tmp_path, killed_in=2 * STEPS + 7)
    assert same_weights(ours, ddp) and "anabranch: " in out


def test_a_sparse_run_goes_on_with_its_residuals_if_a_rank_is_killed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    convolutions = [f"network.{index}.weight" for index in (7, 3)]
    others = ["network.12.bias", "network.12.weight", "network.0.weight"]
    others += [f"network.{index}.{name}" for index in (8, 4, 1) for name in ("bias", "weight")]
    buckets = ab.Bucket(tuple(convolutions), collective="oktopk:0.1"), ab.Bucket(tuple(others))
    ab.save(ab.Plan(buckets), plan)
    whole, out = trained(tmp_path, "--compress", "0.1", "--plan", plan)
    ours, _ = trained(tmp_path, "--compress", "0.1", "--plan", plan, killed_in=2 * STEPS + 7)
    assert "sparse bucket to network.3.weight" in out
    assert [unpacked(entries)["steps_trained"] for entries in ours["anabranch"]] == [EPOCHS * STEPS] * 2
    assert same_weights(ours, whole)
