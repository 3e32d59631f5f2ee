"""A scaling study as terminal tables and as charts: who is best at each world size, and what every strategy reaches."""

from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.predict.scaling.conclusions import Gain, best_at_sizes, has_dense
from anabranch.tools.predict.scaling.result import DDP_DEFAULT, Curves, NetworkUsed, ScalePoint, Scaling
from anabranch.tools.report.chart import Chart, Series, axis, band, curve, hover_text, layout, log_ticks, plotly_text
from anabranch.tools.report.comparison import MEANING
from anabranch.tools.report.figures import samples
from anabranch.tools.report.formatting import Scale, count, factor, label, percent, plain, seconds, size, time_scale
from anabranch.tools.report.tables import Cell, Table, number, terminal
from anabranch.values.network import Network

HEIGHT_PX = 430
COMPRESSED = {"quantised": "best rounded", "sparse": "best sparse"}
MAX_NETWORKS = 12  # of one sweep, with a chart each


def scaling_report(scaling: Scaling) -> list[RenderableType]:
    """Who is best where, network by network; then the answer in words."""
    tables = [table for network in scaling.networks for table in _winners(scaling, network, scaling.on(network.name))]
    said = [*scaling.answer, f"Assumed: {'; '.join(scaling.assumptions)}."]
    return [*map(terminal, tables), *(Text(plain(words)) for words in said)]


def _winners(scaling: Scaling, network: NetworkUsed, curves: Curves) -> list[Table]:
    """DDP and the best dense strategy with the band of each step; then the best that round values or send some."""
    found = best_at_sizes(scaling, curves)
    # In the unit of the best: what differs little between good strategies must not drown in what a bad one takes.
    scale = time_scale(row.best.iteration_s for row in found)
    base = "DDP" if found[0].ddp.planner == DDP_DEFAULT else found[0].ddp.planner
    best = "best dense" if has_dense(scaling) else "best"
    rows = [
        [number(row.world_size), Cell(_banded(row.ddp, scale), row.ddp.iteration_s),
         *_best_cells(row.dense, row.ddp, scale), number(row.dense.efficiency, percent)]
        for row in found
    ]  # fmt: skip
    headers = ["ranks", f"{base}\n{scale.unit}", f"{best}\n{scale.unit}", f"over\n{base}", "effi-\nciency"]
    about = f"{label(network.name).plain} is {network.source}. Band: {network.spread}. Costs: {network.extrapolation}."
    tables = [Table(network.name, headers, rows, about)]
    headers, rows = ["ranks"], [[number(row.world_size)] for row in found]
    for kind in ("quantised", "sparse"):
        if getattr(found[0], kind) is not None:
            headers += [f"{COMPRESSED[kind]}\n{scale.unit}", "over\ndense", "error"]
            for cells, row in zip(rows, found, strict=True):
                point: ScalePoint = getattr(row, kind)
                cells += [*_best_cells(point, row.dense, scale), number(point.error, "{:.2g}".format)]
    if len(headers) > 1:
        tables.append(Table(f"{network.name}, compressed", headers, rows, f"Error: {MEANING}."))
    return tables


def _best_cells(point: ScalePoint, other: ScalePoint, scale: Scale) -> list[Cell]:
    """The step of a strategy, and its gain over another."""
    named = f"{label(point.planner).plain} {_banded(point, scale)}"
    return [Cell(named, point.iteration_s), number(Gain.over(point, other).middle, factor)]


def _banded(point: ScalePoint, scale: Scale) -> str:
    """The step, and under it its band where there is one."""
    low, high = scale(point.iteration_low_s), scale(point.iteration_high_s)
    return scale(point.iteration_s) + (f"\n{low}–{high}" if low != high else "")


# ----------------------------------------------------------------------------------------------------------- charts


