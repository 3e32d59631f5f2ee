"""Training steps, predicted or measured, drawn over time: gradients, their buckets, messages hidden or exposed."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from anabranch.tools.predict.scaling.compression import about_sent, sent_nbytes
from anabranch.tools.report.chart import (
    Chart,
    Series,
    axis,
    bar_style,
    bars,
    hover_text,
    layout,
    name_lines,
    plotly_text,
    points,
    rows_axis,
)
from anabranch.tools.report.documents import PlanDocument, SimulateDocument
from anabranch.tools.report.formatting import Scale, count, seconds, size, time_scale
from anabranch.tools.report.runs import Runs
from anabranch.tools.report.tables import Cell, Table, number
from anabranch.tools.report.window import RankStep, Wait
from anabranch.values.errors import PlanError
from anabranch.values.plan import Bucket, Plan, bucket_label
from anabranch.values.timeline import COMPUTE, Interval, Span, Timeline, union
from anabranch.values.trace import TensorSpec, Trace

BUCKET_NUMBER = re.compile(r"bucket (\d{1,9})\b", re.ASCII)
Predicted = tuple[str, Timeline, Plan, Trace]  # a title, and a step that was simulated
MAX_RANKS = 4  # of a window; Perfetto shows more
ROW_PX, EDGE_PX, TITLE_ROWS = 38, 120, 0.9
MAX_EDGED = 100  # messages of a step; the bars of more are too narrow for an edge
SMALLEST = 1e-9  # of any unit, drawn as 0 below this: plotly draws no axis that ends below 1e-300
MAX_TICKS = 5000  # gradients with a mark each
# Kind of bar: name in the legend, colour, hatching; in the order of the legend.
KINDS: dict[str, tuple[str, str, str]] = {
    "forward": ("forward", "--quiet", ""),
    "backward": ("backward", "--compute", ""),
    "filling": ("bucket fills", "--gather", "."),
    "waiting": ("waiting for a slower rank", "--waiting", "x"),
    "hidden": ("communication, hidden", "--wire", ""),
    "exposed": ("communication, exposed", "--exposed", "/"),
}
MESSAGES = [KINDS[kind][0] for kind in ("waiting", "hidden", "exposed")]  # which the arrow keys go through


@dataclass(frozen=True)  # no slots: cached_property needs a __dict__
class StepView:
    """One step. ``buckets`` by the number in the names of spans; ``trace`` holds their gradients, where it is known."""

    title: str
    measured: bool
    timeline: Timeline
    buckets: Mapping[int, Bucket]
    trace: Trace | None = None
    waits: Mapping[str, Wait] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The gradients by name; empty without a trace."""
        return {tensor.name: tensor for tensor in self.trace.tensors} if self.trace is not None else {}

    def gradients(self, bucket: Bucket) -> list[TensorSpec] | None:
        """The gradients of a bucket; None where one of them is unknown."""
        known = [self.tensors[name] for name in bucket.names if name in self.tensors]
        return known if len(known) == len(bucket.names) else None

    @property
    def waited_s(self) -> dict[int, float]:
        """How long it waited for each of the ranks that it waited for."""
        found: dict[int, float] = {}
        for span in self.timeline.communication:
            if (wait := self.waits.get(span.name)) is not None:
                found[wait.rank] = found.get(wait.rank, 0.0) + min(wait.until_s, span.end_s) - span.start_s
        return found

    def sent_nbytes(self, bucket: Bucket) -> int | None:
        """What one rank sends for a bucket; None where the number of ranks, a gradient or the collective is unknown."""
        ranks, known = self.timeline.meta.get("world_size"), self.gradients(bucket)
        return sent_nbytes(bucket.collective, known, ranks) if isinstance(ranks, int) and ranks >= 1 and known else None

    def number(self, span: Span) -> int | None:
        """The number of the bucket that a span of a lane shows; None where its name has none."""
        found = BUCKET_NUMBER.match(span.name)
        return int(found[1]) if found else None


def step_views(runs: Runs, predicted: Sequence[Predicted]) -> list[StepView]:
    """Predicted steps, then measured ones; ``predicted`` are the steps that the caller simulated."""
    found = [
        StepView(title, False, timeline, dict(enumerate(plan.buckets if plan else ())), trace)
        for title, timeline, plan, trace in predicted
    ]
    found += [_predicted_view(name, step, runs) for name, step in runs.steps]
    for name, timeline in runs.timelines:
        plan, trace = _matching_plan(timeline, runs)
        measured = timeline.meta.get("source") != "simulated"
        found.append(StepView(name, measured, timeline, dict(enumerate(plan.buckets if plan else ())), trace))
    for name, ranks in runs.windows:
        found += [_rank_view(name, one) for one in ranks[:MAX_RANKS]]
    return sorted(found, key=lambda view: view.measured)


