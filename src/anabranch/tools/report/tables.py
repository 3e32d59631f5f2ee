"""The four nouns as terminal tables that fit 80 columns."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.tools.predict.scaling.compression import about_sent
from anabranch.tools.report.documents import Durations, PlannedBucket
from anabranch.tools.report.figures import durations, samples, small_tensors
from anabranch.tools.report.formatting import bandwidth, count, label, percent, plain, seconds, size, time_scale
from anabranch.tools.report.gantt import Gantt
from anabranch.values.kinds.names import DENSE
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

MAX_ROWS = 200  # more is for --json, not for eyes
LARGEST = 8

Cells = Sequence[str | Text]


def columns(title: str, *headers: str, left: Sequence[str] = ()) -> Table:
    """A table of numbers under these headers; those in ``left`` hold words, and may fold where space is short."""
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.title_justify, table.title_style, table.caption_justify = "left", "bold", "left"
    for header in headers:
        words = header in left
        table.add_column(Text(header), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def facts(title: str, pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one pair a line."""
    table = Table(title=Text(title), box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value) if isinstance(value, str) else value)
    return table


def add_rows(table: Table, rows: Iterable[Cells], total: int, thing: str, note: str = "") -> Table:
    """The rows that fit a screenful or two; the caption says how many were left out, and has the note."""
    table.caption = Text(note) if note else None
    for index, row in enumerate(rows):
        if index == MAX_ROWS:
            left_out = f"and {count(total - MAX_ROWS, thing)} more: --json lists all"
            table.caption = Text(f"{left_out}. {note}" if note else left_out)
            break
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def trace_report(trace: Trace) -> RenderableType:
    """Where it came from, its totals, and the gradients that dominate it."""
    small = small_tensors(trace)
    small_nbytes = sum(tensor.nbytes for tensor in small)
    kinds = [part[0].dtype or f"{part[0].itemsize}-byte elements" for part in trace.by_kind()]
    pairs: list[tuple[str, str | Text]] = [
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
    pairs: list[tuple[str, str | Text]] = [
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
    tensors = sum(len(bucket.names) for bucket in plan.buckets)
    pairs = [
        ("buckets", f"{len(plan):,}, on {count(plan.lanes, 'lane')}, of {count(tensors, 'tensor')}"),
        ("fingerprint", plan.fingerprint),
    ]
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


def duration_pairs(step: Durations) -> list[tuple[str, str | Text]]:
    """The durations of a step as names and values for ``facts``."""
    return [
        ("forward", seconds(step.forward_s)),
        ("backward", seconds(step.backward_s)),
        ("communication", f"{seconds(step.communication_s)}, {percent(step.overlap)} of it hidden behind computation"),
        ("exposed", seconds(step.exposed_s)),
        ("finish", f"{seconds(step.finish_s)} after the start of backward"),
        ("iteration", seconds(step.iteration_s)),
    ]


def bucket_table(buckets: Sequence[PlannedBucket]) -> Table:
    """One row per bucket; times count from the start of backward."""
    scale = time_scale(bucket.end_s for bucket in buckets)
    times = [f"{what}\n{scale.unit}" for what in ("ready", "start", "end")]
    compressed = any(bucket.collective != DENSE for bucket in buckets)
    headers = ["#", "lane", "tensors", "size", *(["by", "sent"] if compressed else []), *times]
    table = columns("Buckets in launch order", *headers, "first tensor", left=["by", "first tensor"])
    rows: Iterable[Cells] = (
        [str(b.index), str(b.lane), f"{b.tensors:,}", size(b.nbytes), *(_way(b) if compressed else ()),
         scale(b.ready_s), scale(b.start_s), scale(b.end_s), label(b.names[0])]
        for b in buckets
    )  # fmt: skip
    return add_rows(table, rows, len(buckets), "bucket", about_sent(bucket.collective for bucket in buckets))


def _way(bucket: PlannedBucket) -> Cells:
    """By which collective a bucket travels, and what a rank sends for it."""
    return [label(bucket.collective), "-" if bucket.sent_nbytes is None else size(bucket.sent_nbytes)]


def meta_pairs(meta: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    """What a file says of its origin, harmless."""
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
