"""Training steps, predicted or measured, drawn over time: buckets fill, their messages are hidden or exposed."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from anabranch.tools.report import chart
from anabranch.tools.report.documents import PlanDocument, PlannedBucket, SimulateDocument
from anabranch.tools.report.figures import bucket_number, planned_buckets
from anabranch.tools.report.formatting import count, seconds, size, time_scale
from anabranch.tools.report.runs import Runs
from anabranch.tools.report.window import Wait
from anabranch.values.errors import PlanError
from anabranch.values.plan import Plan
from anabranch.values.timeline import COMPUTE, INSIDE, Interval, Span, Timeline, inside_track, lane_track, union
from anabranch.values.trace import Trace

Predicted = tuple[str, Timeline, Plan, Trace]  # a title, and a step that was simulated
MAX_RANKS = 4  # of a window; Perfetto shows more
MAX_EDGED = 100  # messages of a step; the bars of more are too narrow for an edge
MESSAGES = ("waiting for a slower rank", "communication, hidden", "communication, exposed")  # for the arrow keys
SMALLEST = 1e-9  # of any unit, drawn as 0 below this: plotly draws no axis that ends below 1e-300
# Kind of bar: name in the legend, colour, hatching; in the order of the legend.
KINDS: dict[str, tuple[str, str, str]] = {
    "forward": ("forward", "--quiet", ""),
    "backward": ("backward", "--compute", ""),
    "filling": ("bucket fills", "--gather", "."),
    "waiting": ("waiting for a slower rank", "--waiting", "x"),
    "hidden": ("communication, hidden", "--wire", ""),
    "exposed": ("communication, exposed", "--exposed", "/"),
}


@dataclass(frozen=True, slots=True)
class StepView:
    """One step, and what is known of its buckets."""

    title: str
    measured: bool
    timeline: Timeline
    buckets: Sequence[PlannedBucket]
    waits: Mapping[str, Wait] = field(default_factory=dict)

    @property
    def waited_s(self) -> dict[int, float]:
        """How long it waited for each of the ranks that it waited for."""
        found: dict[int, float] = {}
        for span in self.timeline.communication:
            if (wait := self.waits.get(span.name)) is not None:
                found[wait.rank] = found.get(wait.rank, 0.0) + min(wait.until_s, span.end_s) - span.start_s
        return found


def step_views(runs: Runs, predicted: Sequence[Predicted]) -> list[StepView]:
    """Predicted steps, then measured ones; ``predicted`` are the steps that the caller simulated."""
    found = [
        StepView(title, False, timeline, planned_buckets(dict(enumerate(plan.buckets)), timeline, trace))
        for title, timeline, plan, trace in predicted
    ]
    found += [_predicted_view(name, step) for name, step in runs.steps]
    for name, timeline in runs.timelines:
        found.append(StepView(name, timeline.meta.get("source") != "simulated", timeline, ()))
    for name, ranks in runs.windows:
        for one in ranks[:MAX_RANKS]:
            buckets = planned_buckets(one.buckets, one.timeline)
            title = f"{name}: step {one.step:,}, rank {one.rank}"
            found.append(StepView(title, True, one.timeline, buckets, one.waits))
    return sorted(found, key=lambda view: view.measured)


def plan_fits(plan: Plan, trace: Trace) -> bool:
    """Whether the plan has exactly the gradients of this trace."""
    try:
        plan.check(trace)
    except PlanError:
        return False
    return True


def _predicted_view(name: str, step: PlanDocument | SimulateDocument) -> StepView:
    """A step that the commands plan or simulate predicted."""
    spans = [Span(COMPUTE, "forward", -step.forward_s, 0.0), Span(COMPUTE, "backward", 0.0, step.backward_s)]
    for row in step.buckets:
        if row.start_s is not None and row.end_s is not None:
            spans.append(Span(lane_track(row.lane), f"bucket {row.index}", row.start_s, row.end_s))
        for stage, interval in (("scatter", row.scatter), ("gather", row.gather)):
            if interval is not None:
                spans.append(Span(inside_track(row.lane), f"bucket {row.index}, {stage}", *interval))
    plan_name = step.planner or (step.plan if isinstance(step, SimulateDocument) else None) or "a plan"
    title = f"{name}: {plan_name} on {step.world_size:,} ranks"
    return StepView(title, False, Timeline(tuple(spans), {"source": "simulated"}), step.buckets)


# ------------------------------------------------------------------------------------------------------------- chart


class _Bar(NamedTuple):
    kind: str
    interval: Interval
    inside: str
    hover: str


def step_chart(key: str, label: str, steps: Sequence[StepView], caption: str, filling: bool = False) -> chart.Chart:
    """Steps one above the other on one time axis; several steps have a title each.

    With ``filling``, a row shows when buckets fill, where that is known.
    """
    scale = time_scale(view.timeline.iteration_s for view in steps)

    def drawn(at_s: float) -> float:
        """A time in the unit of the chart, with seven digits."""
        value = at_s * scale.per_second
        return float(f"{value:.7g}") if abs(value) > SMALLEST else 0.0

    labels: list[str] = []  # of the rows, from top to bottom; empty where a title is
    bars_in: dict[str, list[tuple[int, _Bar]]] = {kind: [] for kind in KINDS}
    titles: list[dict[str, Any]] = []  # plotly's annotations
    ends: list[dict[str, Any]] = []  # of backward: plotly's shapes
    for view in steps:
        if len(steps) > 1:
            words = f"{'Measured' if view.measured else 'Predicted'}: {view.title}"
            titles.append(_title(words, len(labels)))
            labels.append("")
        top, end = len(labels), drawn(max(span.end_s for span in view.timeline.compute))
        for name, row in _rows(view, filling):
            for bar in row:
                bars_in[bar.kind].append((len(labels), bar))
            labels.append(name)
        style = {"color": "--ink", "width": 1.5, "dash": "dot"}
        edges = {"x0": end, "x1": end, "y0": top - 0.5, "y1": len(labels) - 0.5}
        ends.append({"type": "line", **edges, "line": style})
    edge = 0.7 if all(len(view.timeline.communication) <= MAX_EDGED for view in steps) else 0.0
    data = [_series(kind, found, drawn, edge) for kind, found in bars_in.items() if found]
    shape = chart.layout(
        chart.axis(f"time from the start of backward, {scale.unit}", zeroline=True, showgrid=True),
        {**chart.rows_axis(labels, 14), "autorange": False, "range": [len(labels) - 0.4, -0.6]}, barmode="overlay",
        shapes=ends, uniformtext={"mode": "hide", "minsize": 9}, annotations=titles,
    )  # fmt: skip
    shape["legend"]["y"] = 1.0
    return chart.Chart(key, label, data, shape, len(labels) * chart.ROW_PX + chart.EDGE_PX, caption, MESSAGES)


def _series(kind: str, found: Sequence[tuple[int, _Bar]], drawn: Callable[[float], float], edge: float) -> chart.Series:
    name, colour, pattern = KINDS[kind]
    style = {**chart.bar_style(colour, pattern), "line": {"color": "--page", "width": edge}}
    return chart.bars(
        name, [drawn(bar.interval[1] - bar.interval[0]) for _, bar in found], [row for row, _ in found],
        [bar.hover for _, bar in found], style,
        base=[drawn(bar.interval[0]) for _, bar in found], text=[bar.inside for _, bar in found], width=0.72,
        textposition="inside", textangle=0, insidetextanchor="middle", insidetextfont={"color": "--on-bar"},
        constraintext="inside",
    )  # fmt: skip


def _title(text: str, row: int) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 0, "y": row, "yref": "y", "xanchor": "left", "yanchor": "middle", "showarrow": False,
        "text": f"<b>{chart.plotly_text(text, 80)}</b>",
    }  # fmt: skip


def _rows(view: StepView, filling: bool) -> list[tuple[str, list[_Bar]]]:
    """The rows of a step from top to bottom: computing, buckets that fill, and the messages of each lane."""
    row = []
    for kind in ("forward", "backward"):
        own = [span for span in view.timeline.compute if span.name.startswith("forward") == (kind == "forward")]
        for start_s, end_s in union(own):  # a simulated backward has a span per gradient
            hover = chart.hover_text(kind, f"{seconds(end_s - start_s)}, to {seconds(end_s)}")
            row.append(_Bar(kind, (start_s, end_s), kind, hover))
    rows = [("compute", row)]
    if filling and (fills := _filling(view.buckets)):
        rows.append(("buckets", fills))
    computing = union(view.timeline.compute)
    buckets = {bucket.index: bucket for bucket in view.buckets}
    spans = sorted(view.timeline.communication, key=lambda span: (len(span.track), span.track))  # lane 2 before 10
    for track, messages in groupby(spans, key=lambda span: span.track):
        rows.append((track, [bar for span in messages for bar in _message(view, span, buckets, computing)]))
    return rows


def _filling(buckets: Sequence[PlannedBucket]) -> list[_Bar]:
    """Each bucket from the instant at which the one before it was full, as backward computes one after the other."""
    found, before_s = [], 0.0
    ready = [(bucket.ready_s, bucket) for bucket in buckets if bucket.ready_s is not None]
    for full_s, bucket in sorted(ready, key=lambda pair: pair[0]):
        hover = chart.hover_text(_bucket_words(bucket), f"full at {seconds(full_s)}", *chart.name_lines(bucket.names))
        found.append(_Bar("filling", (min(before_s, full_s), full_s), str(bucket.index), hover))
        before_s = full_s
    return found


def _message(
    view: StepView, span: Span, buckets: Mapping[int, PlannedBucket], computing: Sequence[Interval]
) -> list[_Bar]:
    """A message: waiting, hidden and exposed parts; its bucket's number is written into the longest of the last two."""
    number = bucket_number(span.name)
    bucket = buckets.get(number) if number is not None else None
    label = chart.plotly_text(span.name, 48) if number is None else f"bucket {number}"
    about, names = (_bucket_words(bucket), bucket.names) if bucket else (f"<b>{label}</b>", ())
    found, begin_s = [], span.start_s
    if (wait := view.waits.get(span.name)) is not None:
        begin_s = min(wait.until_s, span.end_s)
        words = f"waits for rank {wait.rank}"
        hover = chart.hover_text(about, f"{words}: {seconds(begin_s - span.start_s)}, to {seconds(begin_s)}")
        found.append(_Bar("waiting", (span.start_s, begin_s), words, hover))
    parts = _parts((begin_s, span.end_s), computing)
    exposed_s = sum(end - start for kind, (start, end) in parts if kind == "exposed")
    stage = f"{span.name.rpartition(', ')[2]} inside nodes, " if span.track.startswith(INSIDE) else ""
    times = f"{stage}{seconds(begin_s)} to {seconds(span.end_s)}: {seconds(span.end_s - begin_s)}"
    bare = f", {seconds(exposed_s)} of it exposed" if exposed_s > 0 else ", all of it hidden"
    hover = chart.hover_text(about, times + bare, *chart.name_lines(names))
    longest = max(parts, key=lambda part: part[1][1] - part[1][0])
    inside = "" if number is None else str(number)
    return [*found, *(_Bar(part[0], part[1], inside if part is longest else "", hover) for part in parts)]


def _bucket_words(bucket: PlannedBucket) -> str:
    much = "" if bucket.nbytes is None else f", {size(bucket.nbytes)}"
    sent = "" if bucket.sent_nbytes is None else f", a rank sends {size(bucket.sent_nbytes)}"
    by = chart.plotly_text(bucket.collective, 24)
    return f"<b>bucket {bucket.index}</b>: {count(bucket.tensors, 'tensor')}{much}, {by}{sent}"


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