def plan_fits(plan: Plan, trace: Trace) -> bool:
    """Whether the plan has exactly the gradients of this trace."""
    try:
        plan.check(trace)
    except PlanError:
        return False
    return True


def _matching_plan(timeline: Timeline, runs: Runs) -> tuple[Plan | None, Trace | None]:
    """The plan and trace among the files that belong to a timeline, by the names of its spans."""
    names = {span.name for span in timeline.communication}
    for _, plan in runs.plans:
        labels = {bucket_label(number, bucket.collective, bucket.names) for number, bucket in enumerate(plan.buckets)}
        if names <= labels:
            return plan, next((trace for _, trace in runs.traces if plan_fits(plan, trace)), None)
    return None, None


def _predicted_view(name: str, step: PlanDocument | SimulateDocument, runs: Runs) -> StepView:
    """A step that the commands plan or simulate predicted."""
    spans = [Span(COMPUTE, "forward", -step.forward_s, 0.0), Span(COMPUTE, "backward", 0.0, step.backward_s)]
    spans += [Span(f"lane {row.lane}", f"bucket {row.index}", row.start_s, row.end_s) for row in step.buckets]
    buckets = {row.index: Bucket(row.names, row.lane, row.collective) for row in step.buckets if row.names}
    planned = {name for bucket in buckets.values() for name in bucket.names}
    trace = next((trace for _, trace in runs.traces if {t.name for t in trace.tensors} == planned), None)
    timeline = Timeline(tuple(spans), {"source": "simulated", "world_size": step.world_size})
    plan_name = step.planner or (step.plan if isinstance(step, SimulateDocument) else None) or "a plan"
    title = f"{name}: {plan_name} on {step.world_size:,} ranks"
    return StepView(title, False, timeline, buckets, trace)


def _rank_view(name: str, one: RankStep) -> StepView:
    buckets: dict[int, Bucket] = {}
    for label, names in one.tensors.items():
        number = BUCKET_NUMBER.match(label)
        if number and names:
            collective = label.partition(": ")[2].partition(",")[0] or "dense"
            buckets[int(number[1])] = Bucket(names, 0, collective)
    return StepView(f"{name}: step {one.step:,}, rank {one.rank}", True, one.timeline, buckets, waits=one.waits)


def bucket_table(view: StepView) -> Table:
    """All buckets with all their gradients, for which the chart has no room."""
    scale = time_scale(span.end_s for span in view.timeline.communication)
    spans = {at: span for span in view.timeline.communication if (at := view.number(span)) is not None}
    rows = []
    for at, bucket in view.buckets.items():
        known, span = view.gradients(bucket), spans.get(at)
        rows.append([
            number(at, str), number(bucket.lane, str), Cell(bucket.collective), number(len(bucket.names)),
            number(sum(tensor.nbytes for tensor in known) if known else None, size),
            number(view.sent_nbytes(bucket), size),
            number(max(tensor.ready_s for tensor in known) if known else None, scale),
            number(span.start_s if span else None, scale), number(span.end_s if span else None, scale),
            Cell(", ".join(bucket.names)),
        ])  # fmt: skip
    times = [f"{what}, {scale.unit}" for what in ("ready", "starts", "ends")]
    headers = ["bucket", "lane", "collective", "tensors", "size", "a rank sends", *times, "gradients"]
    title = f"All {count(len(rows), 'bucket')} with their gradients ({view.title})"
    caption = about_sent(bucket.collective for bucket in view.buckets.values())
    return Table(title, headers, rows, caption, folded=True)


def plan_table(name: str, plan: Plan) -> Table:
    """A plan without its trace and network."""
    rows = [
        [number(at, str), number(bucket.lane, str), Cell(bucket.collective), Cell(", ".join(bucket.names))]
        for at, bucket in enumerate(plan.buckets)
    ]
    note = "For a chart, also give the trace and the network that the plan was made for."
    return Table(name, ["bucket", "lane", "collective", "gradients"], rows, note)


# ------------------------------------------------------------------------------------------------------------- chart


class _Bar(NamedTuple):
    base: float
    length: float
    row: float
    inside: str
    hover: str