def scaling_charts(key: str, sweep: Scaling) -> list[Chart]:
    """Iteration time over the number of ranks for each network; a line and a band per strategy."""
    return [
        _scaling_chart(f"{key}-{at}", network.name, sweep.on(network.name))
        for at, network in enumerate(sweep.networks[:MAX_NETWORKS])
    ]


def _scaling_chart(key: str, network: str, curves: Curves) -> Chart:
    points = [point for own in curves.values() for point in own.values()]
    scale = time_scale(point.iteration_s for point in points)
    data: list[Series] = []
    shown_s: list[float] = []
    for index, (strategy, by_size) in enumerate(curves.items()):
        own = sorted(by_size.values(), key=lambda point: point.world_size)
        ranks = [point.world_size for point in own]
        low, middle, high = (
            [getattr(point, name) * scale.per_second for point in own]
            for name in ("iteration_low_s", "iteration_s", "iteration_high_s")
        )
        if low != high:
            data.append(band(ranks, low, high, index, legendgroup=str(index)))
        data.append(curve(strategy, ranks, middle, [_hover(point) for point in own], index, legendgroup=str(index)))
        shown_s += [*low, *high]
    caption = f"Iteration time on {network}."
    if len(data) > len(curves):
        caption += " Bands: the range that results from the spread of the network's costs."
    sizes = sorted({point.world_size for point in points})
    ticks = sizes[:: -(-len(sizes) // 6)]  # six labels have room on a phone
    shape = layout(
        axis("ranks", type="log", tickvals=ticks, ticktext=[f"{size:,}" for size in ticks]),
        axis(f"iteration, {scale.unit} (lower is better)", type="log", **log_ticks(shown_s)),
    )
    return Chart(key, f"Predicted iteration time over the number of ranks, {network}", data, shape, HEIGHT_PX, caption)


def _hover(point: ScalePoint) -> str:
    low_s, high_s = point.iteration_low_s, point.iteration_high_s
    within = f" ({seconds(low_s)} to {seconds(high_s)})" if low_s < high_s else ""
    return hover_text(
        f"<b>{plotly_text(point.planner, 30)}</b>, {count(point.world_size, 'rank')}",
        f"{count(point.buckets, 'bucket')} on {count(point.lanes, 'lane')}",
        f"iteration {seconds(point.iteration_s)}{within}",
        f"exposed {seconds(point.exposed_s)}, efficiency {percent(point.efficiency)}",
    )


def network_chart(key: str, network: Network) -> Chart:
    """Time over message size, a line per collective; the band is the measured spread."""
    data: list[Series] = []
    drawn_ms: list[float] = []
    for index, (kind, costs) in enumerate(network.curves.items()):
        found = [sample for sample in samples(costs) if sample[0] > 0 and sample[1] > 0]
        mib = [nbytes / 2**20 for nbytes, _, _ in found]
        took_ms = [1e3 * took_s for _, took_s, _ in found]
        low = [1e3 * max(took_s - spread_s, took_s / 10) for _, took_s, spread_s in found]
        high = [1e3 * (took_s + spread_s) for _, took_s, spread_s in found]
        if high != took_ms:
            data.append(band(mib, low, high, index))
        hovers = [
            hover_text(f"<b>{plotly_text(kind, 30)}</b>, {size(nbytes)}",
                       f"{seconds(took_s)}, spread {seconds(spread_s)}",
                       f"{8e-9 * nbytes / took_s:.3g} Gbit/s of gradients")
            for nbytes, took_s, spread_s in found
        ]  # fmt: skip
        drawn_ms += [*low, *high]
        data.append(curve(kind, mib, took_ms, hovers, index, showlegend=True))
    shape = layout(
        axis("message, MiB of gradients", type="log", exponentformat="none", dtick=1),
        axis("milliseconds", type="log", **log_ticks(drawn_ms)),
    )
    return Chart(key, f"Cost of messages among {count(network.world_size, 'rank')}", data, shape, HEIGHT_PX)
