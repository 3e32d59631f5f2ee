"""A scaling study as terminal tables and as charts: who is best at each world size, and what every strategy reaches."""

from collections.abc import Callable, Sequence
from itertools import chain, groupby
from math import inf
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.predict.scaling.conclusions import Gain, best_at_sizes, has_dense
from anabranch.tools.predict.scaling.named_planners import DDP_DEFAULT
from anabranch.tools.predict.scaling.result import Curves, NetworkUsed, ScalePoint, Scaling
from anabranch.tools.report.chart import Chart, Series, axis, band, curve, hover_text, layout, log_ticks, plotly_text
from anabranch.tools.report.comparison import MEANING, error_of
from anabranch.tools.report.documents import MAX_NUMBER
from anabranch.tools.report.figures import samples
from anabranch.tools.report.formatting import Scale, count, factor, label, percent, plain, seconds, size, time_scale
from anabranch.tools.report.tables import columns
from anabranch.values.network import Network

STRATEGIES_PER_TABLE = 5  # that 80 columns hold
HEIGHT_PX = 430
MAX_NETWORKS = 12  # of one sweep, with two charts each
FLATTENS = 4.0  # times DDP's iteration: a slower line would press all others together, and is shown by a click only
WORDS = {  # what the less known strategies are
    "per_tensor": "no merging", "single": "one message", "by_bytes": "DDP's buckets", "optimal": "exact plan",
    "lanes": "several messages at once",
}  # fmt: skip


def scaling_report(scaling: Scaling) -> RenderableType:
    """Who is best where, network by network; of a single network also every strategy; then the answer in words."""
    parts: list[RenderableType] = []
    for network in scaling.networks:
        curves = scaling.on(network.name)
        if len(scaling.networks) == 1:
            parts += _all_strategies(curves)
        parts += _winners(scaling, network, curves)
    parts += [Text(plain(said) + "\n") for said in scaling.answer]
    return Group(*parts, Text(plain(f"Assumed: {'; '.join(scaling.assumptions)}.")))


def _winners(scaling: Scaling, network: NetworkUsed, curves: Curves) -> list[RenderableType]:
    """DDP and the best dense strategy with the band of each step; then the best that round values or send some."""
    found = best_at_sizes(scaling, curves)
    # In the unit of the best: what differs little between good strategies must not drown in what a bad one takes.
    scale = time_scale(row.best.iteration_s for row in found)
    base = "DDP" if found[0].ddp.planner == DDP_DEFAULT else plain(found[0].ddp.planner)
    best = "best dense" if has_dense(scaling) else "best"
    name = plain(network.name)
    table = columns(
        name, "ranks", *(f"{what}\n{scale.unit}" for what in (base, best)), f"over\n{base}", "effi-\nciency"
    )
    for row in found:
        cells = [f"{row.world_size:,}", _banded(row.ddp, scale), *_best_cells(row.dense, row.ddp, scale)]
        table.add_row(*map(Text, cells))
    parts: list[RenderableType] = [table, Text()]
    kinds = [kind for kind in ("quantised", "sparse") if getattr(found[0], kind) is not None]
    if kinds:
        words = {"quantised": "best rounded", "sparse": "best sparse"}
        headers = [(f"{words[kind]}\n{scale.unit}", "over\ndense", "effi-\nciency") for kind in kinds]
        table = columns(f"{name}, compressed", "ranks", *chain.from_iterable(headers))
        for row in found:
            best_of = [_best_cells(getattr(row, kind), row.dense, scale) for kind in kinds]
            table.add_row(*map(Text, [f"{row.world_size:,}", *chain.from_iterable(best_of)]))
        parts += [table, Text()]
    if said := _errors(scaling, curves):
        parts += [Text(plain(f"Error, {MEANING}: {'; '.join(said)}.")), Text()]
    about = f"{label(name).plain} is {network.source}. Band: {network.spread}. Costs: {network.extrapolation}."
    return [*parts, Text(plain(about)), Text()]