class _Drawing:
    """The rows of a chart from top to bottom, and the bars and marks on them; ``depth`` is the next free row."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.bars: dict[str, list[_Bar]] = {kind: [] for kind in KINDS}
        self.rows: list[tuple[float, str]] = []
        self.titles: list[dict[str, Any]] = []  # plotly's annotations
        self.ends: list[dict[str, Any]] = []  # of backward: plotly's shapes
        self.ticks: list[tuple[float, float, str]] = []
        self.depth = 0.0

    def row(self, label: str) -> float:
        """The next row."""
        self.rows.append((self.depth, label))
        self.depth += 1
        return self.depth - 1

    def title(self, text: str) -> None:
        """A title above the next row."""
        self.depth += TITLE_ROWS if self.rows else 0.2
        self.titles.append({
            "xref": "paper", "x": 0, "y": self.depth - 0.75, "yref": "y", "xanchor": "left", "yanchor": "middle",
            "showarrow": False, "text": f"<b>{plotly_text(text, 80)}</b>",
        })  # fmt: skip

    def end(self, at_s: float, top: float) -> None:
        """The end of backward, a line from row ``top`` down to here."""
        x, style = self.drawn(at_s), {"color": "--ink", "width": 1.5, "dash": "dot"}
        ends = {"x0": x, "x1": x, "y0": top - 0.5, "y1": self.depth - 0.5}
        self.ends.append({"type": "line", **ends, "line": style})

    def bar(self, kind: str, row: float, interval: Interval, inside: str, hover: str) -> None:
        """A bar with a text in it."""
        start, length = self.drawn(interval[0]), self.drawn(interval[1] - interval[0])
        self.bars[kind].append(_Bar(start, length, row, inside, hover))

    def drawn(self, at_s: float) -> float:
        """A time in the unit of the chart, with seven digits."""
        value = at_s * self.scale.per_second
        return float(f"{value:.7g}") if abs(value) > SMALLEST else 0.0


def step_chart(key: str, label: str, steps: Sequence[StepView], caption: str, gradients: bool = False) -> Chart:
    """Steps one above the other on one time axis; several steps have a title each.

    With ``gradients``, rows show when gradients become ready and buckets fill, for steps whose trace is known.
    """
    drawing = _Drawing(time_scale(view.timeline.iteration_s for view in steps))
    for view in steps:
        if len(steps) > 1:
            drawing.title(f"{'Measured' if view.measured else 'Predicted'}: {view.title}")
        _draw(drawing, view, gradients)
    edged = all(len(view.timeline.communication) <= MAX_EDGED for view in steps)
    data = [_series(kind, drawn, edged) for kind, drawn in drawing.bars.items() if drawn]
    keys = [at for at, series in enumerate(data) if series["name"] in MESSAGES]
    if drawing.ticks:
        x, rows, hovers = zip(*drawing.ticks, strict=True)
        style = {"symbol": "line-ns-open", "size": 16, "color": "--ink", "line": {"width": 1, "color": "--ink"}}
        data.append(points("gradient ready", x, rows, hovers, style))
    axis_of_rows = rows_axis([label for _, label in drawing.rows], 14, [row for row, _ in drawing.rows])
    shown = [drawing.depth - 0.4, -0.9 if drawing.titles else -0.6]
    shape = layout(
        axis(f"time from the start of backward, {drawing.scale.unit}", zeroline=True, showgrid=True),
        {**axis_of_rows, "autorange": False, "range": shown}, barmode="overlay", shapes=drawing.ends,
        uniformtext={"mode": "hide", "minsize": 9}, annotations=drawing.titles,
    )  # fmt: skip
    shape["legend"]["y"] = 1.0
    return Chart(key, label, data, shape, int(drawing.depth * ROW_PX) + EDGE_PX, caption, arrow_key_series=keys)


def _series(kind: str, drawn: Sequence[_Bar], edged: bool) -> Series:
    name, colour, pattern = KINDS[kind]
    # Narrow bars would be all edge: neighbours differ by shade instead.
    shades = [0.75 if at % 2 and not edged else 1.0 for at in range(len(drawn))]
    style = {**bar_style(colour, pattern), "opacity": shades, "line": {"color": "--page", "width": 0.7 * edged}}
    base, length, row, inside, hover = zip(*drawn, strict=True)
    return bars(
        name, length, row, hover, style, base=base, text=inside, width=0.72, textposition="inside", textangle=0,
        insidetextanchor="middle", insidetextfont={"color": "--on-bar"}, constraintext="inside",
    )  # fmt: skip


def _draw(drawing: _Drawing, view: StepView, gradients: bool) -> None:
    top, row = drawing.depth, drawing.row("compute")
    for kind in ("forward", "backward"):
        own = [span for span in view.timeline.compute if span.name.startswith("forward") == (kind == "forward")]
        for start_s, end_s in union(own):  # a simulated backward has a span per gradient
            hover = hover_text(kind, f"{seconds(end_s - start_s)}, to {seconds(end_s)}")
            drawing.bar(kind, row, (start_s, end_s), kind, hover)
    if gradients and view.trace is not None:
        _draw_gradients(drawing, view, view.trace)
    computing = union(view.timeline.compute)
    spans = sorted(view.timeline.communication, key=lambda span: (len(span.track), span.track))  # lane 2 before 10
    for track, own_spans in groupby(spans, key=lambda span: span.track):
        row = drawing.row(track)
        for span in own_spans:
            _draw_message(drawing, view, span, row, computing)
    drawing.end(computing[-1][1], top)


def _draw_gradients(drawing: _Drawing, view: StepView, trace: Trace) -> None:
    """When each gradient is ready; and each bucket while backward computes its gradients, one after the other."""
    row = drawing.row("gradients")
    for tensor in trace.tensors[:MAX_TICKS]:
        what = f"{size(tensor.nbytes)}, ready at {seconds(tensor.ready_s)}"
        hover = hover_text(f"<b>{plotly_text(tensor.name, 48)}</b>", what)
        drawing.ticks.append((drawing.drawn(tensor.ready_s), row, hover))
    before_s = [0.0, *(tensor.ready_s for tensor in trace.tensors)]
    computed_in = {tensor.name: (at_s, tensor.ready_s) for at_s, tensor in zip(before_s, trace.tensors, strict=False)}
    row = drawing.row("buckets")
    for at, bucket in view.buckets.items():
        own = [computed_in[name] for name in bucket.names if name in computed_in]
        if own:
            interval = (min(start_s for start_s, _ in own), max(end_s for _, end_s in own))
            times = f"fills from {seconds(interval[0])} to {seconds(interval[1])}"
            hover = hover_text(_bucket_words(view, at), times, *name_lines(bucket.names))
            drawing.bar("filling", row, interval, str(at), hover)


def _draw_message(drawing: _Drawing, view: StepView, span: Span, row: float, computing: Sequence[Interval]) -> None:
    """A message: waiting, hidden and exposed parts; its bucket's number is written into the longest of the last two."""
    number, wait = view.number(span), view.waits.get(span.name)
    about = f"<b>{plotly_text(span.name, 48)}</b>" if number is None else _bucket_words(view, number)
    begin_s = span.start_s
    if wait is not None:
        begin_s = min(wait.until_s, span.end_s)
        words = f"waits for rank {wait.rank}"
        hover = hover_text(about, f"{words}: {seconds(begin_s - span.start_s)}, to {seconds(begin_s)}")
        drawing.bar("waiting", row, (span.start_s, begin_s), words, hover)
    parts = _parts((begin_s, span.end_s), computing)
    exposed_s = sum(end - start for kind, (start, end) in parts if kind == "exposed")
    times = f"{seconds(begin_s)} to {seconds(span.end_s)}: {seconds(span.end_s - begin_s)}"
    bare = f", {seconds(exposed_s)} of it exposed" if exposed_s > 0 else ", all of it hidden"
    bucket = None if number is None else view.buckets.get(number)
    hover = hover_text(about, times + bare, *name_lines(bucket.names if bucket else ()))
    longest = max(range(len(parts)), key=lambda at: parts[at][1][1] - parts[at][1][0])
    for at, (kind, interval) in enumerate(parts):
        drawing.bar(kind, row, interval, str(number) if at == longest and number is not None else "", hover)


