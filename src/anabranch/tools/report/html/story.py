"""The demo as a story: is the network the limit, what does a plan gain, what does sending less gain and cost, where."""

from collections.abc import Sequence
from dataclasses import replace

from anabranch.tools.report.demo import (
    AVERAGED_STEPS,
    compared_loss,
    compared_steps,
    compressed,
    dense_plan,
    exposed_share,
    fast_links,
    gain,
    is_limited,
    network_limit,
    reached_s,
    smoothed,
)
from anabranch.tools.report.documents import BASELINE, COMPUTE, Benchmark, BenchmarkRow, DemoDocument, DemoTraining
from anabranch.tools.report.formatting import factor, percent, seconds, signed_percent, size, time_scale
from anabranch.tools.report.html.bars import Bars, bar_chart
from anabranch.tools.report.html.chart import Chart, Series, line, marker
from anabranch.tools.report.html.elements import BulletList, Cell, Part, Section, Table, Tile, Verbatim
from anabranch.tools.report.html.escaping import hover_text, plotly_text
from anabranch.tools.report.html.tables import NONE, benchmark_table

LOSS_PX = 430


def story(found: DemoDocument) -> list[Section]:
    """The sections, without numbers; those that the demo measured."""
    sections = [_limit(found)]
    if found.replayed is not None:
        sections.append(_dense(found.replayed))
    sections.append(_compressed(found))
    if found.fast is not None:
        sections.append(_fast(found, found.fast))
    return sections


def story_tiles(found: DemoDocument) -> list[Tile]:
    """Every way in short."""
    tiles = []
    for training in found.trainings:
        row, beside = found.benchmark.row(training.name), gain(found, training)
        note = (
            f"{percent(exposed_share(found.benchmark, row))} of it exposed"
            if training.name == BASELINE
            else f"{factor(beside.speedup)} as fast as DDP, loss {signed_percent(beside.price)}"
        )
        tiles.append(Tile(f"Step, {training.name}", seconds(row.step_s), note))
    return tiles


def _limit(found: DemoDocument) -> Section:
    """Picture 1: every step as computing and what comes on top of it."""
    benchmark = found.benchmark
    rows = [benchmark.row(training.name) for training in found.trainings]
    scale = time_scale(row.step_s for row in rows)
    compute_s = benchmark.row(COMPUTE).step_s
    computing = [min(row.step_s, compute_s) for row in rows]
    exposed = [row.step_s - alone_s for row, alone_s in zip(rows, computing, strict=True)]
    kinds = [
        Bars("computing", "--compute", "", [at_s * scale.per_second for at_s in computing], [""] * len(rows),
             [f"computing: {seconds(at_s)}" for at_s in computing]),
        Bars("communication, exposed", "--exposed", "/", [at_s * scale.per_second for at_s in exposed],
             [f"{row.step_s * scale.per_second:.3g} {scale.unit}" for row in rows],
             [hover_text(f"<b>{plotly_text(row.name)}</b>: step {seconds(row.step_s)}",
                         f"exposed: {seconds(at_s)}, {percent(exposed_share(benchmark, row))} of the step")
              for row, at_s in zip(rows, exposed, strict=True)]),
    ]  # fmt: skip
    caption = (
        "Medians of steps in turns, from the start of forward to averaged gradients. Computing: forward and backward "
        "alone, without any other rank. Exposed: the rest of the step, whether it sends, compresses or waits."
    )
    chart = bar_chart(
        "story-limit", "Every step: computing and exposed communication", [row.name for row in rows], kinds,
        f"{scale.unit} a step", caption, stacked=True,
    )  # fmt: skip
    limited = is_limited(benchmark)
    title = "Your network is the limit" if limited else "The network is not the limit here"
    return Section("story-limit-section", title, f"{network_limit(found)} The links: {found.link}.", [chart])


