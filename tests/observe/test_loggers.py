"""Loggers: lines of JSON, TensorBoard, Weights & Biases the terminal; hostile texts, torn files, missing libraries."""

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from anabranch import JsonLines, Metrics, MissingExtraError, Progress, TensorBoard, WandB
from anabranch.observe import metrics as loggers

STEP = Metrics(7, 0, 0.05, 0.04, 0.03, 0.02, 0.5, 3 << 20, 3 << 20, 0.25, "0123456789ab", 2, 1, "running [red]x\x1b[2J")


def test_json_lines_append_and_hold_any_text(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    hostile = replace(STEP, stage='</script>\n"\u2028\x00', predicted_s=None)
    for metrics in (STEP, hostile):
        logger = JsonLines(path)
        logger.log(metrics)
        logger.close()
        logger.close()
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == [asdict(STEP), asdict(hostile)]


def test_a_line_that_a_crash_has_torn_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 7, "ra')
    logger = JsonLines(path)
    for _ in range(2):
        logger.log(STEP)
    logger.close()
    torn, *whole = path.read_text().split("\n")[:-1]
    assert torn == '{"step": 7, "ra' and [json.loads(line) for line in whole] == [asdict(STEP)] * 2


def test_making_a_logger_opens_nothing(tmp_path: Path) -> None:
    JsonLines(tmp_path / "nowhere" / "run.jsonl").close()
    assert list(tmp_path.iterdir()) == []


class FakeWriter:
    """torch's SummaryWriter, as far as it is used."""

    made: list["FakeWriter"] = []  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.texts, self.closed = folder, {}, [], False  # type: ignore[var-annotated]
        FakeWriter.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(loggers, "require", lambda *_: None)
    monkeypatch.setattr(FakeWriter, "made", [])
    logger = TensorBoard(tmp_path)
    assert FakeWriter.made == []
    logger.log(STEP)
    logger.log(replace(STEP, step=8, predicted_s=None))
    logger.close()
    (writer,) = FakeWriter.made
    assert writer.folder == str(tmp_path) and writer.closed
    assert writer.scalars["anabranch/exposed_s", 7] == 0.02 and writer.scalars["anabranch/predicted_s", 7] == 0.04
    assert ("anabranch/predicted_s", 8) not in writer.scalars and ("anabranch/overlap", 8) in writer.scalars
    assert writer.texts == [("anabranch/stage", STEP.stage, 7)]


def test_tensorboard_for_real(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoard(tmp_path)
    logger.log(STEP)
    logger.close()
    seen = reader.EventAccumulator(str(tmp_path))
    seen.Reload()
    (point,) = seen.Scalars("anabranch/exposed_s")
    assert (point.step, point.value) == (STEP.step, pytest.approx(0.02))


def test_without_tensorboard_there_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'anabranch\[tensorboard\]'"):
        TensorBoard(tmp_path)


class FakeRun:
    """A run of wandb, as far as it is used."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[tuple[dict[str, Any], bool]] = []
        self.defined: list[tuple[str, str]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "it would have to rise with the program's own"
        assert commit is not None
        self.rows.append((data, commit))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("started_before", [False, True])
def test_wandb_has_a_run_of_its_own_or_joins_the_programs(
    started_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeRun] = []
    module: Any = ModuleType("wandb")
    module.run = FakeRun() if started_before else None
    module.init = lambda **options: made.append(FakeRun(**options)) or made[0]  # type: ignore[func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger = WandB(project="mine")
    assert made == [], "every rank makes loggers, one logs"
    logger.log(STEP)
    logger.log(replace(STEP, step=8, predicted_s=None))
    logger.close()
    logger.close()
    run = module.run if started_before else made[0]
    assert len(made) == (0 if started_before else 1)
    assert run.options == ({} if started_before else {"project": "mine"})
    assert run.defined == [("anabranch/*", "anabranch/step")]
    first, second = (row for row, _ in run.rows)
    assert [commit for _, commit in run.rows] == [not started_before] * 2, (
        "rows of the program's own run are ended by the program"
    )
    assert first["anabranch/step"] == 7 and first["anabranch/exposed_s"] == 0.02
    assert first["anabranch/stage"] == STEP.stage and first["anabranch/predicted_s"] == 0.04
    assert second["anabranch/step"] == 8 and "anabranch/predicted_s" not in second
    assert run.finished == (0 if started_before else 1)


def test_without_wandb_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"WandB\(...\) needs wandb, .*: pip install wandb$"):
        WandB(project="mine")


def test_progress_prints_a_line_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now_s = io.StringIO(), 100.0
    monkeypatch.setattr(loggers, "monotonic", lambda: now_s)
    progress = Progress(100, Console(file=shown, force_terminal=True, width=200))
    for step in range(1, 8):
        progress.log(replace(STEP, step=step))
        now_s += 1.0
    progress.close()
    lines = shown.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 1 of 100", "step 6 of 100"]
    assert " · 50.0 ms (predicted 40.0) · exposed 20.0 ms · 50% hidden · sent 3.00 MiB" in lines[0]
    assert "density 25.00% · running [red]x" in lines[0], "markup is text"
    assert "\x1b[2J" not in shown.getvalue(), "control codes do not reach the terminal"


def test_progress_refuses_an_impossible_total() -> None:
    with pytest.raises(ValueError, match="total_steps is 0"):
        Progress(0)


def test_progress_stays_on_one_line() -> None:
    shown = io.StringIO()
    progress = Progress(console=Console(file=shown, width=60))
    progress.log(replace(STEP, stage="running a\nb"))
    assert shown.getvalue().count("\n") == 1
