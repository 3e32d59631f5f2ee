"""Tables as values, for terminal, page and Markdown alike; and the four nouns as tables that fit 80 columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import rich.table
from rich import box
from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.predict.scaling.compression import about_sent
from anabranch.tools.report.documents import Durations, PlannedBucket
from anabranch.tools.report.figures import samples, small_tensors, timeline_figures
from anabranch.tools.report.formatting import bandwidth, count, label, percent, plain, seconds, size, time_scale
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

MAX_ROWS = 200  # more is for --json, not for eyes
LARGEST = 8

Pairs = list[tuple[str, str | Text]]


class Cell(NamedTuple):
    """One cell. Sorting goes by ``value``, or by the text where it is None; ``share``, 0 to 1, is drawn as a bar."""

    text: str
    value: float | None = None
    share: float | None = None


NONE = Cell("–", inf)  # sorts behind every number


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell is the row's name. A terminal folds a header at its line break.

    The row named ``best`` is highlighted. On a page a ``folded`` table is hidden until its title is clicked.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    best: str | None = None
    folded: bool = False


def number(value: float | None, show: Callable[[Any], str] = "{:,}".format, largest: float | None = None) -> Cell:
    """A cell that sorts by its number, with a bar for its share of ``largest``; a dash for None."""
    return NONE if value is None else Cell(show(value), value, value / largest if largest else None)


# ---------------------------------------------------------------------------------------------------------- terminal


def terminal(table: Table) -> rich.table.Table:
    """The table for a terminal: bold, with a star, is the best row; the caption says how many rows are left out."""
    first = table.rows[0] if table.rows else []
    left = [header for header, cell in zip(table.headers, first, strict=False) if cell.value is None]
    shown = columns(plain(table.title), *map(plain_lines, table.headers), left=[plain_lines(header) for header in left])
    for name, *cells in table.rows[:MAX_ROWS]:
        best = name.text == table.best
        words = [label(cell.text) if cell.value is None else Text(plain_lines(cell.text)) for cell in cells]
        shown.add_row(label(("* " if best else "") + name.text), *words, style="bold" if best else None)
    more = len(table.rows) - MAX_ROWS
    left_out = f"and {count(more, 'row')} more: --json lists all. " if more > 0 else ""
    shown.caption = Text(plain(left_out + table.caption)) if left_out or table.caption else None
    return shown


def plain_lines(text: str) -> str:
    """``text`` without control characters other than line breaks."""
    return "\n".join(plain(line) for line in text.split("\n"))


def columns(title: str, *headers: str, left: Sequence[str] = ()) -> rich.table.Table:
    """A table of numbers under these headers; those in ``left`` hold words, and may fold where space is short."""
    table = rich.table.Table(title=Text(title), box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style, table.caption_justify = "left", "bold", "left"
    for header in headers:
        words = header in left
        table.add_column(Text(header), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def facts(title: str, pairs: Iterable[tuple[str, str | Text]]) -> rich.table.Table:
    """Names and values, one pair a line."""
    table = rich.table.Table(title=Text(title), box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value) if isinstance(value, str) else value)
    return table


# ------------------------------------------------------------------------------------------------------------- nouns


def trace_report(trace: Trace) -> list[RenderableType]:
    """Where it came from, its totals, and the gradients that dominate it."""
    small = small_tensors(trace)
    small_nbytes = sum(tensor.nbytes for tensor in small)
    kinds = [part[0].dtype or f"{part[0].itemsize}-byte elements" for part in trace.by_kind()]
    pairs: Pairs = [
        ("gradients", f"{count(len(trace), 'tensor')}, {size(trace.nbytes)} ({trace.nbytes:,} bytes)"),
        ("types", label(", ".join(kinds))),
        ("forward", seconds(trace.forward_s)),
        ("backward", seconds(trace.backward_s)),
        ("under 64 KiB", f"{percent(len(small) / len(trace))} of the tensors, "
                         f"{percent(small_nbytes / max(trace.nbytes, 1))} of the bytes"),
    ]  # fmt: skip
    largest = sorted(trace.tensors, key=lambda tensor: -tensor.nbytes)[:LARGEST]
    scale = time_scale(tensor.ready_s for tensor in largest)
    rows = [
        [number(t.nbytes, size), number(t.nbytes / max(trace.nbytes, 1), percent), number(t.ready_s, scale),
         Cell(t.name)]
        for t in largest
    ]  # fmt: skip
    table = Table("Largest", ["size", "share", f"ready, {scale.unit}", "name"], rows)
    return [facts("Trace", [*pairs, *meta_pairs(trace.meta)]), terminal(table)]


def network_report(network: Network) -> list[RenderableType]:
    """Its curves with what they achieve, and what it says of simultaneous messages."""
    slowdowns = ", ".join(f"{k} at once {network.contention.slowdown(k):.3g}×" for k in (2, 3, 4))
    cap = network.contention.link_cap
    pairs: Pairs = [
        ("ranks", f"{network.world_size:,}"),
        ("costs from", _model(network.model)),
        ("transfer time", f"{slowdowns}" + ("" if cap is None else f"; link carries {cap:g}× one message")),
    ]
    parts: list[RenderableType] = [facts("Network", [*pairs, *meta_pairs(network.meta)])]
    for kind, curve in network.curves.items():
        points = samples(curve)
        scale = time_scale(s for _, s, _ in points)
        headers = ["message", f"time, {scale.unit}", f"spread, {scale.unit}", "effective"]
        rows = [[number(n, size), number(s, scale), number(spread_s or None, scale), number(s, partial(bandwidth, n))]
                for n, s, spread_s in points]  # fmt: skip
        what = "measured" if len(curve.points) > 1 else "computed"
        parts.append(terminal(Table(f"Collective {kind[:60]} ({what})", headers, rows)))
    return parts


def plan_report(plan: Plan) -> list[RenderableType]:
    """A plan by itself: it has names but no sizes and no times."""
    tensors = count(sum(len(bucket.names) for bucket in plan.buckets), "tensor")
    buckets = f"{len(plan):,}, on {count(plan.lanes, 'lane')}, of {tensors}"
    rows = [
        [number(at, str), number(b.lane, str), number(len(b.names)), Cell(b.collective), Cell(b.names[0]),
         Cell(b.names[-1])]
        for at, b in enumerate(plan.buckets)
    ]  # fmt: skip
    table = Table("Launch order", ["#", "lane", "tensors", "by", "first", "last"], rows)
    return [facts("Plan", [("buckets", buckets), ("fingerprint", plan.fingerprint)]), terminal(table)]


def timeline_report(timeline: Timeline) -> list[RenderableType]:
    """Durations, and the messages."""
    pairs = [*duration_pairs(Durations(**timeline_figures(timeline))), *meta_pairs(timeline.meta)]
    scale = time_scale(span.end_s for span in timeline.communication)
    headers = ["track", f"start, {scale.unit}", f"end, {scale.unit}", "message"]
    rows = [
        [Cell(span.track), number(span.start_s, scale), number(span.end_s, scale), Cell(span.name)]
        for span in timeline.communication
    ]
    return [facts("Timeline", pairs), terminal(Table("Messages", headers, rows))]


def duration_pairs(step: Durations) -> Pairs:
    """The durations of a step as names and values for ``facts``."""
    return [
        ("forward", seconds(step.forward_s)),
        ("backward", seconds(step.backward_s)),
        ("communication", f"{seconds(step.communication_s)}, {percent(step.overlap)} of it hidden behind computation"),
        ("exposed", seconds(step.exposed_s)),
        ("finish", f"{seconds(step.finish_s)} after the start of backward"),
        ("iteration", seconds(step.iteration_s)),
    ]


def bucket_table(title: str, buckets: Sequence[PlannedBucket]) -> Table:
    """A row per bucket, with all of its gradients; times count from the start of backward."""
    scale = time_scale(bucket.end_s or 0.0 for bucket in buckets)
    rows = [
        [
            number(b.index, str), number(b.lane, str), Cell(b.collective), number(b.tensors), number(b.nbytes, size),
            number(b.sent_nbytes, size), number(b.ready_s, scale), number(b.start_s, scale), number(b.end_s, scale),
            Cell(", ".join(b.names)),
        ]
        for b in buckets
    ]  # fmt: skip
    times = [f"{what}\n{scale.unit}" for what in ("ready", "start", "end")]
    headers = ["#", "lane", "by", "tensors", "size", "a rank\nsends", *times, "gradients"]
    return Table(title, headers, rows, about_sent(bucket.collective for bucket in buckets), folded=True)


def meta_pairs(meta: Mapping[str, Any]) -> Pairs:
    """What a file says of its origin."""
    shown = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in meta.items()}
    return [(label(key).plain, label(value)) for key, value in shown.items()]


def _model(model: AlphaBeta | TwoLevel | None) -> str:
    if model is None:
        return "curves at this world size"
    if isinstance(model, TwoLevel):
        inside, across = _model(model.inside), _model(model.across)
        return f"{count(model.ranks_per_node, 'rank')} a node; inside {inside}; across {across}"
    gbit = f"{8e-9 / model.beta_s_per_byte:.3g} Gbit/s" if model.beta_s_per_byte else "no transfer cost"
    return f"{model.algorithm}, latency {seconds(model.alpha_s)}, {gbit}"