def _dense(replayed: Benchmark) -> Section:
    """Picture 2: measured steps beside predicted ones."""
    rows = replayed.rows
    scale = time_scale(row.step_s for row in rows)
    kinds = [
        Bars("measured", "--wire", "", *_bar(rows, [row.step_s for row in rows], "measured")),
        Bars("predicted", "--gather", ".", *_bar(rows, [row.predicted_s for row in rows], "predicted")),
    ]
    caption = (
        f"{replayed.model}, {replayed.ranks} ranks, {replayed.network}. It sleeps where the recorded model "
        "computed, and sends real gradients of its sizes. DataParallel runs the plan that is best on the network as "
        "measured."
    )
    chart = bar_chart(
        "story-dense", "Steps of DDP and of a dense plan, measured and predicted", [row.name for row in rows], kinds,
        f"{scale.unit} a step", caption,
    )  # fmt: skip
    about = (
        "Which gradients travel together, and when, matters most where the network just about keeps up with backward. "
        f"{dense_plan(replayed)} Where messages take longer than all of backward, no plan can hide them."
    )
    parts: list[Part] = [chart, Verbatim("Output of model.explain() for the plan", replayed.explanation)]
    return Section("story-dense-section", "A dense plan, predicted beside measured", about, parts)


def _bar(
    rows: Sequence[BenchmarkRow], values_s: Sequence[float | None], what: str
) -> tuple[list[float | None], list[str], list[str]]:
    """Values, texts and hover texts of one kind of bar; None where nothing is known."""
    scale = time_scale(row.step_s for row in rows)
    texts = ["" if at_s is None else f"{at_s * scale.per_second:.3g} {scale.unit}" for at_s in values_s]
    hovers = [
        hover_text(f"<b>{plotly_text(row.name)}</b>, {what}: {text}") for row, text in zip(rows, texts, strict=True)
    ]
    return [None if at_s is None else at_s * scale.per_second for at_s in values_s], texts, hovers


def _compressed(found: DemoDocument) -> Section:
    """Picture 3: losses over time, and everything about each way in a table."""
    chosen = [f"{one.name}, {one.code}: {one.chosen}" for one in found.trainings if one.chosen]
    parts: list[Part] = [_loss_chart(found), _table(found), BulletList("What was chosen, and why", chosen)]
    parts += [
        Verbatim(f"Output of model.explain(), {training.name}", training.explanation)
        for training in found.trainings
        if training.explanation
    ]
    about = f"The same weights and the same batches in every way. {compressed(found)}"
    return Section("story-loss-section", "Compressed: loss beside time", about, parts)


def _loss_chart(found: DemoDocument) -> Chart:
    data = [_loss_curve(training, index) for index, training in enumerate(found.trainings)]
    target = compared_loss(found, found.training(BASELINE))
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "seconds since the training began, searching included"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "loss"}, "nticks": 7},
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target,
                    "line": {"color": "--soft", "width": 1, "dash": "dot"}}],
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    caption = (
        f"At each step the mean over the ranks and the last {AVERAGED_STEPS} steps. The dotted line is where DDP "
        "ended, after fewer steps than the compressed ways. Where a curve is flat near its start, the network is being "
        "measured, during one step: searching costs a few seconds once, which is much of a training as short as this."
    )
    label = "Loss against wall-clock time for every way to train"
    return Chart(
        "story-loss", label, data, layout, LOSS_PX, caption, list(range(len(data))), one_curve_at_a_time=True
    )  # fmt: skip


def _loss_curve(training: DemoTraining, index: int) -> Series:
    values = smoothed(training.losses)
    hovers = [
        hover_text(f"<b>{plotly_text(training.name)}</b>", f"step {step:,}, {at_s:.1f} s: loss {value:.3f}")
        for step, (at_s, value) in enumerate(zip(training.elapsed_s, values, strict=True), start=1)
    ]
    last = len(values) - 1
    return {
        "type": "scatter", "mode": "lines+markers", "name": plotly_text(training.name), "x": list(training.elapsed_s),
        "y": values, "line": line(index), "customdata": hovers, "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {**marker(index), "size": [9 if at == last else 0 for at in range(len(values))]},
    }  # fmt: skip