def _bucket_words(view: StepView, number: int) -> str:
    bucket = view.buckets.get(number)
    if bucket is None:
        return f"<b>bucket {number}</b>"
    known, sent_nbytes = view.gradients(bucket), view.sent_nbytes(bucket)
    much = f", {size(sum(tensor.nbytes for tensor in known))}" if known else ""
    sent = f", a rank sends {size(sent_nbytes)}" if sent_nbytes is not None else ""
    by = plotly_text(bucket.collective, 24)
    return f"<b>bucket {number}</b>: {count(len(bucket.names), 'tensor')}{much}, {by}{sent}"


def _parts(whole: Interval, hiding: Sequence[Interval]) -> list[tuple[str, Interval]]:
    """A message cut into hidden and exposed parts; the intervals ``hiding`` are disjoint and in order."""
    start, end = whole
    if start == end:
        return [("hidden", whole)]
    parts: list[tuple[str, Interval]] = []
    at = bisect_right(hiding, start, key=lambda pair: pair[1])
    while at < len(hiding) and hiding[at][0] < end:
        low, high = max(start, hiding[at][0]), min(end, hiding[at][1])
        if high > low:
            if low > start:
                parts.append(("exposed", (start, low)))
            parts.append(("hidden", (low, high)))
            start = high
        at += 1
    return [*parts, ("exposed", (start, end))] if start < end else parts
