"""Loggers for the metrics of live steps: lines of JSON, TensorBoard, Weights & Biases, the terminal.

A logger opens its file only when it logs the first step: every rank creates loggers, but usually only rank 0 logs.
"""

import json
import os
from dataclasses import asdict
from importlib import import_module
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from anabranch.observe.metrics import Metrics
from anabranch.values.extras import require

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
PERIOD_S = 5.0  # between two lines of Progress
CURVES = (
    "measured_s", "predicted_s", "compute_s", "exposed_s", "overlap", "sent_nbytes", "received_nbytes", "density",
    "grad_norm",
)  # fmt: skip


def curves_of(metrics: Metrics) -> dict[str, float]:
    """The values of a step that are drawn as curves, where they are known, by name."""
    return {name: value for name in CURVES if (value := getattr(metrics, name)) is not None}


class JsonLines:
    """Appends one line per step to a file: a JSON object with the fields of ``Metrics``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def log(self, metrics: Metrics) -> None:
        """Write the step as one line, without delay, so that other programs can follow the file."""
        if self._file is None:
            torn = _is_torn(self._path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            if torn:
                self._file.write("\n")
        self._file.write(json.dumps(asdict(metrics), allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end, because a process died while writing it; the next line must not join it."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class TensorBoard:
    """Curves under ``anabranch/`` in a folder that TensorBoard reads; needs ``anabranch[tensorboard]``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboard", "tensorboard", "TensorBoard(...)")
        self._folder = os.fspath(folder)
        self._writer: Any = None
        self._stage = ""

    def log(self, metrics: Metrics) -> None:
        """Add a point to each curve whose value is known."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        for name, value in curves_of(metrics).items():
            self._writer.add_scalar(f"anabranch/{name}", value, metrics.step)
        if metrics.stage != self._stage:
            self._stage = metrics.stage
            self._writer.add_text("anabranch/stage", metrics.stage, metrics.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Curves under ``anabranch/`` in Weights & Biases; needs the package wandb.

    If the program has started a run, values join the rows that it logs, so that its own steps stay in order. If not, a
    run is started with these options of ``wandb.init``, such as ``project=``, and finished when the logger is closed.
    """

    def __init__(self, **options: Any) -> None:
        require("wandb", None, "WandB(...)")
        self._options = options
        self._run: Any = None
        self._owned = False

    def log(self, metrics: Metrics) -> None:
        """Add a point to each curve whose value is known."""
        if self._run is None:
            wandb: Any = import_module("wandb")
            self._owned = wandb.run is None
            self._run = wandb.init(**self._options) if self._owned else wandb.run
            self._run.define_metric("anabranch/*", step_metric="anabranch/step")
        row = {"step": metrics.step, **curves_of(metrics), "stage": metrics.stage}
        self._run.log({f"anabranch/{name}": value for name, value in row.items()}, commit=self._owned)

    def close(self) -> None:
        if self._run is not None and self._owned:
            self._run.finish()
        self._run = None


class Progress:
    """Prints a line with the metrics of the last step, the first time at once and then every five seconds."""

    def __init__(self, total_steps: int | None = None, console: "Console | None" = None) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}: expected at least 1, or None if it is not known")
        self._total_steps = total_steps
        self._console = console
        self._next_s = -inf

    def log(self, metrics: Metrics) -> None:
        if (now_s := monotonic()) >= self._next_s:
            from rich.console import Console

            self._next_s = now_s + PERIOD_S
            self._console = self._console or Console(stderr=True)
            # A stage may quote any text, such as an error: markup and control codes in it must have no effect.
            summary = step_summary(metrics, self._total_steps)
            printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in summary)
            self._console.print(printable, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """No-op: nothing stays open."""


def step_summary(metrics: Metrics, total_steps: int | None = None) -> str:
    """The metrics of a step in one line."""
    step = f"step {metrics.step}" + (f" of {total_steps}" if total_steps is not None else "")
    took = f"{metrics.measured_s * 1e3:.1f} ms"
    if metrics.predicted_s is not None:
        took += f" (predicted {metrics.predicted_s * 1e3:.1f})"
    parts = [step, took, f"exposed {metrics.exposed_s * 1e3:.1f} ms"]
    if metrics.overlap is not None:
        parts.append(f"{metrics.overlap:.0%} hidden")
    if metrics.sent_nbytes is not None:
        parts.append(f"sent {metrics.sent_nbytes / MIB:.2f} MiB")
    if metrics.density is not None and metrics.density < 1:
        parts.append(f"density {metrics.density:.2%}")
    return " · ".join([*parts, metrics.stage])
