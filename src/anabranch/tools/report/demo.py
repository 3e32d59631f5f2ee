"""What the demo's measurements come to: how much faster, and at what price in loss."""

from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import NamedTuple

from anabranch.tools.report.chart import Chart, axis, curve, hover_text, layout, marker, plotly_text
from anabranch.tools.report.documents import BASELINE, COMPUTE, Benchmark, BenchmarkRow, DemoDocument, DemoTraining
from anabranch.tools.report.formatting import signed_percent, size, time_scale
from anabranch.tools.report.tables import Cell, Table, number

AVERAGED_STEPS = 10  # of a loss: batches differ more than trainings
SAME_LOSS = 0.01  # relative difference up to which the headline prefers the fastest
LOSS_PX = 430


class GainRow(NamedTuple):
    """A training compared with DDP's: how many times as fast, whether by more than noise, its price in loss."""

    name: str
    speedup: float
    faster: bool
    loss: float
    price: float


def smoothed(losses: Sequence[float]) -> list[float]:
    """At each step the mean of the last ``AVERAGED_STEPS`` losses, or of fewer at the beginning."""
    return [fmean(losses[max(0, at + 1 - AVERAGED_STEPS) : at + 1]) for at in range(len(losses))]


def compared_steps(found: DemoDocument) -> int:
    """The number of steps after which losses are compared: DDP's, or as many as every training has."""
    return min(len(training.losses) for training in found.trainings)


def compared_loss(found: DemoDocument, training: DemoTraining) -> float:
    """The smoothed loss after ``compared_steps``."""
    return smoothed(training.losses)[compared_steps(found) - 1]


def gain(found: DemoDocument, training: DemoTraining) -> GainRow:
    """One training compared with DDP's."""
    base = compared_loss(found, found.training(BASELINE))
    row, loss = found.benchmark.row(training.name), compared_loss(found, training)
    price = loss / base - 1 if base > 0 else 0.0
    return GainRow(training.name, 1 / found.benchmark.ratio_to_ddp(row), found.benchmark.is_faster(row), loss, price)


def best_gain(found: DemoDocument) -> GainRow | None:
    """The fastest training of those that cost no loss, or of all that are faster; None where none is."""
    gains = [gain(found, training) for training in found.trainings if training.name != BASELINE]
    fast = [one for one in gains if one.faster]
    return max([one for one in fast if one.price <= SAME_LOSS] or fast, key=lambda one: one.speedup, default=None)


def exposed_share(benchmark: Benchmark, row: BenchmarkRow) -> float:
    """The share of a step that computing alone does not take."""
    return max(0.0, 1 - benchmark.row(COMPUTE).step_s / row.step_s)


def reached(found: DemoDocument) -> list[tuple[DemoTraining, float | None]]:
    """When each training reached the loss at which DDP ended, the earliest first; None for those that did not."""
    target = compared_loss(found, found.training(BASELINE))
    at_s: list[tuple[DemoTraining, float | None]] = []
    for one in found.trainings:
        pairs = zip(smoothed(one.losses), one.elapsed_s, strict=True)
        at_s.append((one, next((elapsed_s for loss, elapsed_s in pairs if loss <= target), None)))
    return sorted(at_s, key=lambda pair: inf if pair[1] is None else pair[1])


SENTENCES = (gain, best_gain, compared_steps, exposed_share, reached)


def demo_table(found: DemoDocument) -> Table:
    """Every training: its step, its loss, when it reached DDP's, and what it keeps in memory."""
    benchmark, steps = found.benchmark, compared_steps(found)
    scale = time_scale(row.step_s for row in benchmark.rows)
    at_s = {training.name: at_s for training, at_s in reached(found)}
    headers = ["trained as", f"step\n{scale.unit}", "step /\nDDP", f"predicted\n{scale.unit}",
               f"loss at\nstep {steps:,}", "loss /\nDDP", "DDP's\nat, s", "memory", "residuals"]  # fmt: skip
    rows = []
    for training in found.trainings:
        row, gained = benchmark.row(training.name), gain(found, training)
        rows.append([
            Cell(training.name), number(row.step_s, scale), number(benchmark.ratio_to_ddp(row), "{:.2f}".format, 1.0),
            number(row.predicted_s, scale), number(gained.loss, "{:.3f}".format), number(gained.price, signed_percent),
            number(at_s[training.name], "{:.1f}".format), number(sum(training.memory.values()), size),
            number(training.memory.get("residuals") or None, size),
        ])  # fmt: skip
    caption = (
        "Step: from the start of forward to averaged gradients, in turns, medians; step / DDP: median of the ratios in "
        f"the same round. Loss: mean of {AVERAGED_STEPS} steps. DDP's at: when it reached the loss at which DDP ended, "
        "searching included. Memory of a rank: parameters, gradients, optimizer, residuals. Ok-Topk warms up for few "
        "steps here; its default of 100 costs less in loss."
    )
    return Table(f"{found.parameters:,} parameters, {benchmark.ranks} ranks; {found.link}", headers, rows, caption)


def loss_chart(key: str, found: DemoDocument) -> Chart:
    """The smoothed losses over time; the dotted line is where DDP ended."""
    data = []
    for index, training in enumerate(found.trainings):
        values = smoothed(training.losses)
        hovers = [
            hover_text(f"<b>{plotly_text(training.name)}</b>", f"step {step:,}, {at_s:.1f} s: loss {value:.3f}")
            for step, (at_s, value) in enumerate(zip(training.elapsed_s, values, strict=True), start=1)
        ]
        ends = {**marker(index), "size": [0] * (len(values) - 1) + [9]}
        data.append(curve(training.name, training.elapsed_s, values, hovers, index, marker=ends))
    target = compared_loss(found, found.training(BASELINE))
    dotted = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target,
              "line": {"color": "--soft", "width": 1, "dash": "dot"}}  # fmt: skip
    caption = (
        f"At each step the mean over the ranks and the last {AVERAGED_STEPS} steps. The dotted line is where DDP "
        "ended, after fewer steps than the compressed trainings. Where a curve is flat near its start, the network is "
        "being measured, during one step: searching costs a few seconds once, which is much of so short a training."
    )
    x = axis("seconds since the training began, searching included", rangemode="tozero")
    shape = layout(x, axis("loss", nticks=7), shapes=[dotted])
    label = "Loss against wall-clock time for every training"
    return Chart(key, label, data, shape, LOSS_PX, caption, one_curve_at_a_time=True)
