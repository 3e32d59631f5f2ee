"""Steps drawn as bars over time: computation, gradients and their buckets, messages on lanes, hidden or exposed."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.tools.report.formatting import Scale, count, seconds, size, time_scale
from anabranch.tools.report.html.chart import Chart, Series, hatching, time_axis
from anabranch.tools.report.html.escaping import hover_text, name_lines, plotly_text
from anabranch.tools.report.html.step_view import StepView
from anabranch.values.timeline import Interval, Span, Timeline, union
from anabranch.values.trace import Trace

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


@dataclass(slots=True)
class _Bars:
    """The bars of one kind, as plotly takes them: a list per property."""

    base: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    row: list[float] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)
    crowded: list[bool] = field(default_factory=list)


class _Drawing:
    """The rows of the chart from top to bottom, and the bars and marks on them; ``depth`` is the next free row."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.bars = {kind: _Bars() for kind in KINDS}
        self.rows: list[tuple[float, str]] = []
        self.titles: list[tuple[float, str]] = []
        self.ticks: list[tuple[float, float, str]] = []
        self.ends: list[tuple[float, float, float]] = []  # of backward: instant, from row, to row
        self.depth = 0.0
        self.crowded = False  # whether the step being drawn has more than MAX_EDGED messages

    def row(self, label: str) -> float:
        self.rows.append((self.depth, label))
        self.depth += 1
        return self.depth - 1

    def title(self, text: str) -> None:
        self.depth += TITLE_ROWS if self.rows else 0.2
        self.titles.append((self.depth - 0.75, text))

    def bar(self, kind: str, row: float, interval: Interval, inside: str, hover: str) -> None:
        bars, (start_s, end_s) = self.bars[kind], interval
        bars.base.append(_rounded(start_s * self.scale.per_second))
        bars.length.append(_rounded((end_s - start_s) * self.scale.per_second))
        bars.row.append(row)
        bars.inside.append(inside)
        bars.hover.append(hover)
        bars.crowded.append(self.crowded)


def step_chart(key: str, label: str, steps: Sequence[StepView], caption: str, gradients: bool = False) -> Chart:
    """Steps one above the other on one time axis; several steps have a title each.

    With ``gradients``, rows show when gradients become ready and buckets fill, for steps whose trace is known.
    """
    drawing = _Drawing(time_scale(view.timeline.iteration_s for view in steps))
    for view in steps:
        if len(steps) > 1:
            drawing.title(f"{'Measured' if view.measured else 'Predicted'}: {view.title}")
        _draw(drawing, view, gradients)
    data = [_series(kind, bars) for kind, bars in drawing.bars.items() if bars.row]
    kinds = [kind for kind, bars in drawing.bars.items() if bars.row]
    arrow_key_series = [kinds.index(kind) for kind in ("waiting", "hidden", "exposed") if kind in kinds]
    if drawing.ticks:
        data.append(_gradient_ticks(drawing))
    return Chart(key, label, data, _layout(drawing), int(drawing.depth * ROW_PX) + EDGE_PX, caption, arrow_key_series)


def _draw(drawing: _Drawing, view: StepView, gradients: bool) -> None:
    top = drawing.depth
    drawing.crowded = len(view.timeline.communication) > MAX_EDGED
    row = drawing.row("compute")
    for kind, interval in _computing(view.timeline):
        hover = hover_text(f"{kind}", f"{seconds(interval[1] - interval[0])}, to {seconds(interval[1])}")
        drawing.bar(kind, row, interval, kind, hover)
    if gradients and view.trace is not None:
        _draw_gradients(drawing, view)
    computing = union(view.timeline.compute)
    tracks: dict[str, list[Span]] = {}
    for span in view.timeline.communication:
        tracks.setdefault(span.track, []).append(span)
    for track in sorted(tracks, key=_natural):
        row = drawing.row(track)
        for span in tracks[track]:
            _draw_message(drawing, view, span, row, computing)
    drawing.ends.append((max(end for _, end in computing), top - 0.5, drawing.depth - 0.5))


def _draw_gradients(drawing: _Drawing, view: StepView) -> None:
    assert view.trace is not None
    row = drawing.row("gradients")
    for tensor in view.trace.tensors[:MAX_TICKS]:
        hover = hover_text(
            f"<b>{plotly_text(tensor.name, 48)}</b>", f"{size(tensor.nbytes)}, ready at {seconds(tensor.ready_s)}"
        )
        drawing.ticks.append((tensor.ready_s * drawing.scale.per_second, row, hover))
    row, computed_in = drawing.row("buckets"), _computed_in(view.trace)
    for number, bucket in view.buckets.items():
        own = [computed_in[name] for name in bucket.names if name in computed_in]
        if own:
            interval = (min(start for start, _ in own), max(end for _, end in own))
            times = f"fills from {seconds(interval[0])} to {seconds(interval[1])}"
            hover = hover_text(*_bucket_summary(view, number), times, *_names(view, number))
            drawing.bar("filling", row, interval, str(number), hover)


def _computed_in(trace: Trace) -> dict[str, Interval]:
    """For each gradient, from when to when backward computes it: since the previous one was ready."""
    before = [0.0, *(tensor.ready_s for tensor in trace.tensors)]
    return {tensor.name: (start, tensor.ready_s) for start, tensor in zip(before, trace.tensors, strict=False)}


