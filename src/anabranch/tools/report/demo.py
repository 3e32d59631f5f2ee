"""What the demo's measurements come to: how much faster, at what price in loss, and where nothing is gained."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.report.chart import Chart, axis, curve, hover_text, layout, marker, plotly_text
from anabranch.tools.report.documents import (
    BASELINE,
    COMPUTE,
    LEAST_GAIN,
    OURS,
    Benchmark,
    BenchmarkRow,
    DemoDocument,
    DemoTraining,
)
from anabranch.tools.report.formatting import count, factor, percent, plain, seconds, signed_percent, size, time_scale
from anabranch.tools.report.tables import Cell, Table, number, terminal

AVERAGED_STEPS = 10  # of a loss: batches differ more than ways to train
SAME_LOSS = 0.01  # relative difference up to which the headline prefers the fastest
LIMIT = 0.5  # share of DDP's step from which the network is called the limit
LOSS_PX = 430


@dataclass(frozen=True, slots=True)
class Gain:
    """A training compared with DDP's: its last loss, how many times as fast its step is, its relative price in loss.

    ``faster``: whether it is so by more than noise.
    """

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


def reached_s(training: DemoTraining, loss: float) -> float | None:
    """Seconds from the start until the smoothed loss was this low; None if it never was."""
    pairs = zip(smoothed(training.losses), training.elapsed_s, strict=True)
    return next((at_s for value, at_s in pairs if value <= loss), None)


def gain(found: DemoDocument, training: DemoTraining) -> Gain:
    """One training compared with DDP's."""
    base = compared_loss(found, found.training(BASELINE))
    row, loss = found.benchmark.row(training.name), compared_loss(found, training)
    price = loss / base - 1 if base > 0 else 0.0
    return Gain(training.name, 1 / found.benchmark.ratio_to_ddp(row), found.benchmark.is_faster(row), loss, price)


def headline(found: DemoDocument) -> str:
    """How much faster, at what price in loss; or that nothing is gained."""
    gains = [gain(found, training) for training in found.trainings if training.name != BASELINE]
    fast = [one for one in gains if one.faster]
    if not fast:
        return f"Nothing is gained here: no training is faster than DDP's beyond the noise ({found.link})."
    best = max([one for one in fast if one.price <= SAME_LOSS] or fast, key=lambda one: one.speedup)
    steps, base = compared_steps(found), compared_loss(found, found.training(BASELINE))
    return (
        f"A step with {best.name} is {factor(best.speedup)} as fast as DDP's here; after {count(steps, 'step')} its "
        f"loss is {best.loss:.3f}, DDP's {base:.3f} ({signed_percent(best.price)})."
    )


def exposed_share(benchmark: Benchmark, row: BenchmarkRow) -> float:
    """The share of a step that computing alone does not take."""
    return max(0.0, 1 - benchmark.row(COMPUTE).step_s / row.step_s)


def is_limited(benchmark: Benchmark) -> bool:
    """Whether the network takes most of DDP's step."""
    return exposed_share(benchmark, benchmark.row(BASELINE)) >= LIMIT


def network_limit(found: DemoDocument) -> str:
    """How much of DDP's step the network takes."""
    benchmark = found.benchmark
    base, alone = benchmark.row(BASELINE), benchmark.row(COMPUTE)
    words = (
        f"A step of DDP takes {seconds(base.step_s)}; computing alone takes {seconds(alone.step_s)}. The rest, "
        f"{percent(exposed_share(benchmark, base))} of the step, is exposed communication"
    )
    return words + (": your network is the limit." if is_limited(benchmark) else ": the network is not the limit here.")


def dense_plan(replayed: Benchmark) -> str:
    """What a plan gains that sends every gradient in full, predicted and measured."""
    row, base = replayed.row(OURS), replayed.row(BASELINE)
    words = f"DDP takes {seconds(base.step_s)} a step, DataParallel {seconds(row.step_s)}"
    if row.predicted_s is not None and row.prediction_error is not None:
        error = signed_percent(row.prediction_error)
        words += f", and {seconds(row.predicted_s)} was predicted of it (error {error})"
    if replayed.is_faster(row):
        return words + f": {factor(1 / replayed.ratio_to_ddp(row))} as fast, with the same values sent."
    slower = replayed.ratio_to_ddp(row) > 1 + LEAST_GAIN
    return words + (": slower than DDP, this time." if slower else ": no difference beyond the noise.")


