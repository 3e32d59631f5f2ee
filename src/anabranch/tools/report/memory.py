"""Predicted peak memory as tables and a chart: by training mode and kind of object."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.report import chart
from anabranch.tools.report.documents import MemoryDocument, MemoryMode
from anabranch.tools.report.formatting import plain, size
from anabranch.tools.report.tables import Cell, Table, number, terminal

GIB, MIB = 2**30, 2**20
DDP = "ddp"  # the mode with which others are compared
EXCHANGE = ("send", "receive", "workspace")  # kinds that are one column, so that 80 columns hold the table

Column = tuple[str, Callable[[str, MemoryMode], float | None], Callable[[Any], str]]  # header, value, how it is shown


def memory_tables(found: MemoryDocument) -> list[Table]:
    """A row per mode: the bytes by kind at the peak; then the sum, and the largest batch."""
    title = f"{found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"[:100]
    unit, unit_nbytes = unit_of(found)
    ddp_nbytes = found.modes[DDP].predicted_nbytes if DDP in found.modes and len(found.modes) > 1 else None
    batches = found.largest_batch or {}

    def sizes(form: str) -> Callable[[float], str]:
        return lambda nbytes: f"{nbytes / unit_nbytes:{form}}"

    def held(header: str, *kinds: str) -> Column:
        return header, lambda _, mode: sum(mode.kinds.get(kind, 0) for kind in kinds) or None, sizes(".2f")

    def above_ddp(_: str, mode: MemoryMode) -> float | None:
        return None if ddp_nbytes is None else mode.predicted_nbytes - ddp_nbytes

    more: list[Column] = [
        ("predicted\npeak", lambda _, mode: mode.predicted_nbytes, sizes(".2f")),
        ("more than\nDDP", above_ddp, sizes("+.2f")),
        ("largest batch\nper rank", lambda name, _: batches.get(name), "{:,}".format),
    ]
    kinds = dict.fromkeys(kind for mode in found.modes.values() for kind in mode.kinds if kind not in EXCHANGE)
    columns = [*(held(kind.replace(" ", "\n"), kind) for kind in kinds), held("exchange", *EXCHANGE)]
    known = [column for column in more if any(column[1](*item) is not None for item in found.modes.items())]
    within = f", within {size(found.within_nbytes)}" if found.within_nbytes is not None else ""
    return [
        _table(f"{title}, {unit}", columns, found.modes, folded=True),
        _table(f"At the peak, {unit}{within}", known, found.modes),
    ]


def _table(title: str, columns: list[Column], modes: Mapping[str, MemoryMode], folded: bool = False) -> Table:
    rows = [
        [Cell(name), *(number(value(name, mode), show) for _, value, show in columns)] for name, mode in modes.items()
    ]
    return Table(title, ["mode", *(header for header, _, _ in columns)], rows, folded=folded)


def memory_report(found: MemoryDocument) -> RenderableType:
    """The tables, and what they assume."""
    first, second = map(terminal, memory_tables(found))
    return Group(first, Text(), second, Text(), Text(plain(f"Assumed: {'; '.join(found.assumptions)}.")))


def memory_chart(key: str, found: MemoryDocument) -> chart.Chart:
    """A stacked bar per mode, a part per kind of object."""
    unit, unit_nbytes = unit_of(found)
    kinds = dict.fromkeys(kind for mode in found.modes.values() for kind, nbytes in mode.kinds.items() if nbytes)
    rows, parts = range(len(found.modes)), []
    for index, kind in enumerate(kinds):
        held = [mode.kinds.get(kind, 0) for mode in found.modes.values()]
        hovers = [f"<b>{chart.plotly_text(kind)}</b>: {size(nbytes)}" for nbytes in held]
        style = chart.bar_style(chart.colour(index), chart.PATTERNS[index % len(chart.PATTERNS)])
        parts.append(chart.bars(kind, [nbytes / unit_nbytes for nbytes in held], rows, hovers, style))
    label = f"Predicted memory of {found.model} by kind of object"
    caption = f"Assumed: {'; '.join(found.assumptions)}." if found.assumptions else ""
    return chart.bar_chart((key, label, caption), f"{unit} at the peak of a step", list(found.modes), parts)


def unit_of(found: MemoryDocument) -> tuple[str, int]:
    """The unit for its sizes: GiB, or MiB where all are below 1 GiB."""
    largest = max((mode.predicted_nbytes for mode in found.modes.values()), default=0)
    return ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
