"""The sections of the page, in order: charts, tables and text for everything that was read."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from anabranch.tools.report.formatting import count, percent, seconds
from anabranch.tools.report.html.elements import BulletList, Cell, Part, Section, Table, Tile, Verbatim
from anabranch.tools.report.html.escaping import shortened
from anabranch.tools.report.html.memory_chart import memory_chart
from anabranch.tools.report.html.scaling_chart import MAX_NETWORKS, network_chart, scaling_charts
from anabranch.tools.report.html.step_chart import step_chart
from anabranch.tools.report.html.step_view import StepView
from anabranch.tools.report.html.story import story, story_tiles
from anabranch.tools.report.html.tables import (
    benchmark_table,
    bucket_table,
    comparison_table,
    memory_table,
    stage_table,
)  # fmt: skip
from anabranch.tools.report.html.training_chart import training_chart
from anabranch.tools.report.runs.reading import Runs

MAX_CHARTS = 6  # of one kind
YOUR_OWN = "For your own model: anabranch record, then anabranch scale --trace, and your network by --network."
STEP_KEYS = "To zoom, drag or press + and −. For details of a bar, point at it or press ← and →."


def sections(runs: Runs, steps: Sequence[StepView]) -> tuple[list[Tile], list[Section]]:
    """The tiles at the top of the page, and every section that is not empty."""
    told = _told(runs)
    found = [
        *told, _plan(steps, runs), _timelines(steps), _training(runs), _comparison(runs),
        *([] if told else [_scaling(runs)]), _memory(runs), _networks(runs), _files(runs),
    ]  # fmt: skip
    return _tiles(steps, runs), [section for section in found if section.parts]


def _told(runs: Runs) -> list[Section]:
    """The story of a demo, which ends with scaling, in numbered sections; nothing without a demo."""
    if not runs.demos:
        return []
    _, demo = runs.demos[0]
    told = story(demo)
    if len(runs.demos) > 1:
        told[0] = replace(told[0], about=f"{told[0].about} The first of {len(runs.demos)} demos is shown.")
    if runs.scalings:
        scaling = _scaling(runs)
        told.append(replace(scaling, title="At your size", about=f"{scaling.about} {YOUR_OWN}"))
    return [replace(section, title=f"{number}. {section.title}") for number, section in enumerate(told, start=1)]


def _tiles(steps: Sequence[StepView], runs: Runs) -> list[Tile]:
    tiles: list[Tile] = []
    if runs.demos:
        return story_tiles(runs.demos[0][1])
    predicted = next((view for view in steps if not view.measured), None)
    measured = next((view for view in steps if view.measured), None)
    for view, word in ((predicted, "predicted"), (measured, "measured")):
        if view is not None:
            timeline = view.timeline
            note = _prediction_error(predicted, measured) if view is measured else ""
            tiles.append(Tile(f"Step, {word}", seconds(timeline.iteration_s), note))
            share = percent(timeline.exposed_s / timeline.iteration_s) if timeline.iteration_s > 0 else ""
            tiles.append(Tile(f"Exposed communication, {word}", seconds(timeline.exposed_s), f"{share} of this step"))
    if predicted is not None and predicted.buckets:
        lanes = 1 + max(bucket.lane for bucket in predicted.buckets.values())
        tiles.append(Tile("Plan", count(len(predicted.buckets), "bucket"), f"on {count(lanes, 'lane')}"))
    timed = next((run for run in runs.trainings if run.lines[-1].measured_s is not None), None)
    if timed is not None:
        late = [at.measured_s or 0.0 for at in timed.lines[-max(1, len(timed.lines) // 4) :]]
        tiles.append(
            Tile("Training", count(len(timed.lines), "step"), f"median of the last quarter {seconds(median(late))}")
        )
    learned = next((run for run in runs.trainings if run.lines[-1].loss is not None), None)
    if learned is not None:
        first, last = learned.lines[0].loss, learned.lines[-1].loss
        began = f"from {first:.4g} at step {learned.lines[0].step:,}" if first is not None else ""
        tiles.append(Tile("Loss", f"{last:.4g}", began))
    for _, found in runs.comparisons[:1]:
        winner = next((row for row in found.rows if row.name == found.best), None)
        if winner is not None and winner.speedup is not None:
            of = f" for {shortened(found.trace, 32)}" if found.trace else ""
            tiles.append(Tile("Best planner", found.best, f"{winner.speedup:.2f}× DDP's default, predicted{of}"))
    return tiles


def _prediction_error(predicted: StepView | None, measured: StepView | None) -> str:
    which = "one step of one rank"
    if predicted is None or measured is None or measured.timeline.iteration_s <= 0:
        return which
    error = predicted.timeline.iteration_s / measured.timeline.iteration_s - 1
    return f"{which}; prediction error {error:+.1%}"


def _plan(steps: Sequence[StepView], runs: Runs) -> Section:
    parts: list[Part] = []
    planned = [view for view in steps if view.buckets]
    # Without a prediction, the plan is drawn as it was measured.
    predicted = [view for view in planned if not view.measured]
    charted = predicted[:MAX_CHARTS] or planned[:1]
    for number, view in enumerate(charted):
        caption = (
            f"{view.title}. The numbers in the bars are buckets in launch order; the dotted line is the end of "
            f"backward. {STEP_KEYS}"
        )
        label = f"The plan as a chart: {view.title}, {'measured' if view.measured else 'predicted'}"
        parts += [step_chart(f"plan-{number}", label, [view], caption, gradients=True), bucket_table(view)]
    drawn_buckets = [tuple(view.buckets.values()) for view in charted]
    for name, plan in runs.plans:
        if plan.buckets not in drawn_buckets:
            rows = [
                [Cell(str(at), at), Cell(str(b.lane), b.lane), Cell(b.collective), Cell(", ".join(b.names))]
                for at, b in enumerate(plan.buckets)
            ]
            note = "For a chart, also give the trace and the network that the plan was made for."
            parts.append(Table(name, ["bucket", "lane", "collective", "gradients"], rows, note))
    about = (
        "Gradients become ready during backward, are collected in buckets, and each bucket is sent as one message on a "
        "lane (a process group). Communication that no computation hides is exposed: it makes the step longer."
    ) + _drawn_of(predicted, "plans")
    return Section("plan", "The plan", about, parts)


def _timelines(steps: Sequence[StepView]) -> Section:
    both = any(view.measured for view in steps)
    predicted, measured = ([view for view in steps if view.measured == seen] for seen in (False, True))
    shown = predicted[:MAX_CHARTS] + measured[:MAX_CHARTS]
    parts = [step_chart("timelines", "Predicted and measured steps on one axis", shown, STEP_KEYS)] if both else []
    about = "The simulator's prediction of a step, and the step as one rank measured it. Untimed buckets have no bar."
    about += "".join(
        f" {view.title} waits {seconds(waited_s)} for rank {rank}."
        for view in measured[:MAX_CHARTS]
        for rank, waited_s in view.waited_s.items()
    )
    about += _drawn_of(predicted, "predicted steps") + _drawn_of(measured, "measured steps")
    return Section("timelines", "Predicted and measured", about, parts)


def _training(runs: Runs) -> Section:
    chart = training_chart(runs.trainings)
    stages = [table for run in runs.trainings[:MAX_CHARTS] if (table := stage_table(run)) is not None]
    return Section("training", "The training", "", [*([chart] if chart else []), *stages])


def _comparison(runs: Runs) -> Section:
    parts: list[Part] = [comparison_table(found) for _, found in runs.comparisons]
    for _, bench in runs.benches:
        for benchmark in bench.benchmarks:
            parts += [
                benchmark_table(benchmark),
                Verbatim(f"Output of model.explain() ({benchmark.model})", benchmark.explanation),
            ]
    return Section("comparison", "Comparison", "Click on the name of a column to sort by it.", parts)


def _scaling(runs: Runs) -> Section:
    parts: list[Part] = []
    for at, (_, found) in enumerate(runs.scalings):
        if found.answer:
            parts.append(BulletList(f"Which strategy wins where: {found.model}", found.answer))
        parts += scaling_charts(f"scaling-{at}", found)
        words = [f"• {words}" for words in found.assumptions]
        for used in found.networks:
            words += [f"• {used.name} costs: {used.source}", f"  {used.name} band: {used.spread}"]
            words += [f"  {used.name} at other sizes: {used.extrapolation}"]
        parts.append(Verbatim("Assumptions and sources of the network costs", "\n".join(words)))
    models = dict.fromkeys(found.model for _, found in runs.scalings)
    about = f"Predicted for {', '.join(models)}. Click on a name in a legend to hide its line."
    if any(len(found.networks) > MAX_NETWORKS for _, found in runs.scalings):
        about += f" Of each sweep, the first {MAX_NETWORKS} networks are drawn."
    return Section("scaling", "Scaling", about, parts)


def _memory(runs: Runs) -> Section:
    parts: list[Part] = []
    for at, (_, found) in enumerate(runs.memories):
        parts += [memory_chart(f"memory-{at}", found), memory_table(found)]
    models = dict.fromkeys(f"{m.model}, batch {m.batch_size}, {m.optimizer}" for _, m in runs.memories)
    return Section("memory", "Memory", f"Predicted peak memory of a rank within a step: {'; '.join(models)}.", parts)


def _networks(runs: Runs) -> Section:
    parts = [network_chart(f"network-{at}", network) for at, (_, network) in enumerate(runs.networks[:MAX_CHARTS])]
    ranks = ", ".join(f"{name} ({count(network.world_size, 'rank')})" for name, network in runs.networks)
    about = f"Time of one collective by message size, with no other message under way: {ranks}."
    return Section("network", "Network", about + _drawn_of(runs.networks, "networks"), parts)


def _drawn_of(found: Sequence[object], what: str) -> str:
    """A sentence on how many are drawn, where not all are."""
    return f" The first {MAX_CHARTS} of {len(found)} {what} are drawn." if len(found) > MAX_CHARTS else ""


def _files(runs: Runs) -> Section:
    rows = [[Cell(name), Cell(kind)] for name, kind in runs.files]
    caption = "".join(f"Skipped: {reason}. " for reason in runs.skipped)
    return Section("files", "Files", "", [Table("Files read", ["file", "content"], rows, caption, folded=False)])
