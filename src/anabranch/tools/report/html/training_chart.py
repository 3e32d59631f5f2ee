"""A training over its steps: loss, step time, exposed time, bytes sent and density, one above the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from anabranch.tools.report.formatting import time_scale
from anabranch.tools.report.html.chart import Chart, Series, band, line
from anabranch.tools.report.html.escaping import plotly_text
from anabranch.tools.report.runs.training import StepLine, Training

MAX_RUNS = 8  # as many as there are colours and dashes
MAX_POINTS = 2000  # a curve with more steps is downsampled
BINS = 800  # of a downsampled curve: about as many as a wide screen has pixel columns
PANEL_PX, EDGE_PX, GAP = 160, 120, 0.07
MIB = 1 << 20
PREDICTED = "predicted"
SMALLEST = 1e-30  # drawn as 0 below this: plotly draws no axis that ends below 1e-300


@dataclass(frozen=True, slots=True)
class Downsampled:
    """A curve in bins of ``per_point`` steps: first and last step, median, minimum, maximum and its step.

    ``per_point`` is 1 where every step is kept.
    """

    steps: tuple[int, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    high_at: tuple[int, ...]
    last: tuple[int, ...]
    per_point: int


def downsample(steps: Sequence[int], values: Sequence[float]) -> Downsampled:
    """A curve of at most ``MAX_POINTS`` points; no minimum and no maximum is lost."""
    if len(steps) <= MAX_POINTS:
        kept = tuple(values)
        return Downsampled(tuple(steps), kept, kept, kept, tuple(steps), tuple(steps), 1)
    per_point = -(-len(steps) // BINS)
    bins = [range(low, min(low + per_point, len(steps))) for low in range(0, len(steps), per_point)]
    highest = [max(part, key=values.__getitem__) for part in bins]
    return Downsampled(
        tuple(steps[part[0]] for part in bins),
        tuple(median(values[at] for at in part) for part in bins),
        tuple(min(values[at] for at in part) for part in bins),
        tuple(values[at] for at in highest),
        tuple(steps[at] for at in highest),
        tuple(steps[part[-1]] for part in bins),
        per_point,
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """One row of the chart, a curve per run; ``measured`` and ``predicted`` give the value of a line, if it has one."""

    title: str
    measured: Callable[[StepLine], float | None]
    digits: str = ".4g"
    from_zero: bool = True
    predicted: Callable[[StepLine], float | None] | None = None


def training_chart(runs: Sequence[Training]) -> Chart | None:
    """A panel for every quantity that any of the runs logged; None where there is none."""
    shown = runs[:MAX_RUNS]
    panels = [
        panel for panel in _panels(shown) if any(panel.measured(at) is not None for run in shown for at in run.lines)
    ]
    if not panels:
        return None
    data: list[Series] = []
    most_per_point = 1
    names = list(dict.fromkeys(run.name for run in shown))  # losses and metrics of one file look alike
    for place, panel in enumerate(panels):
        for run in shown:
            series, per_point = _series(panel, run, names.index(run.name), place, len(names) > 1)
            if len(names) > 1 and series and series[-1]["name"] not in {old["name"] for old in data}:
                series[-1]["showlegend"] = True
            data += series
            most_per_point = max(most_per_point, per_point)
            if panel.predicted is not None:
                data += _prediction(panel, run, place, first=not any(old["name"] == PREDICTED for old in data))
    arrow_key_series = [at for at, series in enumerate(data) if series.get("hoverinfo") != "skip"]
    label = "Curves over the steps of the training: " + ", ".join(panel.title for panel in panels)
    height = PANEL_PX * len(panels) + EDGE_PX
    return Chart(
        "training",
        label,
        data,
        _layout(panels),
        height,
        _caption(runs, most_per_point),
        arrow_key_series,
        one_curve_at_a_time=True,
    )


def _panels(runs: Sequence[Training]) -> list[_Panel]:
    scale = time_scale(at.measured_s for run in runs for at in run.lines if at.measured_s is not None)

    def timed(value_s: float | None) -> float | None:
        return None if value_s is None else value_s * scale.per_second

    return [
        _Panel("loss", lambda at: at.loss, ".5g", from_zero=False),
        _Panel(f"step time, {scale.unit}", lambda at: timed(at.measured_s), predicted=lambda at: timed(at.predicted_s)),
        _Panel(f"exposed communication, {scale.unit}", lambda at: timed(at.exposed_s)),
        _Panel("sent per step, MiB", lambda at: None if at.sent_nbytes is None else at.sent_nbytes / MIB),
        _Panel("elements exchanged (density), %", lambda at: None if at.density is None else 100 * at.density),
    ]


def _series(panel: _Panel, run: Training, index: int, place: int, named: bool) -> tuple[list[Series], int]:
    """One run's curve, with a band from minimum to maximum where it was downsampled; and its steps per point."""
    known = [(at.step, value) for at in run.lines if (value := panel.measured(at)) is not None]
    if not known:
        return [], 1
    curve = downsample([step for step, _ in known], [value for _, value in known])
    axis = {"yaxis": f"y{place + 1}" if place else "y"}
    style = line(index)
    who = f"<b>{plotly_text(run.name, 40)}</b><br>" if named else ""
    hover = [who + _hover(panel, curve, at) for at in range(len(curve.steps))]
    traces = (
        [band(curve.steps, _round(curve.low), _round(curve.high), index, edge=1, **axis)] if curve.per_point > 1 else []
    )
    traces.append({
        "type": "scatter", "mode": "lines", "x": list(curve.steps), "y": _round(curve.median),
        "name": plotly_text(run.name), "legendgroup": str(index), "showlegend": False, "line": style,
        "customdata": hover, **axis, "hovertemplate": "%{customdata}<extra></extra>",
    })  # fmt: skip
    return traces, curve.per_point


