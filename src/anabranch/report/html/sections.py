"""What a report has to say, in which order: sections of charts, tables and words for whatever was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from anabranch.plan import Plan
from anabranch.report.formatting import count, percent, seconds
from anabranch.report.html.chart import Chart
from anabranch.report.html.elements import Answer, Cell, Table, Text, Tile
from anabranch.report.html.memory_chart import memory_chart
from anabranch.report.html.scaling_chart import MOST_NETWORKS, network_chart, scaling_charts
from anabranch.report.html.step_chart import step_chart
from anabranch.report.html.tables import (
    benchmark_table,
    bucket_table,
    comparison_table,
    demo_table,
    memory_table,
    stage_table,
)  # fmt: skip
from anabranch.report.html.training_chart import training_chart
from anabranch.report.html.views import View, views
from anabranch.report.html.words import shortened
from anabranch.report.runs.reading import Runs
from anabranch.timeline import Timeline
from anabranch.trace import Trace

MOST_PICTURES = 6  # of one kind
STEP_KEYS = "Drag, or press + and −, to zoom; point at a bar, or press ← and →, for what is in it."

Part = Chart | Table | Text | Answer
Predicted = tuple[str, Timeline, Plan, Trace]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a sentence, and what there is to see."""

    key: str
    title: str
    about: str
    parts: Sequence[Part]


def sections(runs: Runs, predicted: Sequence[Predicted]) -> tuple[list[Tile], list[Section]]:
    """The numbers to begin with, and every section that has something to show."""
    steps = views(runs, predicted)
    found = [
        _plan(steps, runs), _timelines(steps), _training(runs), _comparison(runs), _scaling(runs), _memory(runs),
        _networks(runs), _files(runs),
    ]  # fmt: skip
    return _tiles(steps, runs), [section for section in found if section.parts]


def _tiles(steps: Sequence[View], runs: Runs) -> list[Tile]:
    tiles: list[Tile] = []
    expected = next((view for view in steps if not view.measured), None)
    seen = next((view for view in steps if view.measured), None)
    for view, word in ((expected, "predicted"), (seen, "measured")):
        if view is not None:
            timeline = view.timeline
            tiles.append(
                Tile(f"Step, {word}", seconds(timeline.iteration_s), _seen(expected, seen) if view is seen else "")
            )
            share = percent(timeline.exposed_s / timeline.iteration_s) if timeline.iteration_s > 0 else ""
            tiles.append(
                Tile(
                    f"Exposed, {word}",
                    seconds(timeline.exposed_s),
                    f"{share} of {'that' if view is seen else 'the'} step",
                )
            )
    if expected is not None and expected.buckets:
        lanes = 1 + max(bucket.lane for bucket in expected.buckets.values())
        tiles.append(Tile("Plan", count(len(expected.buckets), "bucket"), f"on {count(lanes, 'lane')}"))
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


def _seen(expected: View | None, seen: View | None) -> str:
    one = "one step of one rank"
    if expected is None or seen is None or seen.timeline.iteration_s <= 0:
        return one
    return f"{one}; prediction off by {expected.timeline.iteration_s / seen.timeline.iteration_s - 1:+.1%}"


def _plan(steps: Sequence[View], runs: Runs) -> Section:
    parts: list[Part] = []
    planned = [view for view in steps if view.buckets]
    # Where nothing was predicted, as under a plan that was given, the plan is seen as it ran.
    predicted = [view for view in planned if not view.measured]
    pictured = predicted[:MOST_PICTURES] or planned[:1]
    for number, view in enumerate(pictured):
        caption = (
            f"{view.title}. Numbers are buckets in launch order; the dotted line is the end of backward. {STEP_KEYS}"
        )
        label = f"The plan as a picture: {view.title}, {'measured' if view.measured else 'predicted'}"
        parts += [step_chart(f"plan-{number}", label, [view], caption, gradients=True), bucket_table(view)]
    drawn_buckets = [tuple(view.buckets.values()) for view in pictured]
    for name, plan in runs.plans:
        if plan.buckets not in drawn_buckets:
            rows = [
                [Cell(str(at), at), Cell(str(b.lane), b.lane), Cell(b.collective), Cell(", ".join(b.names))]
                for at, b in enumerate(plan.buckets)
            ]
            note = "To see it as a picture, give the trace and the network that it was made for, too."
            parts.append(Table(name, ["bucket", "lane", "collective", "gradients"], rows, note))
    about = (
        "Gradients become ready as backward runs, gather in buckets, and travel on lanes. What travels while nothing "
        "computes is exposed: it makes the step longer."
    ) + left_out(predicted, "plans")
    return Section("plan", "The plan", about, parts)


