"""Scaling curves with their bands, and what messages cost on a network."""

from collections.abc import Sequence
from math import floor, inf, log10
from typing import Any

from anabranch.tools.predict.scaling.line_up import DDP_DEFAULT
from anabranch.tools.predict.scaling.result import NetworkUsed, ScalePoint, Scaling
from anabranch.tools.report.documents import MAX_NUMBER
from anabranch.tools.report.figures import samples
from anabranch.tools.report.formatting import count, percent, seconds, size, time_scale
from anabranch.tools.report.html.chart import Chart, Series, band, line, marker
from anabranch.tools.report.html.escaping import hover_text, plotly_text
from anabranch.values.network import Network

HEIGHT_PX = 430
MAX_NETWORKS = 12  # of one sweep, with two charts each
FLATTENS = 4.0  # times DDP's iteration: a slower line would press all others together, and is shown by a click only
WORDS = {  # what the less known strategies are
    "per_tensor": "no merging", "single": "one message", "by_bytes": "DDP's buckets", "optimal": "exact plan",
    "lanes": "several messages at once",
}  # fmt: skip


def scaling_charts(key: str, sweep: Scaling) -> list[Chart]:
    """Iteration time and efficiency over the number of ranks for each network; a line and a band per strategy."""
    charts = []
    for at, network in enumerate(sweep.networks[:MAX_NETWORKS]):
        points = [point for point in sweep.points if point.network == network.name]
        charts += _network_charts(f"{key}-{at}", network, points, [strategy.name for strategy in sweep.strategies])
    return charts


def _network_charts(
    key: str, network: NetworkUsed, points: Sequence[ScalePoint], strategies: Sequence[str]
) -> list[Chart]:
    hidden = flattening(points)
    scale = time_scale(point.iteration_s for point in points)
    iterations: list[Series] = []
    shares: list[Series] = []
    for index, strategy in enumerate(strategies):
        own = sorted((p for p in points if p.planner == strategy), key=lambda p: p.world_size)
        ranks = [point.world_size for point in own]
        words = f" ({WORDS[strategy]})" if strategy in WORDS else ""
        visible = {"visible": "legendonly"} if strategy in hidden else {}
        look = {"type": "scatter", "mode": "lines+markers", "x": ranks, "name": plotly_text(strategy, 30) + words,
                "legendgroup": str(index), "line": line(index), "marker": marker(index),
                "customdata": [_hover(point) for point in own],
                "hovertemplate": "%{customdata}<extra></extra>", **visible}  # fmt: skip
        if any(point.iteration_low_s < point.iteration_high_s for point in own):
            low = [point.iteration_low_s * scale.per_second for point in own]
            high = [point.iteration_high_s * scale.per_second for point in own]
            iterations.append({**band(ranks, low, high, index, legendgroup=str(index)), **visible})
            worst, best = zip(*(point.efficiencies for point in own), strict=True)
            edges = [_percents(v) for v in worst], [_percents(v) for v in best]
            shares.append({**band(ranks, *edges, index, legendgroup=str(index)), **visible})
        iterations.append({**look, "y": [point.iteration_s * scale.per_second for point in own]})
        shares.append({**look, "y": [_percents(point.efficiency) for point in own]})
    sizes, banded = sorted({point.world_size for point in points}), len(iterations) > len(strategies)
    shown = [point for point in points if point.planner not in hidden]
    times = [at * scale.per_second for point in shown for at in (point.iteration_low_s, point.iteration_high_s)]
    time = _layout(f"iteration, {scale.unit} (lower is better)", sizes, times, logarithmic=True)
    share = _layout("speed-up / ranks, % (higher is better)", sizes, [])
    bands = "Bands: the range that results from the spread of the network's costs." if banded else ""
    if hidden:
        bands += f" Not shown until its name is clicked, since it is far slower: {', '.join(sorted(hidden))}."
    charts = []
    for what, data, layout in (("iteration time", iterations, time), ("efficiency", shares, share)):
        arrow_key_series = [at for at, trace in enumerate(data) if trace.get("hoverinfo") != "skip"]
        label = f"Predicted {what} over the number of ranks, {network.name}"
        title, place = f"{network.name}: {what}", f"{key}-{what.partition(' ')[0]}"
        charts.append(Chart(place, label, data, layout, HEIGHT_PX, bands, arrow_key_series, title, half_width=True))
    return charts


