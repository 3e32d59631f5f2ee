"""The benchmark of Lean on CPU ranks: rows as they come, also behind one that has failed on some rank."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import patience
from tools.bench.tiny_training import TOO_LARGE
from torchrun import torchrun

ROOT = Path(__file__).parents[3]
MODEL = "tools.bench.tiny_training:build"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model above, in programs that are started here."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.campaign
def test_rows_come_also_behind_one_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    ways = ["ddp", "naive", "lean", "bf16", "dense", "recomputed-int8", "share", "within"]
    options = ["--precision", "fp32", "--buckets", "2", "--limit-gib", "0.07", "--steps", "2"]
    models = [f"{MODEL}:{TOO_LARGE}", f"{MODEL}:4", MODEL]
    done = torchrun(2, "-m", "benchmarks.lean", *models, "--ways", *ways[:1], *options)
    assert done.returncode == 0, done.stderr
    rows = [cells(line) for line in done.stdout.splitlines() if line.startswith("| DDP")][:-1]  # the last: medians
    assert [row[1] for row in rows[:2]] == [str(TOO_LARGE), "4"] and int(rows[2][1]) > 8
    assert rows[0][-1] == "rank 1: Tried to allocate more than there is"
    assert rows[0][9] == "" and all(float(row[11]) > 0 and not row[-1] for row in rows[1:])
    known = tmp_path / "rows.json"
    made_for = {"precision": "fp32", "ranks": 2, "buckets": ["2"], "limit_gib": 0.07}
    known.write_text(json.dumps({"for": made_for, "rows": {f"{MODEL}:4/ddp": [4, 7 << 30]}}))
    leaving = ["--predictions", str(known), "--without", f"{MODEL}/int8"]
    done = torchrun(2, "-m", "benchmarks.lean", f"{MODEL}:4", "--ways", "int8", *ways, *options, *leaving)
    assert done.returncode == 0, done.stderr
    rows = [cells(line) for line in done.stdout.splitlines() if line.startswith(("| DDP", "| naive", "| Lean"))]
    assert len(rows) == len(ways) and all(row[1] == "4" and float(row[11]) > 0 for row in rows)
    assert rows[0][3] == "7.00", "read, not computed"
    assert [bool(row[8]) for row in rows] == [way != "ddp" for way in ways], "times naive's step, behind that row"
    rates = [float(row[11]) for row in rows]
    for row, rate in zip(rows[-2:], rates[-2:], strict=True):
        assert float(row[13]) == pytest.approx(rate / max(rates[:-2]), abs=0.01), "times the best by hand"
    assert all(row[13] == "" for row in rows[:-2])
    assert f"buckets; SGD with momentum ({MODEL})." in done.stdout
    assert all(float(row[3]) > 0 for row in rows[1:-2]) and all("predicted peak" in row[-1] for row in rows[-2:])


def test_medians_over_the_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.lean import Job, Row, Table

    table = Table(argparse.Namespace(ranks=4, limit_gib=16.0))
    for batch, nbytes, step_s in ((1, 40, 1.1), (2, 20, 1.5), (3, 30, 1.2)):
        table.show(Job(MODEL, batch, "naive"), Row("naive", batch, peak_nbytes=100, seconds=[1.0]))
        table.show(Job(MODEL, batch, "lean"), Row("lean", batch, peak_nbytes=nbytes, seconds=[step_s]))
    table.show_medians()
    last = capsys.readouterr().out.splitlines()[-1]
    assert cells(last) == ["Lean, in place", "", "70% of 3", "1.20 of 3", "", ""]


def test_batches_are_predicted_without_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.lean", MODEL, "--ways", "ddp", "recomputed", "--limit-gib", "0.1"]
    command += ["--predict", "--predictions", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    ddp, _, at = done.stdout.splitlines()
    batches = dict(one.split("=") for one in at.removeprefix("--at ").split())
    assert batches.keys() == {f"{MODEL}/ddp", f"{MODEL}/recomputed"}
    assert f"batch {batches[f'{MODEL}/ddp']}," in ddp and int(batches[f"{MODEL}/ddp"]) > 0
    assert int(batches[f"{MODEL}/ddp"]) < int(batches[f"{MODEL}/recomputed"])
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["for"] == {"precision": "bf16", "ranks": 4, "buckets": ["12"], "limit_gib": 0.1}
    assert written["rows"].keys() == {f"{MODEL}:0/ddp", f"{MODEL}:0/recomputed"}
    assert written["rows"][f"{MODEL}:0/ddp"][0] == int(batches[f"{MODEL}/ddp"])


def test_predictions_for_other_options_are_refused(tmp_path: Path) -> None:
    known = tmp_path / "rows.json"
    known.write_text(json.dumps({"for": {"precision": "fp32"}, "rows": {}}))
    command = [sys.executable, "-m", "benchmarks.lean", f"{MODEL}:4", "--predictions", str(known)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 1 and "was made for {'precision': 'fp32'}: expected {'precision': 'bf16'" in done.stderr


def test_what_is_given_for_no_row_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.lean", f"{MODEL}:4", "--at", "other/ddp=3", "--predict"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 1 and "--at names other/ddp: expected MODEL/WAY=BATCH of a row that runs" in done.stderr
