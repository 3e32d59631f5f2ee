"""The benchmark of Lean on CPU ranks: rows as they come, also behind one that has failed on some rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.tiny_training import TOO_LARGE
from torchrun import torchrun

ROOT = Path(__file__).parents[2]
MODEL = "bench.tiny_training:build"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model above, in programs that are started here."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.slow
def test_rows_come_also_behind_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ways = ["ddp", "naive", "lean", "bf16", "dense", "recomputed-host", "share", "within"]
    options = ["--precision", "fp32", "--buckets", "2", "--limit-gib", "0.07", "--steps", "2"]
    models = [f"{MODEL}:{TOO_LARGE}", f"{MODEL}:4", MODEL]
    done = torchrun(2, "-m", "benchmarks.lean", *models, "--ways", *ways[:1], *options)
    assert done.returncode == 0, done.stderr
    rows = [cells(line) for line in done.stdout.splitlines() if line.startswith("| DDP")]
    assert [row[1] for row in rows] == [str(TOO_LARGE), "4", "8"]
    assert rows[0][-1] == "rank 1: Tried to allocate more than there is"
    assert rows[0][7] == "" and all(float(row[9]) > 0 and not row[-1] for row in rows[1:])
    done = torchrun(2, "-m", "benchmarks.lean", f"{MODEL}:4", "--ways", *ways, *options)
    assert done.returncode == 0, done.stderr
    rows = [cells(line) for line in done.stdout.splitlines() if line.startswith(("| DDP", "| naive", "| Lean"))]
    assert len(rows) == len(ways) and all(row[1] == "4" and float(row[9]) > 0 for row in rows)
    assert all(float(row[3]) > 0 for row in rows[:-2]) and all("predicted peak" in row[-1] for row in rows[-2:])


def test_batches_are_predicted_without_ranks() -> None:
    command = [sys.executable, "-m", "benchmarks.lean", MODEL, "--ways", "ddp", "recomputed", "--limit-gib", "0.1"]
    done = subprocess.run([*command, "--predict"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ddp, _, at = done.stdout.splitlines()
    batches = dict(one.split("=") for one in at.removeprefix("--at ").split())
    assert batches.keys() == {f"{MODEL}/ddp", f"{MODEL}/recomputed"}
    assert f"batch {batches[f'{MODEL}/ddp']}," in ddp and int(batches[f"{MODEL}/ddp"]) > 0
    assert int(batches[f"{MODEL}/ddp"]) < int(batches[f"{MODEL}/recomputed"])


def test_what_is_given_for_no_row_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.lean", f"{MODEL}:4", "--at", "other/ddp=3", "--predict"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "--at names other/ddp: expected MODEL/WAY=BATCH of a row that runs" in done.stderr
