"""A training over its steps: loss, step time, exposed time, bytes sent and density, one above the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.report.formatting import time_scale
from anabranch.report.html.chart import Chart, Trace, band, line
from anabranch.report.html.curves import MOST_POINTS, Thinned, thinned
from anabranch.report.html.words import drawn
from anabranch.report.runs.documents import StepLine
from anabranch.report.runs.training import Training

MOST_RUNS = 8  # that colours and dashes tell apart
PANEL_PX, EDGE_PX, GAP = 160, 120, 0.07
MIB = 1 << 20
PREDICTED = "predicted"
LEAST = 1e-30  # an axis of less than 1e-300 is one that plotly gives up on


@dataclass(frozen=True, slots=True)
class _Panel:
    """One curve per run; ``of`` gives its value where a line has one, ``expected`` what was predicted of it."""

    title: str
    of: Callable[[StepLine], float | None]
    digits: str = ".4g"
    from_zero: bool = True
    expected: Callable[[StepLine], float | None] | None = None


def training_chart(runs: Sequence[Training]) -> Chart | None:
    """Everything that any of the runs tells; None where they tell nothing."""
    shown = runs[:MOST_RUNS]
    panels = [panel for panel in _panels(shown) if any(panel.of(at) is not None for run in shown for at in run.lines)]
    if not panels:
        return None
    data: list[Trace] = []
    most = 1
    names = list(dict.fromkeys(run.name for run in shown))  # losses and metrics of one file look alike
    for place, panel in enumerate(panels):
        for run in shown:
            series, per_point = _series(panel, run, names.index(run.name), place, len(names) > 1)
            if len(names) > 1 and series and series[-1]["name"] not in {old["name"] for old in data}:
                series[-1]["showlegend"] = True
            data += series
            most = max(most, per_point)
            if panel.expected is not None:
                data += _expected(panel, run, place, first=not any(old["name"] == PREDICTED for old in data))
    walk = [at for at, series in enumerate(data) if series.get("hoverinfo") != "skip"]
    label = "Curves over the steps of the training: " + ", ".join(panel.title for panel in panels)
    height = PANEL_PX * len(panels) + EDGE_PX
    return Chart("training", label, data, _layout(panels), height, _caption(runs, most), walk, apart=True)


def _panels(runs: Sequence[Training]) -> list[_Panel]:
    scale = time_scale(at.measured_s for run in runs for at in run.lines if at.measured_s is not None)

    def timed(value_s: float | None) -> float | None:
        return None if value_s is None else value_s * scale.per_second

    return [
        _Panel("loss", lambda at: at.loss, ".5g", from_zero=False),
        _Panel(f"step, {scale.unit}", lambda at: timed(at.measured_s), expected=lambda at: timed(at.predicted_s)),
        _Panel(f"exposed, {scale.unit}", lambda at: timed(at.exposed_s)),
        _Panel("sent, MiB", lambda at: None if at.sent_nbytes is None else at.sent_nbytes / MIB),
        _Panel("density, %", lambda at: None if at.density is None else 100 * at.density),
    ]


def _series(panel: _Panel, run: Training, index: int, place: int, named: bool) -> tuple[list[Trace], int]:
    """One run's curve, with a band from the least to the most where steps were put together."""
    known = [(at.step, value) for at in run.lines if (value := panel.of(at)) is not None]
    if not known:
        return [], 1
    curve = thinned([step for step, _ in known], [value for _, value in known])
    axis = {"yaxis": f"y{place + 1}" if place else "y"}
    style = line(index)
    who = f"<b>{drawn(run.name, 40)}</b><br>" if named else ""
    words = [who + _words(panel, curve, at) for at in range(len(curve.steps))]
    traces = (
        [band(curve.steps, _round(curve.low), _round(curve.high), index, edge=1, **axis)] if curve.per_point > 1 else []
    )
    traces.append({
        "type": "scatter", "mode": "lines", "x": list(curve.steps), "y": _round(curve.middle), "name": drawn(run.name),
        "legendgroup": str(index), "showlegend": False, "line": style, "customdata": words, **axis,
        "hovertemplate": "%{customdata}<extra></extra>",
    })  # fmt: skip
    return traces, curve.per_point


def _expected(panel: _Panel, run: Training, place: int, first: bool) -> list[Trace]:
    """What was predicted, as the stairs that it is: a prediction holds until the layout changes."""
    assert panel.expected is not None
    known = [(at.step, value) for at in run.lines if (value := panel.expected(at)) is not None]
    stairs = [
        (step, value)
        for at, (step, value) in enumerate(known)
        if at in (0, len(known) - 1) or value != known[at - 1][1] or value != known[at + 1][1]
    ]
    if not stairs:
        return []
    if len(stairs) > MOST_POINTS:  # a prediction that never holds is no longer stairs
        thin = thinned(*zip(*stairs, strict=True))
        stairs = list(zip(thin.steps, thin.middle, strict=True))
    return [{
        "type": "scatter", "mode": "lines", "x": [step for step, _ in stairs], "name": PREDICTED,
        "y": _round([value for _, value in stairs]), "legendgroup": "predicted", "showlegend": first,
        "line": {"color": "--ink", "dash": "dot", "width": 2, "shape": "hv"},
        "yaxis": f"y{place + 1}" if place else "y",
        "customdata": [f"step {step:,}: predicted {value:{panel.digits}}" for step, value in stairs],
        "hovertemplate": "%{customdata}<extra></extra>",
    }]  # fmt: skip


def _words(panel: _Panel, curve: Thinned, at: int) -> str:
    value = format(curve.middle[at], panel.digits)
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
            f"The line is the median of up to {per_point} steps at a time, the band behind it runs from the "
            "least to the most of them: nothing that stood out is left out, but single steps are not on this page."
        )
    if len(runs) > MOST_RUNS:
        parts.append(f"The first {MOST_RUNS} of {len(runs)} runs are drawn.")
    parts.append("A step counts from the start of forward to averaged gradients, without the optimizer.")
    parts += dict.fromkeys(f"Note: {note}." for run in runs for note in run.notes)
    return " ".join(parts)


def _round(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") if abs(value) > LEAST else 0.0 for value in values]