def _table(found: DemoDocument) -> Table:
    benchmark, steps = found.benchmark, compared_steps(found)
    target = compared_loss(found, found.training(BASELINE))
    scale = time_scale(row.step_s for row in benchmark.rows)
    headers = ["trained as", f"step, {scale.unit}", "step / DDP", "predicted", "error",
               f"loss, step {steps:,}", "loss / DDP", "DDP's at, s", "memory", "residuals"]  # fmt: skip
    rows = []
    for training in found.trainings:
        row, beside, at_s = benchmark.row(training.name), gain(found, training), reached_s(training, target)
        ratio, error, residuals = benchmark.ratio_to_ddp(row), row.prediction_error, training.memory.get("residuals", 0)
        memory = sum(training.memory.values())
        rows.append([
            Cell(training.name), Cell(scale(row.step_s), row.step_s), Cell(f"{ratio:.2f}", ratio, ratio),
            NONE if row.predicted_s is None else Cell(scale(row.predicted_s), row.predicted_s),
            NONE if error is None else Cell(signed_percent(error), error), Cell(f"{beside.loss:.3f}", beside.loss),
            Cell(signed_percent(beside.price), beside.price),
            NONE if at_s is None else Cell(f"{at_s:.1f}", at_s), Cell(size(memory), memory),
            Cell(size(residuals) if residuals else "–", residuals),
        ])  # fmt: skip
    title = f"{found.parameters:,} parameters, {benchmark.ranks} ranks, {found.link}"
    caption = (
        "Step: median of turns; step / DDP: median of the ratios in the same round. Loss: mean of the last "
        f"{AVERAGED_STEPS} steps. DDP's at: seconds until it had the loss at which DDP ended, searching included. "
        "Memory: parameters, gradients, optimizer and residuals of a rank. Ok-Topk warms up for few steps "
        f"here; its default of 100 costs less in loss. Measured on {'; '.join(benchmark.facts.values())}."
    )
    return Table(title, headers, rows, caption)


def _fast(found: DemoDocument, fast: Benchmark) -> Section:
    """Picture 4: the same ways as shares of DDP's step on both links."""
    slow = found.benchmark
    names = [row.name for row in fast.rows if row.name not in (COMPUTE, BASELINE)]
    kinds = []
    looks = (("slow links", slow, "--exposed", "/"), ("fast links", fast, "--wire", ""))
    for title, benchmark, colour, shape in looks:
        rows = [benchmark.row(name) for name in names]
        ratios = [benchmark.ratio_to_ddp(row) for row in rows]
        hovers = [
            hover_text(f"<b>{plotly_text(row.name)}</b>, {title}: {plotly_text(benchmark.network)}",
                       f"{seconds(row.step_s)}, DDP {seconds(benchmark.row(BASELINE).step_s)}")
            for row in rows
        ]  # fmt: skip
        kinds.append(Bars(title, colour, shape, ratios, [f"{ratio:.2f}" for ratio in ratios], hovers))
    chart = bar_chart(
        "story-fast", "Steps as shares of DDP's, on slow and on fast links", names, kinds,
        "step / DDP's (below 1 is faster)",
        f"Slow: {slow.network}. Fast: {fast.network}. Medians of the ratios in the same round. Ways that "
        "DataParallel did not find to be faster run DDP's own buckets, and differ from DDP by the noise of this "
        "machine and by what watching costs.",
    )  # fmt: skip
    chart.layout["shapes"] = [{"type": "line", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1,
                               "line": {"color": "--ink", "width": 1.5, "dash": "dot"}}]  # fmt: skip
    parts: list[Part] = [chart, replace(benchmark_table(fast), best=None)]  # by noise, where nothing is gained
    return Section("story-fast-section", "What happens on a fast link", fast_links(found, fast), parts)
