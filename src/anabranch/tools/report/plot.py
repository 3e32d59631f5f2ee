"""The scaling plot, as the bytes of a PNG or SVG file."""

import io
import warnings
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Literal, NamedTuple

from anabranch.tools.predict.scaling.result import Curves, Scaling
from anabranch.tools.report.formatting import plain, time_scale
from anabranch.values.extras import require

if TYPE_CHECKING:  # imported by functions only: it is optional, and takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ, too, also where colours repeat.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
LINEAR_RANGE = 8  # largest over smallest value up to which a linear axis shows all lines
LABEL_GAP = 0.052  # of the axes' height: one line of text
NOTE_LETTERS_PER_PANEL = 110  # in a line of text below the figure
NAME_LETTERS = 60
MAX_COLUMNS = 3  # of panels


class Banded(NamedTuple):
    """A value, and the band around it."""

    middle: float
    low: float
    high: float


Lines = Mapping[str, Mapping[int, Banded]]  # strategy -> world size -> value


def scaling_plot(scaling: Scaling, form: Format = "png") -> bytes:
    """Efficiency over the number of ranks, a line per strategy with its band, a panel per network.

    A single network has a second panel, of iteration times. What the numbers assume stands below.
    """
    require("matplotlib", "report", "a plot")
    from matplotlib.figure import Figure

    networks = [(network.name, scaling.on(network.name)) for network in scaling.networks]
    panels = 2 if len(networks) == 1 else len(networks)
    across = min(panels, MAX_COLUMNS)
    down = -(-panels // across)
    figure = Figure(figsize=(6 * across, 1 + 4 * down), dpi=120, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in axes[panels:]:
        spare.set_axis_off()
    if len(networks) == 1:
        _iteration_panel(axes.pop(0), networks[0][1])
    for place, (name, curves) in zip(axes, networks, strict=False):
        lines = {
            strategy: {n: Banded(100 * p.efficiency, *(100 * e for e in p.efficiencies)) for n, p in curve.items()}
            for strategy, curve in curves.items()
        }
        _panel(
            place, lines, f"Scaling efficiency, {plain(name)[:NAME_LETTERS]}", "speed-up / ranks, % (higher is better)"
        )
    note = fill(f"Assumed: {plain('; '.join(scaling.assumptions))}", NOTE_LETTERS_PER_PANEL * across)
    figure.suptitle(f"{plain(scaling.model)}: predicted scaling", fontsize=12, parse_math=False)
    figure.supxlabel(note, fontsize=7, color="#555555", parse_math=False)
    return figure_bytes(figure, form)


def _iteration_panel(axes: "Axes", curves: Curves) -> None:
    scale = time_scale(point.iteration_s for curve in curves.values() for point in curve.values())
    lines = {
        strategy: {
            n: Banded(*(s * scale.per_second for s in (p.iteration_s, p.iteration_low_s, p.iteration_high_s)))
            for n, p in curve.items()
        }
        for strategy, curve in curves.items()
    }
    _panel(axes, lines, "Iteration time", f"iteration, {scale.unit} (lower is better)", logarithmic=True)


def figure_bytes(figure: "Figure", form: Format) -> bytes:
    """The bytes of a figure's file; the same figure gives the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "anabranch"}):
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks are drawn as boxes
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


def _panel(axes: "Axes", curves: Lines, title: str, unit: str, logarithmic: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    ends: list[tuple[str, float, str]] = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        sizes = sorted(curve)
        low, high = [curve[n].low for n in sizes], [curve[n].high for n in sizes]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(sizes, [curve[n].middle for n in sizes], color=colour, marker=MARKERS[index % len(MARKERS)],
                  markersize=5, linewidth=1.6)  # fmt: skip
        ends.append((name, curve[sizes[-1]].middle, colour))
    sizes = sorted({n for curve in curves.values() for n in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45 if len(sizes) > 7 else 0)
    axes.minorticks_off()
    values = [value.middle for curve in curves.values() for value in curve.values()]
    if logarithmic and max(values) > LINEAR_RANGE * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        unit += ", logarithmic"
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.set_xlabel("ranks (logarithmic)")
    axes.set_ylabel(unit)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _name_ends(axes, sizes[-1], ends)


def _name_ends(axes: "Axes", last: int, ends: Sequence[tuple[str, float, str]]) -> None:
    """Each line's name at its right end, with a thin line to the point where names that would touch are moved."""
    rows = sorted(ends, key=lambda end: end[1])
    in_axes = axes.transData + axes.transAxes.inverted()
    places = _spread_labels([float(in_axes.transform((last, value))[1]) for _, value, _ in rows])
    for (name, value, colour), place in zip(rows, places, strict=True):
        axes.annotate(
            plain(name), xy=(last, value), xycoords="data", xytext=(1.05, place), textcoords="axes fraction",
            color=colour, fontsize=9, va="center", annotation_clip=False, parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _spread_labels(wanted: Sequence[float]) -> list[float]:
    """Rising heights at least a label apart, from 0 to 1, as near as can be to those wanted (by least squares).

    Less LABEL_GAP per place, "apart" becomes "not falling": isotonic regression, by pooling adjacent violators.
    """
    pools: list[tuple[float, int]] = []  # (mean height, how many labels share it)
    for index, height in enumerate(wanted):
        mean, count = height - index * LABEL_GAP, 1
        while pools and pools[-1][0] > mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    level = [mean for mean, count in pools for _ in range(count)]
    highest = 1 - (len(wanted) - 1) * LABEL_GAP
    return [min(max(low, 0.0), highest) + index * LABEL_GAP for index, low in enumerate(level)]
