"""The scaling plot, as the bytes of a PNG or SVG file."""

import io
import warnings
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Literal

from anabranch.report.cells import plain, time_scale
from anabranch.report.scaling import Curves

if TYPE_CHECKING:  # matplotlib takes a second to import, which only a plot is worth
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]

# Okabe and Ito's colours, told apart by colour-blind readers; shapes tell them apart without any colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FEW_TIMES = 8  # beyond this range a linear axis would squeeze all lines but the slowest together
LABEL_GAP = 0.052  # of the axes' height: one line of text
NOTE_LETTERS = 150  # that a line above the figure holds


def scaling_plot(title: str, note: str, iteration_s: Curves, efficiency: Curves, form: Format = "png") -> bytes:
    """Iteration time and efficiency over the number of ranks, a line per planner, each named at its end.

    ``note`` stands under the title and is the place for what the numbers assume.
    """
    from matplotlib.figure import Figure

    scale = time_scale(value for curve in iteration_s.values() for value in curve.values())
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    in_unit = {name: {n: s * scale.per_second for n, s in curve.items()} for name, curve in iteration_s.items()}
    in_percent = {name: {n: 100 * share for n, share in curve.items()} for name, curve in efficiency.items()}
    _panel(left, in_unit, "Iteration time", f"iteration, {scale.unit} (lower is better)", logarithmic=True)
    _panel(right, in_percent, "Scaling efficiency", "speed-up / ranks, % (higher is better)")
    figure.suptitle(f"{plain(title)}\n{fill(plain(note), NOTE_LETTERS)}", fontsize=11, parse_math=False)
    return saved(figure, form)


def saved(figure: "Figure", form: Format) -> bytes:
    """A figure as a file: the same numbers give the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "anabranch"}):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks is drawn as boxes
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


def _panel(axes: "Axes", curves: Curves, title: str, unit: str, logarithmic: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    ends: list[tuple[str, float, str]] = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        sizes = sorted(curve)
        axes.plot(sizes, [curve[n] for n in sizes], color=colour, marker=MARKERS[index % len(MARKERS)], markersize=5,
                  linewidth=1.6)  # fmt: skip
        ends.append((name, curve[sizes[-1]], colour))
    sizes = sorted({n for curve in curves.values() for n in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45 if len(sizes) > 7 else 0)
    axes.minorticks_off()
    values = [value for curve in curves.values() for value in curve.values()]
    if logarithmic and max(values) > FEW_TIMES * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        unit += ", logarithmic"
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("ranks (logarithmic)")
    axes.set_ylabel(unit)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _name_ends(axes, sizes[-1], ends)


def _name_ends(axes: "Axes", last: int, ends: Sequence[tuple[str, float, str]]) -> None:
    """Each line's name at its right end, with a thin line to the point where names that would touch are moved."""
    rows = sorted(ends, key=lambda end: end[1])
    in_axes = axes.transData + axes.transAxes.inverted()
    places = _apart([float(in_axes.transform((last, value))[1]) for _, value, _ in rows])
    for (name, value, colour), place in zip(rows, places, strict=True):
        axes.annotate(
            plain(name), xy=(last, value), xycoords="data", xytext=(1.05, place), textcoords="axes fraction",
            color=colour, fontsize=9, va="center", annotation_clip=False, parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(wanted: Sequence[float]) -> list[float]:
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
