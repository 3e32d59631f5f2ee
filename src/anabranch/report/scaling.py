"""Scaling tables: what each planner reaches at each world size."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.report.cells import percent, time_scale
from anabranch.report.tables import columns

ABREAST = 5  # planners that 80 columns hold

Curves = Mapping[str, Mapping[int, float]]  # planner -> world size -> value


def scaling_report(iteration_s: Curves, speedup: Curves, efficiency: Curves) -> RenderableType:
    """One table each for iteration time, speed-up over one rank, and efficiency; the best of a row has a star."""
    # In the unit of the best: what differs little between good planners must not drown in what a bad one takes.
    scale = time_scale(min(values) for values in zip(*(curve.values() for curve in iteration_s.values()), strict=True))
    parts: list[RenderableType] = []
    for low in range(0, len(iteration_s), ABREAST):
        names = list(iteration_s)[low : low + ABREAST]
        parts += [
            _table(f"Iteration, {scale.unit}", iteration_s, names, scale, min), Text(),
            _table("Speed-up over one rank", speedup, names, lambda value: f"{value:.2f}", max), Text(),
            _table("Efficiency (speed-up / ranks)", efficiency, names, percent, max), Text(),
        ]  # fmt: skip
    return Group(*parts, Text("* best of all planners at that world size."))


def _table(
    title: str,
    curves: Curves,
    names: Sequence[str],
    show: Callable[[float], str],
    choose: Callable[..., float],
) -> Table:
    table = columns(title, "ranks", *names)
    for world_size in next(iter(curves.values())):
        top = choose(curve[world_size] for curve in curves.values())
        cells = [("* " if curves[n][world_size] == top else "") + show(curves[n][world_size]) for n in names]
        table.add_row(Text(f"{world_size:,}"), *map(Text, cells))
    return table
