"""Predicted peak memory as a table and a chart: by training mode and kind of object."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.report.chart import (
    PATTERNS,
    Chart,
    axis,
    bar_style,
    bars,
    colour,
    hover_text,
    layout,
    plotly_text,
    points,
    rows_axis,
)
from anabranch.tools.report.documents import MemoryDocument
from anabranch.tools.report.formatting import plain, size
from anabranch.tools.report.tables import Cell, Table, number, terminal

GIB, MIB = 2**30, 2**20
DDP = "ddp"  # the mode with which others are compared
ROOM = 76  # for the columns of modes, next to the names of rows, in 100 columns
ROW_PX, EDGE_PX = 56, 170


def memory_tables(found: MemoryDocument) -> list[Table]:
    """Bytes by mode and kind at the peak, and what was measured; then the largest batch and the throughput."""
    title = f"{found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"
    tables = [_bytes_table(f"{title[:100]}, ", found)]
    rows = []
    if found.largest_batch is not None:
        rows.append([Cell("largest batch per rank"), *(number(found.largest_batch.get(mode)) for mode in found.modes)])
    if found.samples_per_s:
        speeds = (number(found.samples_per_s.get(mode), "{:.1f}".format) for mode in found.modes)
        rows.append([Cell("samples/s, all ranks"), *speeds])
    if rows:
        where = f"Within {size(found.within_nbytes)}" if found.within_nbytes is not None else "At this batch"
        tables.append(Table(where, ["", *found.modes], rows))
    return tables


def memory_report(found: MemoryDocument) -> RenderableType:
    """The tables in pieces that fit 100 columns, and what they assume."""
    parts: list[RenderableType] = []
    for table in memory_tables(found):
        for piece in pieces(table):
            parts += [terminal(piece), Text()]
    return Group(*parts, Text(plain(f"Assumed: {'; '.join(found.assumptions)}.")))


def memory_chart(key: str, found: MemoryDocument) -> Chart:
    """A stacked bar per mode, a part per kind of object; a cross where a peak was measured."""
    modes = list(found.modes)
    unit, unit_nbytes = unit_of(found)
    kinds = dict.fromkeys(kind for mode in found.modes.values() for kind in mode.kinds)
    drawn = []
    for index, kind in enumerate(kinds):
        held = [found.modes[mode].kinds.get(kind, 0) for mode in modes]
        hovers = [
            hover_text(f"<b>{plotly_text(kind)}</b>: {size(nbytes)}",
                       f"of {size(found.modes[mode].predicted_nbytes)}, {plotly_text(mode, 30)}")
            for nbytes, mode in zip(held, modes, strict=True)
        ]  # fmt: skip
        style = bar_style(colour(index), PATTERNS[index % len(PATTERNS)])
        if any(held):
            drawn.append(bars(kind, [n / unit_nbytes for n in held], range(len(modes)), hovers, style, width=0.7))
    keys = list(range(len(drawn)))
    known = [(row, mode.measured_nbytes) for row, mode in enumerate(found.modes.values()) if mode.measured_nbytes]
    if known:
        words = [f"measured peak: {size(nbytes)}" for _, nbytes in known]
        style = {"symbol": "x", "size": 12, "color": "--ink"}
        at = [nbytes / unit_nbytes for _, nbytes in known]
        drawn.append(points("measured peak", at, [row for row, _ in known], words, style))
    shape = layout(axis(f"{unit} at the peak of a step", rangemode="tozero"), rows_axis(modes, 18), barmode="stack")
    label = f"Predicted memory of {found.model} by kind of object"
    caption = f"Assumed: {'; '.join(found.assumptions)}." if found.assumptions else ""
    return Chart(key, label, drawn, shape, ROW_PX * len(modes) + EDGE_PX, caption, arrow_key_series=keys)


def unit_of(found: MemoryDocument) -> tuple[str, int]:
    """The unit for its sizes: GiB, or MiB where all are below 1 GiB."""
    peaks = [max(mode.predicted_nbytes, mode.measured_nbytes or 0) for mode in found.modes.values()]
    return ("GiB", GIB) if max(peaks, default=0) >= GIB else ("MiB", MIB)


def pieces(table: Table) -> list[Table]:
    """The table cut between columns: each piece as wide as 100 columns have room for. Unknown columns are left out."""
    known = [at for at in range(1, len(table.headers)) if any(row[at].text != "–" for row in table.rows)]
    groups: list[list[int]] = []
    left = 0
    for at in known:
        taken = max(len(table.headers[at]), len("00000.00")) + 2
        if not groups or taken > left:
            groups.append([0])
            left = ROOM
        groups[-1].append(at)
        left -= taken
    return [
        replace(table, headers=[table.headers[at] for at in own], rows=[[row[at] for at in own] for row in table.rows])
        for own in groups
    ]


def _bytes_table(title: str, found: MemoryDocument) -> Table:
    modes = found.modes
    unit, unit_nbytes = unit_of(found)

    def row(name: str, sizes: Sequence[int | None], form: str = ".2f") -> list[Cell]:
        return [Cell(name), *(number(n or None, lambda nbytes: f"{nbytes / unit_nbytes:{form}}") for n in sizes)]

    kinds = dict.fromkeys(kind for mode in modes.values() for kind in mode.kinds)
    rows = [row(kind, [mode.kinds.get(kind) for mode in modes.values()]) for kind in kinds]
    rows.append(row("predicted peak", [mode.predicted_nbytes for mode in modes.values()]))
    if DDP in modes and len(modes) > 1:
        rows.append(
            row("more than DDP", [m.predicted_nbytes - modes[DDP].predicted_nbytes for m in modes.values()], "+.2f")
        )
    if any(mode.measured_nbytes for mode in modes.values()):
        rows.append(row("measured peak", [mode.measured_nbytes for mode in modes.values()]))
        errors = (m.predicted_nbytes / m.measured_nbytes - 1 if m.measured_nbytes else None for m in modes.values())
        rows.append([Cell("predicted, off by"), *(number(error, "{:+.1%}".format) for error in errors)])
    if any(mode.host_nbytes for mode in modes.values()):
        rows.append(row("in host memory", [mode.host_nbytes for mode in modes.values()]))
    return Table(f"{title}{unit}", ["", *modes], rows, folded=True)
