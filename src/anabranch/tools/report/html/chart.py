"""Chart: a plotly figure as plain values, with its title and caption.

Colours are names of the page's CSS variables ("--c1", or "--c1/0.16" with an opacity), which differ between light and
dark. Series also differ by pattern, dash or symbol, for readers who cannot tell the colours apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLOURS = tuple(f"--c{number}" for number in range(1, 9))
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
# One more than colours, so that a ninth series still differs from the first.
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "star", "pentagon", "hexagram")
PATTERNS = ("", "/", "x", ".", "\\", "-", "|", "+")

Series = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plotly figure with its caption, and how to move in it by keys.

    The keys ← and → move from point to point of the series ``arrow_key_series`` (their places in ``data``). With
    ``one_curve_at_a_time`` they stay on one series, and ↑ and ↓ change it. Two charts of ``half_width`` stand side by
    side where there is room.
    """

    key: str
    label: str
    data: Sequence[Series]
    layout: dict[str, Any]
    height: int
    caption: str = ""
    arrow_key_series: Sequence[int] = field(default=())
    title: str = ""
    one_curve_at_a_time: bool = False
    half_width: bool = False

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "key": self.key,
            "arrowKeySeries": list(self.arrow_key_series),
            "oneCurveAtATime": self.one_curve_at_a_time,
            "data": list(self.data),
            "layout": self.layout,
        }


def colour(index: int) -> str:
    """The colour of series number ``index``."""
    return COLOURS[index % len(COLOURS)]


def line(index: int) -> dict[str, Any]:
    """The line style of series number ``index``: colour and dash."""
    return {"color": colour(index), "dash": DASHES[index % len(DASHES)], "width": 2}


def marker(index: int) -> dict[str, Any]:
    """The marker style of series number ``index``: colour and symbol."""
    return {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8}


def hatching(shape: str) -> dict[str, Any]:
    """A hatching in the colour of the page over a bar's own colour."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "--page", "fgopacity": 0.5, "size": 7, "solidity": 0.28}


def pattern(index: int) -> dict[str, Any]:
    """The bar style of series number ``index``: colour and hatching."""
    shape = PATTERNS[index % len(PATTERNS)]
    return {"color": colour(index), "pattern": hatching(shape), "line": {"color": "--page", "width": 0.7}}


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int, edge: int = 0, **where: str
) -> Series:
    """The area between two curves. It takes no pointer events; an ``edge`` of 1 pixel keeps narrow spikes visible."""
    return {
        "type": "scatter", "mode": "lines", "x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself",
        "fillcolor": f"{colour(index)}/0.16", "line": {"width": edge, "color": f"{colour(index)}/0.5"},
        "hoverinfo": "skip", "name": "", "showlegend": False, **where,
    }  # fmt: skip


def time_axis(unit: str) -> dict[str, Any]:
    """The horizontal axis of a chart of one step."""
    return {"title": {"text": f"time from the start of backward, {unit}"}, "zeroline": True, "showgrid": True}