def flattening(points: Sequence[ScalePoint]) -> set[str]:
    """The strategies so much slower than DDP's buckets, at any size, that nobody could tell the others apart."""
    ddp_s = {point.world_size: point.iteration_s for point in points if point.planner == DDP_DEFAULT}
    return {point.planner for point in points if point.iteration_s > FLATTENS * ddp_s.get(point.world_size, inf)}


def _percents(share: float) -> float:
    """In percent, within the range of an axis."""
    return min(max(100 * share, -MAX_NUMBER), MAX_NUMBER)


def _hover(point: ScalePoint) -> str:
    low_s, high_s = point.iteration_low_s, point.iteration_high_s
    within = f" ({seconds(low_s)} to {seconds(high_s)})" if low_s < high_s else ""
    return hover_text(
        f"<b>{plotly_text(point.planner, 30)}</b>, {count(point.world_size, 'rank')}",
        f"{count(point.buckets, 'bucket')} on {count(point.lanes, 'lane')}",
        f"iteration {seconds(point.iteration_s)}{within}",
        f"exposed {seconds(point.exposed_s)}, efficiency {percent(point.efficiency)}",
    )


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2, 5, 10 … over the range of these values; at more or at fewer where it is narrow or wide."""
    drawable = [value for value in values if 0 < value < inf] or [1.0]
    low, high = min(drawable), max(drawable)
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 4 * low else (1, 2, 5) if high < 200 * low else (1,)
    exponents = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}


def _layout(title: str, sizes: Sequence[int], values: Sequence[float], logarithmic: bool = False) -> dict[str, Any]:
    every = -(-len(sizes) // 6)  # keeps labels apart on a phone
    ticks = sizes[::every]
    y: dict[str, Any] = {"title": {"text": title}}
    y |= {"type": "log", **log_ticks(values)} if logarithmic else {"rangemode": "tozero", "ticksuffix": " %"}
    return {
        "hovermode": "closest",
        "xaxis": {"type": "log", "title": {"text": "ranks"}, "tickvals": ticks, "ticktext": [f"{n:,}" for n in ticks]},
        "yaxis": y,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }


def network_chart(key: str, network: Network) -> Chart:
    """Time over message size, a line per collective; the band is the measured spread."""
    data: list[Series] = []
    drawn_ms: list[float] = []
    for index, (kind, curve) in enumerate(network.curves.items()):
        points = [
            (nbytes, took_s, spread_s) for nbytes, took_s, spread_s in samples(curve) if nbytes > 0 and took_s > 0
        ]
        if any(spread_s for _, _, spread_s in points):
            low = [1e3 * max(took_s - spread_s, took_s / 10) for _, took_s, spread_s in points]
            high = [1e3 * (took_s + spread_s) for _, took_s, spread_s in points]
            drawn_ms += [*low, *high]
            data.append(band([nbytes / 2**20 for nbytes, _, _ in points], low, high, index))
        drawn_ms += [1e3 * took_s for _, took_s, _ in points]
        hover = [
            hover_text(
                f"<b>{plotly_text(kind, 30)}</b>, {size(nbytes)}",
                f"{seconds(took_s)}, spread {seconds(spread_s)}",
                f"{8e-9 * nbytes / took_s:.3g} Gbit/s of gradients",
            )
            for nbytes, took_s, spread_s in points
        ]
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": plotly_text(kind, 30), "line": line(index),
            "marker": marker(index), "x": [nbytes / 2**20 for nbytes, _, _ in points],
            "y": [1e3 * took_s for _, took_s, _ in points], "customdata": hover,
            "hovertemplate": "%{customdata}<extra></extra>", "showlegend": True,
        })  # fmt: skip
    layout = {
        "hovermode": "closest",
        "xaxis": {"type": "log", "title": {"text": "message, MiB of gradients"}, "exponentformat": "none", "dtick": 1},
        "yaxis": {"type": "log", "title": {"text": "milliseconds"}, **log_ticks(drawn_ms)},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    label = f"Cost of messages among {count(network.world_size, 'rank')}"
    arrow_key_series = [at for at, trace in enumerate(data) if trace.get("hoverinfo") != "skip"]
    return Chart(key, label, data, layout, HEIGHT_PX - 40, "", arrow_key_series)
