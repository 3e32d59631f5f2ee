"""Where the metrics of live steps can go: lines of JSON, TensorBoard, the terminal.

Nothing is opened before the first step is told: loggers are made on every rank, and one of them logs.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from anabranch.extras import require
from anabranch.observe.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
PLAIN_EVERY = 100  # steps between lines where there is no terminal to redraw one on
CURVES = (
    "measured_s", "predicted_s", "compute_s", "exposed_s", "overlap", "sent_nbytes", "received_nbytes", "density",
)  # fmt: skip


class JsonLines:
    """One JSON object per step and line, with the fields of ``Metrics``; appended to what the file has already."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def log(self, metrics: Metrics) -> None:
        """Write the step as one line, at once, so that others can follow the file."""
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
    """Whether a former start died within a line, which must not swallow the first one of this start."""
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
        for name in CURVES:
            value = getattr(metrics, name)
            if value is not None:
                self._writer.add_scalar(f"anabranch/{name}", value, metrics.step)
        if metrics.stage != self._stage:
            self._stage = metrics.stage
            self._writer.add_text("anabranch/stage", metrics.stage, metrics.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Progress:
    """One line at the bottom of the terminal that says what the last step did; elsewhere a line now and then."""

    def __init__(self, total_steps: int | None = None, console: "Console | None" = None) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}: expected at least 1, or None if nobody knows")
        self._total, self._console = total_steps, console
        self._live: Any = None
        self._told = 0

    def log(self, metrics: Metrics) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._console = self._console or Console(stderr=True)
        # A stage may quote anything: neither markup nor control codes are to be obeyed.
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in described(metrics, self._total))
        line = Text(shown, no_wrap=True, overflow="ellipsis")
        if self._console.is_terminal:
            if self._live is None:
                # What is printed goes above the line, unless it goes to a file.
                redirect = sys.stdout is not None and sys.stdout.isatty()
                self._live = Live(console=self._console, refresh_per_second=4, redirect_stdout=redirect)
                self._live.start()
            self._live.update(line)
        elif self._told % PLAIN_EVERY == 0:
            self._console.print(line, soft_wrap=True)
        self._told += 1

    def close(self) -> None:
        """End the line, which stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def described(metrics: Metrics, total_steps: int | None = None) -> str:
    """A step in one line."""
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