def compressed(found: DemoDocument) -> str:
    """When each training reached the loss at which DDP ended, searching included; the earliest first."""
    target = compared_loss(found, found.training(BASELINE))
    reached = {one.name: reached_s(one, target) for one in found.trainings}
    words = [
        f"{name} after {at_s:.1f} s"
        if at_s is not None
        else f"{name} not within its {len(found.training(name).losses):,} steps"
        for name, at_s in sorted(reached.items(), key=lambda pair: inf if pair[1] is None else pair[1])
    ]
    return f"The loss at which DDP ended, {target:.3f}, was reached, searching included, by {'; '.join(words)}."


def fast_links(found: DemoDocument, fast: Benchmark) -> str:
    """Whether sending less still pays where the network is no limit."""
    compute_s, base = fast.row(COMPUTE).step_s, fast.row(BASELINE)
    rows = [row for row in fast.rows if row.name not in (COMPUTE, BASELINE)]
    won = [row for row in rows if fast.is_faster(row)]
    steps = "; ".join(f"{row.name} takes {fast.ratio_to_ddp(row):.2f} of that" for row in rows)
    words = f"DDP takes {seconds(base.step_s)} a step there, computing alone {seconds(compute_s)}; {steps}."
    if kept := [row.name for row in rows if row.buckets is None]:
        words += (
            f" With {', '.join(kept)} nothing faster than DDP's own buckets was found, so those run: what differs from "
            "1 is the noise of this machine, and what watching costs."
        )
    if not won:
        return f"{words} Nothing is gained: on links as fast as these, leave DDP as it is."
    slow = found.benchmark
    less = all(fast.ratio_to_ddp(row) > slow.ratio_to_ddp(slow.row(row.name)) for row in won)
    return f"{words} " + ("Less is gained than on the slow links." if less else "It gains there, too.")


def demo_table(found: DemoDocument) -> Table:
    """Every training: its step, its loss, when it reached DDP's, and what it keeps in memory."""
    benchmark, steps = found.benchmark, compared_steps(found)
    target = compared_loss(found, found.training(BASELINE))
    scale = time_scale(row.step_s for row in benchmark.rows)
    headers = ["trained as", f"step\n{scale.unit}", "step /\nDDP", f"predicted\n{scale.unit}",
               f"loss at\nstep {steps:,}", "loss /\nDDP", "DDP's\nat, s", "memory", "residuals"]  # fmt: skip
    rows = []
    for training in found.trainings:
        row, gained, ratio = benchmark.row(training.name), gain(found, training), found.benchmark.ratio_to_ddp
        rows.append([
            Cell(training.name), number(row.step_s, scale), number(ratio(row), "{:.2f}".format, 1.0),
            number(row.predicted_s, scale), number(gained.loss, "{:.3f}".format), number(gained.price, signed_percent),
            number(reached_s(training, target), "{:.1f}".format), number(sum(training.memory.values()), size),
            number(training.memory.get("residuals") or None, size),
        ])  # fmt: skip
    caption = (
        "Step: from the start of forward to averaged gradients, in turns, medians; step / DDP: median of the ratios in "
        f"the same round. Loss: mean of {AVERAGED_STEPS} steps. DDP's at: when it reached the loss at which DDP ended, "
        "searching included. Memory of a rank: parameters, gradients, optimizer, residuals. Ok-Topk warms up for few "
        "steps here; its default of 100 costs less in loss."
    )
    title = f"{found.parameters:,} parameters, {benchmark.ranks} ranks; {found.link}"
    return Table(title, headers, rows, caption)


def demo_report(found: DemoDocument) -> RenderableType:
    """The terminal's summary: the table, what was chosen, and what it means."""
    chosen = [Text(f"{one.name}: {plain(one.chosen)}") for one in found.trainings if one.chosen]
    words = [headline(found), network_limit(found), compressed(found)]
    if found.replayed is not None:
        replayed = found.replayed
        words.append(f"A dense plan ({replayed.model}, {replayed.network}): {dense_plan(replayed)}")
    if found.fast is not None:
        words.append(f"On faster links ({found.fast.network}): {fast_links(found, found.fast)}")
    heading = Text("What was chosen:", style="bold")
    return Group(terminal(demo_table(found)), Text(), heading, *chosen, Text(), *(Text(plain(line)) for line in words))


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
    x = axis("seconds since the training began, searching included", rangemode="tozero")
    caption = (
        f"At each step the mean over the ranks and the last {AVERAGED_STEPS} steps. The dotted line is where DDP "
        "ended, after fewer steps than the compressed trainings. Where a curve is flat near its start, the network is "
        "being measured, during one step: searching costs a few seconds once, which is much of so short a training."
    )
    label = "Loss against wall-clock time for every training"
    shape = layout(x, axis("loss", nticks=7), shapes=[dotted])
    return Chart(key, label, data, shape, LOSS_PX, caption, one_curve_at_a_time=True)
