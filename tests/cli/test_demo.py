"""anabranch demo: what it says of two trainings, and one real run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch import save
from anabranch.cli import demo
from anabranch.cli.main import main
from anabranch.report.runs.reading import read_runs
from cli.nouns import error_of, json_of, small_trace

PLAN = {"format": "plan", "version": 1, "buckets": [{"names": ["a"]}, {"names": ["b"]}]}


def runs(plan: Any = None, apart: float = 0.0) -> dict[str, Any]:
    """Two trainings of 90 steps."""
    losses = [5.0 - step / 100 for step in range(90)]
    return {
        "parameters": 1234567,
        "ddp": {"losses": losses, "rounds_s": [0.025, 0.050, 0.025]},
        "anabranch": {"losses": [losses[0] + apart, *losses[1:]], "rounds_s": [0.020, 0.040, 0.020]},
        "plan": plan,
        "explanation": "anabranch: running \x1b[2J optimal.\nModel: 2 gradients",
        "notes": ["the network is noisy"],
    }


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> str:
    monkeypatch.setattr(demo, "_train", lambda workers, steps, output: result)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_plan_that_was_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed(capsys, monkeypatch, runs(PLAN, apart=2e-6))
    assert "1,234,567 parameters, 4 workers, 90 steps" in out
    assert "Model: 2 gradients" in out and "\x1b[2J" not in out and "Note: the network is noisy." in out
    assert "differ by more than 2e-06" in out and "0.80 of the time" in out
    assert "It runs a plan of 2 buckets" in out


def test_ddps_own_buckets_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed(capsys, monkeypatch, runs())
    assert "Same losses." in out and "no plan beat DDP's own buckets" in out


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_train", lambda workers, steps, output: runs(PLAN, apart=0.25))
    document = json_of(capsys, "demo")
    assert document["largest_loss_difference"] == 0.25 and document["step_ratio"]["median"] == pytest.approx(0.8)
    assert document["runs"]["DataParallel"]["step_s"] == pytest.approx(0.020)
    assert document["plan"] == PLAN


def test_what_a_run_leaves_behind_can_be_kept_and_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(workers: int, steps: int, output: Path) -> dict[str, Any]:
        save(small_trace(), output.with_name("trace.json"))
        return runs()

    monkeypatch.setattr(demo, "_train", train)
    folder = tmp_path / "a" / "run"
    json_of(capsys, "demo", "--keep", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "run.jsonl", "trace.json"]
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1,234,567 parameters, 4 workers, 90 steps" in page and "left out" not in capsys.readouterr().out


def test_nothing_of_a_former_run_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_train", lambda workers, steps, output: runs())
    (tmp_path / "plan.json").write_text("old")
    assert "--force" in error_of(capsys, "demo", "--keep", str(tmp_path))
    json_of(capsys, "demo", "--keep", str(tmp_path), "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "run.jsonl"]


def test_too_few_steps_to_see_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--steps" in error_of(capsys, "demo", "--steps", "20")
    assert "--workers" in error_of(capsys, "demo", "--workers", "1")


def test_workers_that_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo"]) == 2
    assert "the demo's workers ended with exit code 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    result = demo._train(2, demo.FEWEST_STEPS, tmp_path / "runs.json")
    assert result["ddp"]["losses"] == result["anabranch"]["losses"]  # of two summands the order does not matter
    assert len(result["ddp"]["losses"]) > demo.FEWEST_STEPS and len(result["ddp"]["rounds_s"]) > 1
    assert all(word in result["explanation"] for word in ("running", "predicted", "measured"))
    left = read_runs([tmp_path])
    assert len(left.traces) == len(left.networks) == len(left.timelines) == 1 and "runs.json" in left.skipped[0]
    assert len(left.trainings[0].lines) == len(result["anabranch"]["losses"])
