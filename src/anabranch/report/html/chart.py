"""Chart: a plotly figure as plain values, and the words around it.

Colours are names of the page's CSS variables ("--c1", or "--c1/0.16" with an opacity), which differ between light and
dark. Every series also differs by a pattern, a dash or a symbol, so that no colour need be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLOURS = tuple(f"--c{number}" for number in range(1, 9))
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "star", "pentagon")
PATTERNS = ("", "/", "x", ".", "\\", "-", "|", "+")

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """``walk`` are the series through whose points the arrow keys ← and → lead, ``apart`` one at a time: then ↑ and ↓
    lead from one to the next."""

    key: str
    label: str
    data: Sequence[Trace]
    layout: dict[str, Any]
    height: int
    caption: str = ""
    walk: Sequence[int] = field(default=())
    title: str = ""
    apart: bool = False
    half: bool = False  # two of them side by side, where there is room

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws."""
        own = {"key": self.key, "walk": list(self.walk), "apart": self.apart}
        return {**own, "data": list(self.data), "layout": self.layout}


def colour(index: int) -> str:
    """Of the series with this number."""
    return COLOURS[index % len(COLOURS)]


def line(index: int) -> dict[str, Any]:
    """Of the series with this number: its colour and its dash."""
    return {"color": colour(index), "dash": DASHES[index % len(DASHES)], "width": 2}


def marker(index: int) -> dict[str, Any]:
    """Of the series with this number: its colour and its shape."""
    return {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8}


def hatching(shape: str) -> dict[str, Any]:
    """Lines of the page's colour over a bar's own."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "--page", "fgopacity": 0.5, "size": 7, "solidity": 0.28}


def pattern(index: int) -> dict[str, Any]:
    """Of the bar series with this number: its colour and its hatching."""
    shape = PATTERNS[index % len(PATTERNS)]
    return {"color": colour(index), "pattern": hatching(shape), "line": {"color": "--page", "width": 0.7}}


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int, edge: int = 0, **where: str
) -> Trace:
    """An area between two curves, there and back, that the pointer passes through; with an ``edge``, spikes show."""
    return {
        "type": "scatter", "mode": "lines", "x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself",
        "fillcolor": f"{colour(index)}/0.16", "line": {"width": edge, "color": f"{colour(index)}/0.5"},
        "hoverinfo": "skip", "name": "", "showlegend": False, **where,
    }  # fmt: skip


def time_axis(unit: str) -> dict[str, Any]:
    """The horizontal axis of a picture of one step."""
    return {"title": {"text": f"time from the start of backward, {unit}"}, "zeroline": True, "showgrid": True}