def _timelines(steps: Sequence[View]) -> Section:
    both = any(view.measured for view in steps)
    predicted, measured = ([view for view in steps if view.measured == seen] for seen in (False, True))
    shown = predicted[:MOST_PICTURES] + measured[:MOST_PICTURES]
    parts = [step_chart("timelines", "Predicted and measured steps on one axis", shown, STEP_KEYS)] if both else []
    about = "A step as the simulator sees it, and one as a rank saw it. What nobody timed has no bar."
    about += left_out(predicted, "predicted steps") + left_out(measured, "measured steps")
    return Section("timelines", "Predicted and measured", about, parts)


def _training(runs: Runs) -> Section:
    chart = training_chart(runs.trainings)
    stages = [table for run in runs.trainings[:MOST_PICTURES] if (table := stage_table(run)) is not None]
    return Section("training", "The training", "", [*([chart] if chart else []), *stages])


def _comparison(runs: Runs) -> Section:
    parts: list[Part] = [comparison_table(found) for _, found in runs.comparisons]
    for _, bench in runs.benches:
        for benchmark in bench.benchmarks:
            parts += [
                benchmark_table(benchmark),
                Text(f"DataParallel's own words ({benchmark.model})", benchmark.explanation),
            ]
    for _, demo in runs.demos:
        parts += [demo_table(demo), Text("DataParallel's own words", "\n".join([demo.explanation, *demo.notes]))]
    return Section("comparison", "Comparison", "Press a column's name to sort by it.", parts)


def _scaling(runs: Runs) -> Section:
    parts: list[Part] = []
    for at, (_, found) in enumerate(runs.scalings):
        if found.answer:
            parts.append(Answer(f"Which strategy wins where: {found.model}", found.answer))
        parts += scaling_charts(f"scaling-{at}", found)
        words = [f"• {words}" for words in found.assumptions]
        for used in found.networks:
            words += [f"• {used.name} costs: {used.source}", f"  {used.name} band: {used.spread}"]
            words += [f"  {used.name} at other sizes: {used.extrapolation}"]
        parts.append(Text("What these numbers rest on", "\n".join(words)))
    models = dict.fromkeys(found.model for _, found in runs.scalings)
    about = f"Predicted for {', '.join(models)}, on more ranks than anyone has at hand. Press a name to hide its line."
    if any(len(found.networks) > MOST_NETWORKS for _, found in runs.scalings):
        about += f" Of each sweep, the first {MOST_NETWORKS} networks are drawn."
    return Section("scaling", "Scaling", about, parts)


def _memory(runs: Runs) -> Section:
    parts: list[Part] = []
    for at, (_, found) in enumerate(runs.memories):
        parts += [memory_chart(f"memory-{at}", found), memory_table(found)]
    models = dict.fromkeys(f"{m.model}, batch {m.batch_size}, {m.optimizer}" for _, m in runs.memories)
    return Section("memory", "Memory", f"At the peak of a step: {'; '.join(models)}.", parts)


def _networks(runs: Runs) -> Section:
    parts = [network_chart(f"network-{at}", network) for at, (_, network) in enumerate(runs.networks[:MOST_PICTURES])]
    ranks = ", ".join(f"{name} ({count(network.world_size, 'rank')})" for name, network in runs.networks)
    about = f"By size, each by itself: {ranks}.{left_out(runs.networks, 'networks')}"
    return Section("network", "Network", about, parts)


def left_out(found: Sequence[object], what: str) -> str:
    """What there is to say of more than are pictured."""
    return f" The first {MOST_PICTURES} of {len(found)} {what} are drawn." if len(found) > MOST_PICTURES else ""


def _files(runs: Runs) -> Section:
    rows = [[Cell(name), Cell(kind)] for name, kind in runs.files]
    caption = "".join(f"Left out: {reason}. " for reason in runs.left_out)
    return Section("files", "Files", "", [Table("Files read", ["file", "taken for"], rows, caption, folded=False)])
