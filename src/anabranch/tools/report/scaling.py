"""Scaling tables: who is best at each world size on each network, and what every strategy reaches."""

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.tools.predict.scaling.answer import BestAtSize, Gain, best_at_sizes, has_dense
from anabranch.tools.predict.scaling.line_up import DDP_DEFAULT
from anabranch.tools.predict.scaling.result import Curves, NetworkUsed, ScalePoint, Scaling
from anabranch.tools.report.comparison import MEANING, error
from anabranch.tools.report.formatting import Scale, factor, label, percent, plain, time_scale
from anabranch.tools.report.tables import columns

ABREAST = 5  # strategies that 80 columns hold


def scaling_report(scaling: Scaling) -> RenderableType:
    """Who is best where, network by network; of a single network also every strategy; then the answer in words."""
    parts: list[RenderableType] = []
    for network in scaling.networks:
        curves = scaling.on(network.name)
        if len(scaling.networks) == 1:
            parts += _all_strategies(curves)
        parts += [*_winners(scaling, network, curves), _origin(network), Text()]
    parts += [Text(plain(said) + "\n") for said in scaling.answer]
    return Group(*parts, Text(plain(f"Assumed: {'; '.join(scaling.assumptions)}.")))


def _winners(scaling: Scaling, network: NetworkUsed, curves: Curves) -> list[RenderableType]:
    """DDP and the best dense strategy side by side, with the band of each step; then the best compressed ones."""
    found = best_at_sizes(scaling, curves)
    # In the unit of the best: what differs little between good strategies must not drown in what a bad one takes.
    scale = time_scale(row.best.iteration_s for row in found)
    base = "DDP" if found[0].ddp.planner == DDP_DEFAULT else plain(found[0].ddp.planner)
    best = "best dense" if has_dense(scaling) else "best"
    headers = ["ranks", f"{base}\n{scale.unit}", f"{best}\n{scale.unit}", f"over\n{base}", "effi-\nciency"]
    table = columns(plain(network.name), *headers)
    for row in found:
        cells = [f"{row.world_size:,}", _banded(row.ddp, scale), *_best_cells(row.dense, row.ddp, scale)]
        table.add_row(*map(Text, cells))
    return [table, Text(), *_compressed_winners(found, network, scale), *_errors(scaling, curves)]


def _compressed_winners(found: Sequence[BestAtSize], network: NetworkUsed, scale: Scale) -> list[RenderableType]:
    """The best strategies that round every value, and those that send some, where there are any."""
    headers = ["ranks"]
    for what, point in (("rounded", found[0].quantised), ("sparse", found[0].sparse)):
        if point is not None:
            headers += [f"best {what}\n{scale.unit}", "over\ndense", "effi-\nciency"]
    if len(headers) == 1:
        return []
    table = columns(f"{plain(network.name)}, compressed", *headers)
    for row in found:
        points = [point for point in (row.quantised, row.sparse) if point is not None]
        cells = [cell for point in points for cell in _best_cells(point, row.dense, scale)]
        table.add_row(*map(Text, [f"{row.world_size:,}", *cells]))
    return [table, Text()]


def _errors(scaling: Scaling, curves: Curves) -> list[RenderableType]:
    """How lossy the plan of every strategy with compressed buckets is, in a line; nothing where no error is known."""
    said = []
    for strategy in scaling.strategies:
        points = curves[strategy.name].values()
        if strategy.sends == "dense" or any(point.error is None for point in points):
            continue
        alike = [(shown, [point.world_size for point in some]) for shown, some in groupby(points, error)]
        where = [shown + (f" at {_sizes(sizes)}" if len(alike) > 1 else "") for shown, sizes in alike]
        said.append(f"{label(strategy.name).plain} {', '.join(where)}")
    return [Text(plain(f"Error, {MEANING}: {'; '.join(said)}.")), Text()] if said else []


def _sizes(sizes: Sequence[int]) -> str:
    """4 ranks, or 4 to 64 ranks."""
    return " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1]))) + " ranks"


def _best_cells(point: ScalePoint, other: ScalePoint, scale: Scale) -> list[str]:
    """The step of a strategy, its gain over another, and its efficiency."""
    return [_banded(point, scale, named=True), factor(Gain.over(point, other).middle), percent(point.efficiency)]


def _banded(point: ScalePoint, scale: Scale, named: bool = False) -> str:
    """The step, and under it its band where there is one."""
    low, high = scale(point.iteration_low_s), scale(point.iteration_high_s)
    name = f"{label(point.planner).plain} " if named else ""
    return name + scale(point.iteration_s) + (f"\n{low}–{high}" if low != high else "")


def _origin(network: NetworkUsed) -> Text:
    name = label(network.name).plain
    return Text(plain(f"{name} is {network.source}. Band: {network.spread}. Costs: {network.extrapolation}."))


def _all_strategies(curves: Curves) -> list[RenderableType]:
    """One table each for iteration time, speed-up over one rank, and efficiency; the best of a row has a star."""
    scale = time_scale(
        min(p.iteration_s for p in points)
        for points in zip(*(curve.values() for curve in curves.values()), strict=True)
    )
    parts: list[RenderableType] = []
    for low in range(0, len(curves), ABREAST):
        names = list(curves)[low : low + ABREAST]
        parts += [
            _table(f"Iteration, {scale.unit}", curves, names, lambda p: p.iteration_s, scale, min), Text(),
            _table("Speed-up over one rank", curves, names, lambda p: p.speedup, "{:.2f}".format, max), Text(),
            _table("Efficiency (speed-up / ranks)", curves, names, lambda p: p.efficiency, percent, max), Text(),
        ]  # fmt: skip
    return [*parts, Text("* best of all strategies at that world size."), Text()]


def _table(
    title: str,
    curves: Curves,
    names: Sequence[str],
    value: Callable[[ScalePoint], float],
    show: Callable[[float], str],
    choose: Callable[..., float],
) -> Table:
    table = columns(title, "ranks", *names)
    for size in next(iter(curves.values())):
        top = choose(value(curve[size]) for curve in curves.values())
        values = [value(curves[name][size]) for name in names]
        table.add_row(Text(f"{size:,}"), *(Text(("* " if v == top else "") + show(v)) for v in values))
    return table