def _draw_message(drawing: _Drawing, view: StepView, span: Span, row: float, computing: Sequence[Interval]) -> None:
    """A message: waiting, hidden and exposed parts; its bucket's number is written into the longest of the last two."""
    number, wait = view.number(span), view.waits.get(span.name)
    begin_s = span.start_s
    if wait is not None:
        begin_s = min(wait.until_s, span.end_s)
        words = f"waits for rank {wait.rank}"
        hover = hover_text(*_about(view, span), f"{words}: {seconds(begin_s - span.start_s)}, to {seconds(begin_s)}")
        drawing.bar("waiting", row, (span.start_s, begin_s), words, hover)
    parts = _parts((begin_s, span.end_s), computing)
    exposed_s = sum(end - start for kind, (start, end) in parts if kind == "exposed")
    times = f"{seconds(begin_s)} to {seconds(span.end_s)}: {seconds(span.end_s - begin_s)}"
    bare = f", {seconds(exposed_s)} of it exposed" if exposed_s > 0 else ", all of it hidden"
    hover = hover_text(*_about(view, span), times + bare, *(_names(view, number) if number is not None else ()))
    longest = max(range(len(parts)), key=lambda at: parts[at][1][1] - parts[at][1][0])
    for at, (kind, interval) in enumerate(parts):
        drawing.bar(kind, row, interval, str(number) if at == longest and number is not None else "", hover)


def _about(view: StepView, span: Span) -> list[str]:
    number = view.number(span)
    return _bucket_summary(view, number) if number is not None else [f"<b>{plotly_text(span.name, 48)}</b>"]


def _bucket_summary(view: StepView, number: int) -> list[str]:
    bucket, tensors = view.buckets.get(number), view.tensors
    if bucket is None:
        return [f"<b>bucket {number}</b>"]
    known = [tensors[name].nbytes for name in bucket.names if name in tensors]
    much = f", {size(sum(known))}" if len(known) == len(bucket.names) else ""
    sent_nbytes = view.sent_nbytes(bucket)
    sent = f", a rank sends {size(sent_nbytes)}" if sent_nbytes is not None else ""
    by = plotly_text(bucket.collective, 24)
    return [f"<b>bucket {number}</b>: {count(len(bucket.names), 'tensor')}{much}, {by}{sent}"]


def _names(view: StepView, number: int) -> list[str]:
    bucket = view.buckets.get(number)
    return name_lines(bucket.names) if bucket is not None else []


def _computing(timeline: Timeline) -> Iterable[tuple[str, Interval]]:
    """Forward and backward, each joined: a simulated backward has a span per gradient."""
    for kind in ("forward", "backward"):
        own = [span for span in timeline.compute if span.name.startswith("forward") == (kind == "forward")]
        yield from ((kind, interval) for interval in union(own))


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


def _natural(track: str) -> tuple[int, str]:
    """Lane 2 before lane 10."""
    digits = "".join(letter for letter in track if letter.isdecimal())
    return (int(digits) if digits.isascii() and 0 < len(digits) < 9 else -1, track)


def _series(kind: str, bars: _Bars) -> Series:
    name, colour, shape = KINDS[kind]
    # Narrow bars would be all edge: neighbours differ by shade instead.
    edge = {"color": "--page", "width": [0 if crowded else 0.7 for crowded in bars.crowded]}
    shades = [0.75 if crowded and at % 2 else 1.0 for at, crowded in enumerate(bars.crowded)]
    return {
        "type": "bar", "orientation": "h", "name": name, "base": bars.base, "x": bars.length, "y": bars.row,
        "width": 0.72, "text": bars.inside, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": "--on-bar"}, "constraintext": "inside", "cliponaxis": True,
        "customdata": bars.hover, "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "opacity": shades, "pattern": hatching(shape), "line": edge},
    }  # fmt: skip


def _gradient_ticks(drawing: _Drawing) -> Series:
    return {
        "type": "scatter", "mode": "markers", "name": "gradient ready",
        "x": [_rounded(at) for at, _, _ in drawing.ticks], "y": [row for _, row, _ in drawing.ticks],
        "customdata": [hover for _, _, hover in drawing.ticks], "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"symbol": "line-ns-open", "size": 16, "color": "--ink", "line": {"width": 1, "color": "--ink"}},
    }  # fmt: skip


def _layout(drawing: _Drawing) -> dict[str, Any]:
    at = [(_rounded(instant * drawing.scale.per_second), low, high) for instant, low, high in drawing.ends]
    return {
        "barmode": "overlay", "hovermode": "closest", "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": time_axis(drawing.scale.unit),
        "yaxis": {
            "tickvals": [row for row, _ in drawing.rows],
            "ticktext": [plotly_text(label, 14) for _, label in drawing.rows],
            "range": [drawing.depth - 0.4, -0.9 if drawing.titles else -0.6], "fixedrange": True, "showgrid": False,
            "zeroline": False,
        },
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "y0": low, "y1": high,
             "line": {"color": "--ink", "width": 1.5, "dash": "dot"}}
            for x, low, high in at
        ],
        "annotations": [
            {"xref": "paper", "x": 0, "y": row, "yref": "y", "xanchor": "left", "yanchor": "middle",
             "showarrow": False, "text": f"<b>{plotly_text(text, 80)}</b>"}
            for row, text in drawing.titles
        ],
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    }  # fmt: skip


def _rounded(value: float) -> float:
    return float(f"{value:.7g}") if abs(value) > SMALLEST else 0.0
