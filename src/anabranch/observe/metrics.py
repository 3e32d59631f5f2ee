"""Metrics of each step: measured and predicted time, exposed time, bytes. Loggers get them when marks have settled.

There are loggers for lines of JSON, TensorBoard, Weights & Biases and the terminal. A logger opens its file only when
it logs the first step: every rank creates loggers, but usually only rank 0 logs.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import torch
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.exchange.dense import dense_traffic
from anabranch.exchange.interface import Traffic
from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import CurrentStep, StepContext, StepMarks, StepObserver, StepTimer, timeline_of
from anabranch.values.dependencies import require
from anabranch.values.plan import Bucket, Plan

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("anabranch")

MIB = 1 << 20
PERIOD_S = 5.0  # between two lines of Progress
CURVES = (
    "measured_s", "predicted_s", "compute_s", "exposed_s", "overlap", "sent_nbytes", "received_nbytes", "density",
    "grad_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metrics:
    """One synchronised step on one rank; ``measured_s`` is the sum of ``compute_s`` and ``exposed_s``.

    step            the first step of a training is 1; with a loaded ``comm_state_dict`` counting continues
    measured_s      from the start of forward to averaged gradients, without the optimizer
    predicted_s     the simulator's prediction of ``measured_s``; None before profiling and measuring are over
    compute_s       forward, loss and backward
    exposed_s       communication that did not overlap: from the end of backward to averaged gradients
    overlap         share of the communication time that was hidden; None if its buckets were never timed
    sent_nbytes     by this rank, computed from the plan and the sizes of messages, not counted on the wire; None if
    received_nbytes   an exchange does not know
    density         share of all elements that was exchanged: 1 if all buckets are dense; None if unknown
    plan            the first digits of the plan's fingerprint; None under DDP's own buckets
    stage           what the tuner was doing, as in the first line of ``explain()``
    grad_norm       the norm over all average gradients before clipping, under ``Lean(clip_norm=...)``; None elsewhere,
                      and if it is not finite
    """

    step: int
    rank: int
    measured_s: float
    predicted_s: float | None
    compute_s: float
    exposed_s: float
    overlap: float | None
    sent_nbytes: int | None
    received_nbytes: int | None
    density: float | None
    plan: str | None
    buckets: int | None
    lanes: int
    stage: str
    grad_norm: float | None = None


class Logger(Protocol):
    """Receives the metrics of every step; write your own, or use JsonLines, TensorBoard or Progress."""

    def log(self, metrics: Metrics) -> None:
        """Receive the metrics of one step. Steps come in order; on a GPU some steps late."""

    def close(self) -> None:
        """Called when there will be no more metrics."""


BucketTraffic = Callable[[Bucket, int, torch.dtype, int], Traffic | None]  # (bucket, numel, dtype, ranks)


class _PendingStep(NamedTuple):
    """A step whose marks may not have settled."""

    context: StepContext
    marks: StepMarks
    fingerprint: str | None
    traffic: Traffic | None
    grad_norm: torch.Tensor | None


@dataclass(eq=False)
class MetricsFeed(StepObserver):
    """Gives loggers the metrics of every step of ``timer``. A logger that fails is dropped, and training continues.

    current_step   returns the context of the step that ends now
    traffic        returns the bytes of one bucket of a plan
    parameters     the parameters whose gradients are averaged, by name
    grad_norm      returns the norm of the step that ends now, on the device
    """

    loggers: Sequence[Logger]
    timer: StepTimer
    current_step: CurrentStep
    traffic: BucketTraffic
    parameters: Mapping[str, nn.Parameter]
    rank: int
    ranks: int
    grad_norm: Callable[[], torch.Tensor | None] = lambda: None

    def __post_init__(self) -> None:
        self._clock = self.timer.clock
        self._pending: deque[_PendingStep] = deque()
        self._follow(None)
        self._timing = ExitStack()
        if isinstance(self._clock, HostClock):  # on a GPU a thread would have to poll for the ends of buckets
            self._timing.enter_context(self.timer.bucket_timing())

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        context = self.current_step()
        if context.plan is not self._plan:
            self._follow(context.plan)
        self._pending.append(_PendingStep(context, step, self._fingerprint, self._traffic(), self.grad_norm()))
        self._log_settled()

    def close(self) -> None:
        """Log the steps that have settled by now, without waiting for a device, and close the loggers."""
        self._timing.close()
        self._log_settled()
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                log.error("anabranch: %s could not be closed: %s", type(logger).__name__, error)
        self.loggers = []
        self._pending.clear()

    def _log_settled(self) -> None:
        while self._pending and self._settled(self._pending[0].marks):
            metrics = self._metrics(self._pending.popleft())
            for logger in self.loggers:
                if not self.loggers:  # the one before has closed the model
                    break
                try:
                    logger.log(metrics)
                except Exception as error:
                    self.loggers = [other for other in self.loggers if other is not logger]
                    words = "anabranch: %s failed at step %d and gets no more metrics: %s: %s"
                    log.error(words, type(logger).__name__, metrics.step, type(error).__name__, error)

    def _settled(self, marks: StepMarks) -> bool:
        return all(self._clock.settled(mark) for mark in (marks.forward, marks.computed, marks.averaged))

    def _metrics(self, done: _PendingStep) -> Metrics:
        marks, plan, elapsed_s = done.marks, done.context.plan, self._clock.elapsed_s
        exposed_s = max(0.0, elapsed_s(marks.computed, marks.averaged))
        sent, received, density = done.traffic if done.traffic is not None else (None, None, None)
        norm = None if done.grad_norm is None else float(done.grad_norm)
        return Metrics(
            step=done.context.number,
            rank=self.rank,
            measured_s=elapsed_s(marks.forward, marks.averaged),
            predicted_s=done.context.predicted_s,
            compute_s=elapsed_s(marks.forward, marks.computed),
            exposed_s=exposed_s,
            overlap=self._overlap(done, exposed_s),
            sent_nbytes=sent,
            received_nbytes=received,
            density=density,
            plan=done.fingerprint,
            buckets=len(plan) if plan is not None else None,
            lanes=plan.lanes if plan is not None else 1,
            stage=done.context.stage,
            grad_norm=norm if norm is not None and isfinite(norm) else None,
        )

    def _overlap(self, done: _PendingStep, exposed_s: float) -> float | None:
        """From this step's own buckets if all were timed, else from a trial; DDP's own buckets are never timed."""
        plan, marks, clock = done.context.plan, done.marks, self._clock
        if plan is None:
            return None
        if len(marks.buckets) == len(plan) and clock.settled(marks.backward):
            timeline = timeline_of(marks, plan, clock)
            if len(timeline.messages) == len(plan):
                return timeline.overlap
        if not done.context.communication_s:
            return None
        return min(1.0, max(0.0, 1.0 - exposed_s / done.context.communication_s))

    def _traffic(self) -> Traffic | None:
        """The traffic of all buckets together; under DDP's own buckets that of a ring all-reduce of all gradients."""
        if self._plan is None:
            parts: list[Traffic | None] = [dense_traffic(numel, dtype, self.ranks) for numel, dtype in self._sizes]
        else:
            buckets = zip(self._plan.buckets, self._sizes, strict=True)
            parts = [self.traffic(bucket, *size, self.ranks) for bucket, size in buckets]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        exchanged = sum(part.density * numel for part, (numel, _) in zip(known, self._sizes, strict=True))
        return Traffic(
            sum(part.sent_nbytes for part in known),
            sum(part.received_nbytes for part in known),
            exchanged / max(1, sum(numel for numel, _ in self._sizes)),
        )

    def _follow(self, plan: Plan | None) -> None:
        """Note what is logged about a plan, once for each: the fingerprint is a hash over all names.

        Under DDP's own buckets, sizes are those of all gradients of each dtype together.
        """
        parameters = self.parameters
        if plan is not None:
            names = [bucket.names for bucket in plan.buckets]
        else:
            dtypes = {parameter.dtype for parameter in parameters.values()}
            names = [tuple(name for name, p in parameters.items() if p.dtype == dtype) for dtype in dtypes]
        self._plan = plan
        self._fingerprint = plan.fingerprint[:12] if plan is not None else None
        self._sizes = [(sum(parameters[n].numel() for n in part), parameters[part[0]].dtype) for part in names]


# Loggers.


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