def _prediction(panel: _Panel, run: Training, place: int, first: bool) -> list[Series]:
    """The predicted curve, drawn as steps: a prediction holds until the layout changes."""
    assert panel.predicted is not None
    known = [(at.step, value) for at in run.lines if (value := panel.predicted(at)) is not None]
    stairs = [
        (step, value)
        for at, (step, value) in enumerate(known)
        if at in (0, len(known) - 1) or value != known[at - 1][1] or value != known[at + 1][1]
    ]
    if not stairs:
        return []
    if len(stairs) > MAX_POINTS:  # one that changes at nearly every step
        thin = downsample(*zip(*stairs, strict=True))
        stairs = list(zip(thin.steps, thin.median, strict=True))
    return [{
        "type": "scatter", "mode": "lines", "x": [step for step, _ in stairs], "name": PREDICTED,
        "y": _round([value for _, value in stairs]), "legendgroup": "predicted", "showlegend": first,
        "line": {"color": "--ink", "dash": "dot", "width": 2, "shape": "hv"},
        "yaxis": f"y{place + 1}" if place else "y",
        "customdata": [f"step {step:,}: predicted {value:{panel.digits}}" for step, value in stairs],
        "hovertemplate": "%{customdata}<extra></extra>",
    }]  # fmt: skip


def _hover(panel: _Panel, curve: Downsampled, at: int) -> str:
    value = format(curve.median[at], panel.digits)
    if curve.per_point == 1:
        return f"step {curve.steps[at]:,}: {panel.title} {value}"
    low, high = format(curve.low[at], panel.digits), format(curve.high[at], panel.digits)
    return (
        f"steps {curve.steps[at]:,} – {curve.last[at]:,}<br>{panel.title}: median {value}"
        f"<br>{low} to {high} (step {curve.high_at[at]:,})"
    )


def _layout(panels: Sequence[_Panel]) -> dict[str, Any]:
    height = (1 - GAP * (len(panels) - 1)) / len(panels)
    layout: dict[str, Any] = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "step"}, "anchor": "y" if len(panels) == 1 else f"y{len(panels)}"},
        "legend": {"orientation": "h", "y": 1.0 + 26 / (PANEL_PX * len(panels)), "yanchor": "bottom", "x": 0},
        "annotations": [],
    }
    for place, panel in enumerate(panels):
        top = 1 - place * (height + GAP)
        layout[f"yaxis{place + 1}" if place else "yaxis"] = {
            "domain": [max(0.0, top - height), top], "fixedrange": True, "nticks": 5,
            "rangemode": "tozero" if panel.from_zero else "normal",
        }  # fmt: skip
        layout["annotations"].append({
            "xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom",
            "showarrow": False, "text": f"<b>{panel.title}</b>",
        })  # fmt: skip
    return layout


def _caption(runs: Sequence[Training], per_point: int) -> str:
    parts = []
    if per_point > 1:
        parts.append(
            f"Each point of a line is the median of up to {per_point} steps; the band shows their minimum and maximum, "
            "so that no outlier is lost."
        )
    if len(runs) > MAX_RUNS:
        parts.append(f"The first {MAX_RUNS} of {len(runs)} runs are drawn.")
    parts.append("Step time: from the start of forward to averaged gradients, without the optimizer.")
    parts += dict.fromkeys(f"Note: {note}." for run in runs for note in run.notes)
    return " ".join(parts)


def _round(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") if abs(value) > SMALLEST else 0.0 for value in values]
