"""Chart: a plotly figure as plain values, with its caption.

Colours are names of the page's CSS variables ("--c1", or "--c1/0.16" with an opacity), which differ between light and
dark. Series also differ by pattern, dash or symbol, for readers who cannot tell the colours apart. plotly interprets
some HTML tags and entities: every text of a file passes through ``plotly_text``.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log10
from typing import Any

from anabranch.tools.report.formatting import plain, shortened

COLOURS = tuple(f"--c{number}" for number in range(1, 9))
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
# One more than colours, so that a ninth series still differs from the first.
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "star", "pentagon", "hexagram")
PATTERNS = ("", "/", "x", ".", "\\", "-", "|", "+")
MAX_LETTERS = 64  # of a name in a chart, where there is no room to wrap
HOVER_NAMES = 14  # that fit on a phone
ROW_PX, EDGE_PX = 38, 120  # of a chart of bars
ROOM = 1.3  # for the text behind the longest bar

Series = dict[str, Any]
PlotLayout = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plotly figure with its caption, and how to move in it by keys.

    The keys ← and → move from point to point of the series named in ``arrow_keys``, or of all that have hover texts.
    With ``one_curve_at_a_time`` they stay on one series, and ↑ and ↓ change it.
    """

    key: str
    label: str
    data: Sequence[Series]
    layout: PlotLayout
    height: int
    caption: str = ""
    arrow_keys: Sequence[str] = ()
    one_curve_at_a_time: bool = False

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws."""
        hovering = [at for at, series in enumerate(self.data) if "customdata" in series]
        keys = [at for at in hovering if not self.arrow_keys or self.data[at]["name"] in self.arrow_keys]
        return {
            "key": self.key,
            "arrowKeySeries": keys,
            "oneCurveAtATime": self.one_curve_at_a_time,
            "data": list(self.data),
            "layout": self.layout,
        }


# ------------------------------------------------------------------------------------------------------------- texts


def plotly_text(text: str, longest: int = MAX_LETTERS) -> str:
    """``text`` for a label or a hover box, without control characters and without tags that plotly obeys."""
    return html.escape(shortened(plain(text), longest), quote=False)


def hover_text(*lines: str) -> str:
    """Lines that are already escaped, one under the other, for a hover box."""
    return "<br>".join(line for line in lines if line)


def name_lines(names: Sequence[str]) -> list[str]:
    """The names of a bucket's first gradients for a hover box, and how many more there are."""
    lines = [plotly_text(name, 48) for name in names[:HOVER_NAMES]]
    more = len(names) - HOVER_NAMES
    return [*lines, f"… and {more:,} more"] if more > 0 else lines


# ------------------------------------------------------------------------------------------------------------ series


def colour(index: int) -> str:
    """The colour of series number ``index``."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> dict[str, Any]:
    """The marker style of series number ``index``: colour and symbol."""
    return {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8}


def bar_style(colour: str, pattern: str) -> dict[str, Any]:
    """The style of bars: a colour, and a hatching over it in the colour of the page."""
    hatching = {"fillmode": "overlay", "fgcolor": "--page", "fgopacity": 0.5, "size": 7, "solidity": 0.28}
    return {"color": colour, "pattern": {"shape": pattern, **hatching}, "line": {"color": "--page", "width": 0.7}}


def series(name: str, x: Sequence[float], y: Sequence[float], hovers: Sequence[str], **style: Any) -> Series:
    """Points with a hover text each. The template is the same for all, so plotly takes no word of a file for one."""
    texts = {"customdata": list(hovers), "hovertemplate": "%{customdata}<extra></extra>"}
    return {"name": plotly_text(name), "x": list(x), "y": list(y), **texts, **style}


def curve(name: str, x: Sequence[float], y: Sequence[float], hovers: Sequence[str], index: int, **more: Any) -> Series:
    """A line with markers, in the style of series number ``index``."""
    line = {"color": colour(index), "dash": DASHES[index % len(DASHES)], "width": 2}
    style = {"type": "scatter", "mode": "lines+markers", "line": line, "marker": marker(index)}
    return series(name, x, y, hovers, **{**style, **more})


def bars(
    name: str, x: Sequence[float], rows: Sequence[float], hovers: Sequence[str], style: dict[str, Any], **more: Any
) -> Series:
    """Horizontal bars of one kind."""
    return series(name, x, rows, hovers, type="bar", orientation="h", marker=style, **more)


def band(x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int, **more: Any) -> Series:
    """The area between two curves. It takes no pointer events."""
    return {
        "type": "scatter", "mode": "lines", "x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself",
        "fillcolor": f"{colour(index)}/0.16", "line": {"width": 0}, "hoverinfo": "skip", "name": "",
        "showlegend": False, **more,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ layout


def layout(x: dict[str, Any], y: dict[str, Any], **more: Any) -> PlotLayout:
    """Two axes, with the legend above them."""
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    return {"hovermode": "closest", "xaxis": x, "yaxis": y, "legend": legend, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


def rows_axis(labels: Sequence[str], longest: int) -> dict[str, Any]:
    """A vertical axis of named rows, the first at the top."""
    return {
        "tickvals": list(range(len(labels))), "ticktext": [plotly_text(label, longest) for label in labels],
        "autorange": "reversed", "fixedrange": True, "showgrid": False, "zeroline": False,
    }  # fmt: skip


def bar_chart(
    labels: tuple[str, str, str], unit: str, rows: Sequence[str], parts: Sequence[Series], marks: Series | None = None
) -> Chart:
    """A bar per row, stacked from ``parts`` (``bars`` of all rows), its length behind it; ``marks`` lie on the bars.

    ``labels`` are the chart's key, label and caption.
    """
    lengths = [sum(part["x"][row] for part in parts) for row in range(len(rows))]
    ends = list(lengths)
    data = list(parts)
    if marks is not None:
        look = {"symbol": "diamond", "size": 10, "color": "--page", "line": {"color": "--ink", "width": 1.5}}
        data.append({**marks, "type": "scatter", "mode": "markers", "marker": look})
        for row, at in zip(marks["y"], marks["x"], strict=True):
            ends[row] = max(ends[row], at)
    data.append({
        "type": "scatter", "mode": "text", "name": "", "x": ends, "y": list(range(len(rows))), "hoverinfo": "skip",
        "text": [f"   {length:.3g} {unit.partition(' ')[0]}" for length in lengths], "textposition": "middle right",
        "textfont": {"color": "--ink"}, "cliponaxis": False, "showlegend": False,
    })  # fmt: skip
    x = axis(unit, range=[0, ROOM * max(ends, default=1.0)])
    shape = layout(x, rows_axis(rows, 24), barmode="stack", bargap=0.25)
    key, label, caption = labels
    return Chart(key, label, data, shape, ROW_PX * len(rows) + EDGE_PX, caption)


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2, 5, 10 … over the range of these values; at more or at fewer where it is narrow or wide."""
    drawable = [value for value in values if 0 < value < inf] or [1.0]
    low, high = min(drawable), max(drawable)
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 4 * low else (1, 2, 5) if high < 200 * low else (1,)
    exponents = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}
