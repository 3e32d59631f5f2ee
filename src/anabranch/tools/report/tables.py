"""Tables as values, for terminal, page and Markdown alike; and the four nouns as tables that fit 80 columns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import rich.table
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from anabranch.tools.predict.scaling.compression import about_sent
from anabranch.tools.report.documents import Durations, PlannedBucket
from anabranch.tools.report.figures import durations, samples, small_tensors
from anabranch.tools.report.formatting import bandwidth, count, label, percent, plain, seconds, size, time_scale
from anabranch.values.kinds.names import DENSE
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import COMPUTE, Timeline
from anabranch.values.trace import Trace

MAX_ROWS = 200  # more is for --json, not for eyes
LARGEST = 8
MAX_WIDTH = 110  # of a drawn timeline
MAX_TRACKS = 65  # the lanes of the largest plan, and the computation
MAX_LABEL = 12

Cells = Sequence[str | Text]
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
    """The table for a terminal: bold, with a star, is the best row."""
    shown = columns(plain(table.title), *(plain_lines(header) for header in table.headers), left=table.headers[:1])
    for name, *cells in table.rows:
        best = name.text == table.best
        first = label(("* " if best else "") + name.text)
        shown.add_row(first, *(Text(plain_lines(cell.text)) for cell in cells), style="bold" if best else None)
    shown.caption = Text(plain(table.caption)) if table.caption else None
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


def add_rows(
    table: rich.table.Table, rows: Iterable[Cells], total: int, thing: str, note: str = ""
) -> rich.table.Table:
    """The rows that fit a screenful or two; the caption says how many were left out, and has the note."""
    table.caption = Text(note) if note else None
    for index, row in enumerate(rows):
        if index == MAX_ROWS:
            left_out = f"and {count(total - MAX_ROWS, thing)} more: --json lists all"
            table.caption = Text(f"{left_out}. {note}" if note else left_out)
            break
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


# ------------------------------------------------------------------------------------------------------------- nouns


def trace_report(trace: Trace) -> RenderableType:
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
    table = columns("Largest", "size", "share", f"ready, {scale.unit}", "name", left=["name"])
    for tensor in largest:
        share = percent(tensor.nbytes / max(trace.nbytes, 1))
        table.add_row(size(tensor.nbytes), share, scale(tensor.ready_s), label(tensor.name))
    return Group(facts("Trace", [*pairs, *meta_pairs(trace.meta)]), Text(), table)


def network_report(network: Network) -> RenderableType:
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
        spread = any(spread_s for _, _, spread_s in points)
        headers = ["message", f"time, {scale.unit}", *([f"spread, {scale.unit}"] if spread else []), "effective"]
        what = "measured" if len(curve.points) > 1 else "computed"
        table = columns(f"Collective {plain(kind)[:60]} ({what})", *headers)
        rows = (
            [size(n), scale(s), *([scale(spread_s)] if spread else []), bandwidth(n, s)] for n, s, spread_s in points
        )
        add_rows(table, rows, len(points), "point")
        parts += [Text(), table]
    return Group(*parts)


def plan_report(plan: Plan) -> RenderableType:
    """A plan by itself: it has names but no sizes and no times."""
    tensors = count(sum(len(bucket.names) for bucket in plan.buckets), "tensor")
    buckets = f"{len(plan):,}, on {count(plan.lanes, 'lane')}, of {tensors}"
    pairs = [("buckets", buckets), ("fingerprint", plan.fingerprint)]
    table = columns("Launch order", "#", "lane", "tensors", "by", "first", "last", left=["by", "first", "last"])
    rows: Iterable[Cells] = (
        [str(i), str(b.lane), str(len(b.names)), label(b.collective), label(b.names[0]), label(b.names[-1])]
        for i, b in enumerate(plan.buckets)
    )
    return Group(facts("Plan", pairs), Text(), add_rows(table, rows, len(plan), "bucket"))


def timeline_report(timeline: Timeline) -> RenderableType:
    """Durations, and the step drawn in characters."""
    pairs = [*duration_pairs(durations(timeline)), *meta_pairs(timeline.meta)]
    return Group(facts("Timeline", pairs), Text(), Gantt(timeline))


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


def bucket_table(buckets: Sequence[PlannedBucket]) -> rich.table.Table:
    """One row per bucket; times count from the start of backward."""
    scale = time_scale(bucket.end_s for bucket in buckets)
    times = [f"{what}\n{scale.unit}" for what in ("ready", "start", "end")]
    compressed = any(bucket.collective != DENSE for bucket in buckets)
    headers = ["#", "lane", "tensors", "size", *(["by", "sent"] if compressed else []), *times]
    table = columns("Buckets in launch order", *headers, "first tensor", left=["by", "first tensor"])
    rows: Iterable[Cells] = (
        [str(b.index), str(b.lane), f"{b.tensors:,}", size(b.nbytes), *(_exchange(b) if compressed else ()),
         scale(b.ready_s), scale(b.start_s), scale(b.end_s), label(b.names[0])]
        for b in buckets
    )  # fmt: skip
    return add_rows(table, rows, len(buckets), "bucket", about_sent(bucket.collective for bucket in buckets))


def _exchange(bucket: PlannedBucket) -> Cells:
    """The collective of a bucket, and what a rank sends for it."""
    return [label(bucket.collective), "-" if bucket.sent_nbytes is None else size(bucket.sent_nbytes)]


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


class Gantt:
    """A timeline drawn in characters: ``f`` is forward, ``b`` backward, a digit the last one of a message's number.

    A column shows the last span that touches it, so that a message shorter than a column is still seen.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._origin_s = min(span.start_s for span in timeline.spans)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        tracks = list(dict.fromkeys(span.track for span in self._timeline.spans))
        shown = [COMPUTE, *(track for track in tracks if track != COMPUTE)][:MAX_TRACKS]
        gutter = min(MAX_LABEL, max(len(plain(track)) for track in shown))
        width = max(10, min(options.max_width, MAX_WIDTH) - gutter - 2)
        lines = self.lines(width)
        for track in shown:
            yield Text(f"{plain(track)[:gutter]:<{gutter}}  {lines[track]}", no_wrap=True)
        yield Text(" " * (gutter + 2) + self._axis(width), no_wrap=True)
        yield Text("f forward, b backward, 0-9 a message (last digit of its number), . idle")
        if len(tracks) > len(shown):
            yield Text(f"and {len(tracks) - len(shown)} more tracks")

    def lines(self, width: int) -> dict[str, str]:
        """Each track in ``width`` characters."""
        rows: dict[str, list[str]] = {}
        messages = 0
        for span in self._timeline.spans:
            if span.track == COMPUTE:
                mark = span.name[:1] if span.name.startswith(("forward", "backward")) else "#"
            else:
                mark, messages = str(messages % 10), messages + 1
            row = rows.setdefault(span.track, ["."] * width)
            first = min(self._column(span.start_s, width), width - 1)
            last = min(width, max(self._column(span.end_s, width), first + 1))
            row[first:last] = mark * (last - first)
        return {track: "".join(row) for track, row in rows.items()}

    def _column(self, at_s: float, width: int) -> int:
        whole_s = self._timeline.iteration_s
        return int((at_s - self._origin_s) / whole_s * width) if whole_s > 0 else 0

    def _axis(self, width: int) -> str:
        left, right = seconds(self._origin_s), seconds(self._timeline.finish_s)
        zero = self._column(0.0, width)
        axis = f"{left}{right:>{max(1, width - len(left))}}"
        if self._origin_s < 0 and len(left) < zero < width - len(right) - 1:
            axis = axis[:zero] + "0" + axis[zero + 1 :]
        return axis