def _errors(scaling: Scaling, curves: Curves) -> list[str]:
    """How lossy the plan of every strategy with compressed buckets is; nothing where no error is known."""
    said = []
    for strategy in scaling.strategies:
        points = curves[strategy.name].values()
        if strategy.sends == "dense" or any(point.error is None for point in points):
            continue
        alike = [(shown, [point.world_size for point in some]) for shown, some in groupby(points, error_of)]
        ranges = [" to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1]))) for _, sizes in alike]
        where = [f"{shown} at {sizes} ranks" for (shown, _), sizes in zip(alike, ranges, strict=True)]
        said.append(f"{label(strategy.name).plain} {', '.join(where) if len(alike) > 1 else alike[0][0]}")
    return said


def _best_cells(point: ScalePoint, other: ScalePoint, scale: Scale) -> list[str]:
    """The step of a strategy, its gain over another, and its efficiency."""
    named = f"{label(point.planner).plain} {_banded(point, scale)}"
    return [named, factor(Gain.over(point, other).middle), percent(point.efficiency)]


def _banded(point: ScalePoint, scale: Scale) -> str:
    """The step, and under it its band where there is one."""
    low, high = scale(point.iteration_low_s), scale(point.iteration_high_s)
    return scale(point.iteration_s) + (f"\n{low}–{high}" if low != high else "")


def _all_strategies(curves: Curves) -> list[RenderableType]:
    """One table each for iteration time, speed-up over one rank, and efficiency; the best of a row has a star."""
    sizes = list(next(iter(curves.values())))
    scale = time_scale(min(curve[ranks].iteration_s for curve in curves.values()) for ranks in sizes)
    views: list[tuple[str, str, Callable[[float], str], Callable[..., float]]] = [
        (f"Iteration, {scale.unit}", "iteration_s", scale, min),
        ("Speed-up over one rank", "speedup", "{:.2f}".format, max),
        ("Efficiency (speed-up / ranks)", "efficiency", percent, max),
    ]
    parts: list[RenderableType] = []
    for low in range(0, len(curves), STRATEGIES_PER_TABLE):
        names = list(curves)[low : low + STRATEGIES_PER_TABLE]
        for title, field, show, choose in views:
            table = columns(title, "ranks", *names)
            for ranks in sizes:
                values = {name: getattr(curve[ranks], field) for name, curve in curves.items()}
                top = choose(values.values())
                shown = (("* " if values[name] == top else "") + show(values[name]) for name in names)
                table.add_row(Text(f"{ranks:,}"), *map(Text, shown))
            parts += [table, Text()]
    return [*parts, Text("* best of all strategies at that world size."), Text()]


# ----------------------------------------------------------------------------------------------------------- charts


def scaling_charts(key: str, sweep: Scaling) -> list[Chart]:
    """Iteration time and efficiency over the number of ranks for each network; a line and a band per strategy."""
    names = [strategy.name for strategy in sweep.strategies]
    return [
        chart
        for at, network in enumerate(sweep.networks[:MAX_NETWORKS])
        for chart in _network_charts(f"{key}-{at}", network.name, sweep.on(network.name), names)
    ]


def _network_charts(key: str, network: str, curves: Curves, strategies: Sequence[str]) -> list[Chart]:
    points = [point for own in curves.values() for point in own.values()]
    hidden = flattening(points)
    scale = time_scale(point.iteration_s for point in points)
    iterations: list[Series] = []
    shares: list[Series] = []
    for index, strategy in enumerate(strategies):
        own = sorted(curves[strategy].values(), key=lambda point: point.world_size)
        more: dict[str, Any] = {"legendgroup": str(index)}
        if strategy in hidden:
            more["visible"] = "legendonly"
        ranks = [point.world_size for point in own]
        if any(point.iteration_low_s < point.iteration_high_s for point in own):
            low, high = ([edges[at] * scale.per_second for edges in map(_band_s, own)] for at in (0, 1))
            iterations.append(band(ranks, low, high, index, **more))
            low, high = ([_percents(point.efficiencies[at]) for point in own] for at in (0, 1))
            shares.append(band(ranks, low, high, index, **more))
        name = f"{strategy} ({WORDS[strategy]})" if strategy in WORDS else strategy
        hovers = [_hover(point) for point in own]
        iterations.append(curve(name, ranks, [p.iteration_s * scale.per_second for p in own], hovers, index, **more))
        shares.append(curve(name, ranks, [_percents(point.efficiency) for point in own], hovers, index, **more))
    banded = len(iterations) > len(strategies)
    caption = "Bands: the range that results from the spread of the network's costs." if banded else ""
    if hidden:
        caption += f" Not shown until its name is clicked, since it is far slower: {', '.join(sorted(hidden))}."
    shown_s = [at for point in points if point.planner not in hidden for at in _band_s(point)]
    ticks = log_ticks([at * scale.per_second for at in shown_s])
    time_axis = axis(f"iteration, {scale.unit} (lower is better)", type="log", **ticks)
    share_axis = axis("speed-up / ranks, % (higher is better)", rangemode="tozero", ticksuffix=" %")
    charts = []
    for what, data, y in (("iteration time", iterations, time_axis), ("efficiency", shares, share_axis)):
        label = f"Predicted {what} over the number of ranks, {network}"
        shape = layout(_ranks_axis(points), y)
        charts.append(Chart(f"{key}-{what.partition(' ')[0]}", label, data, shape, HEIGHT_PX, caption,
                            f"{network}: {what}", half_width=True))  # fmt: skip
    return charts


def flattening(points: Sequence[ScalePoint]) -> set[str]:
    """The strategies so much slower than DDP's buckets, at any size, that nobody could tell the others apart."""
    ddp_s = {point.world_size: point.iteration_s for point in points if point.planner == DDP_DEFAULT}
    return {point.planner for point in points if point.iteration_s > FLATTENS * ddp_s.get(point.world_size, inf)}


def _band_s(point: ScalePoint) -> tuple[float, float]:
    return point.iteration_low_s, point.iteration_high_s


def _percents(share: float) -> float:
    """In percent, within the range of an axis."""
    return min(max(100 * share, -MAX_NUMBER), MAX_NUMBER)


def _hover(point: ScalePoint) -> str:
    low_s, high_s = _band_s(point)
    within = f" ({seconds(low_s)} to {seconds(high_s)})" if low_s < high_s else ""
    return hover_text(
        f"<b>{plotly_text(point.planner, 30)}</b>, {count(point.world_size, 'rank')}",
        f"{count(point.buckets, 'bucket')} on {count(point.lanes, 'lane')}",
        f"iteration {seconds(point.iteration_s)}{within}",
        f"exposed {seconds(point.exposed_s)}, efficiency {percent(point.efficiency)}",
    )


def _ranks_axis(points: Sequence[ScalePoint]) -> dict[str, Any]:
    sizes = sorted({point.world_size for point in points})
    ticks = sizes[:: -(-len(sizes) // 6)]  # six labels have room on a phone
    return axis("ranks", type="log", tickvals=ticks, ticktext=[f"{size:,}" for size in ticks])


def network_chart(key: str, network: Network) -> Chart:
    """Time over message size, a line per collective; the band is the measured spread."""
    data: list[Series] = []
    drawn_ms: list[float] = []
    for index, (kind, costs) in enumerate(network.curves.items()):
        found = [sample for sample in samples(costs) if sample[0] > 0 and sample[1] > 0]
        mib = [nbytes / 2**20 for nbytes, _, _ in found]
        if any(spread_s for _, _, spread_s in found):
            low = [1e3 * max(took_s - spread_s, took_s / 10) for _, took_s, spread_s in found]
            high = [1e3 * (took_s + spread_s) for _, took_s, spread_s in found]
            drawn_ms += [*low, *high]
            data.append(band(mib, low, high, index))
        hovers = [
            hover_text(f"<b>{plotly_text(kind, 30)}</b>, {size(nbytes)}",
                       f"{seconds(took_s)}, spread {seconds(spread_s)}",
                       f"{8e-9 * nbytes / took_s:.3g} Gbit/s of gradients")
            for nbytes, took_s, spread_s in found
        ]  # fmt: skip
        took_ms = [1e3 * took_s for _, took_s, _ in found]
        drawn_ms += took_ms
        data.append(curve(kind, mib, took_ms, hovers, index, showlegend=True))
    shape = layout(
        axis("message, MiB of gradients", type="log", exponentformat="none", dtick=1),
        axis("milliseconds", type="log", **log_ticks(drawn_ms)),
    )
    return Chart(key, f"Cost of messages among {count(network.world_size, 'rank')}", data, shape, HEIGHT_PX - 40)
