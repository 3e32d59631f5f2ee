"""Horizontal bars: one row for each of several names, in groups side by side or stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.tools.report.html.chart import Chart, hatching
from anabranch.tools.report.html.escaping import plotly_text

ROW_PX, EDGE_PX = 34, 110
ROOM = 1.2  # for the text behind the longest bar


@dataclass(frozen=True, slots=True)
class Bars:
    """One kind of bar: its name in the legend, its look, and a value, a text and a hover text for each row.

    None draws no bar.
    """

    name: str
    colour: str
    shape: str
    values: Sequence[float | None]
    texts: Sequence[str]
    hovers: Sequence[str]


def bar_chart(
    key: str, label: str, rows: Sequence[str], kinds: Sequence[Bars], axis: str, caption: str, stacked: bool = False
) -> Chart:
    """The bars of all kinds, a row for each name from top to bottom."""
    places = list(range(len(rows)))
    data = [
        {
            "type": "bar", "orientation": "h", "name": kind.name, "x": list(kind.values), "y": places,
            "text": list(kind.texts), "textposition": "outside", "outsidetextfont": {"color": "--ink"},
            "cliponaxis": False, "customdata": list(kind.hovers), "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "color": kind.colour, "pattern": hatching(kind.shape), "line": {"color": "--page", "width": 0.7},
            },
        }
        for kind in kinds
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack" if stacked else "group", "hovermode": "closest", "bargap": 0.25,
        "xaxis": {"title": {"text": axis}, "range": [0, ROOM * _longest(kinds, stacked)]},
        "yaxis": {"tickvals": places, "ticktext": [plotly_text(name, 24) for name in rows], "autorange": "reversed",
                  "fixedrange": True, "showgrid": False, "zeroline": False},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    }  # fmt: skip
    height = ROW_PX * len(rows) * (1 if stacked else len(kinds)) + EDGE_PX
    return Chart(key, label, data, layout, height, caption, list(range(len(data))))


def _longest(kinds: Sequence[Bars], stacked: bool) -> float:
    """The end of the longest bar, or of all bars of a row on top of each other."""
    rows = zip(*([value or 0.0 for value in kind.values] for kind in kinds), strict=True)
    return max((sum(row) if stacked else max(row) for row in rows), default=0.0) or 1.0
