"""Predicted peak memory as tables and a chart: by training mode and kind of object."""

from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.report import chart
from anabranch.tools.report.documents import MemoryDocument
from anabranch.tools.report.formatting import plain, size
from anabranch.tools.report.tables import Cell, Table, number, terminal

GIB, MIB = 2**30, 2**20
DDP = "ddp"  # the mode with which others are compared
EXCHANGE = ("send", "receive", "workspace")  # kinds that are one column, so that 80 columns hold the table


def memory_tables(found: MemoryDocument) -> list[Table]:
    """A row per mode: the bytes by kind at the peak; then the sum, and the largest batch."""
    unit, unit_nbytes = unit_of(found)
    ddp_nbytes = found.modes[DDP].predicted_nbytes if DDP in found.modes else None
    kinds = dict.fromkeys(kind for mode in found.modes.values() for kind in mode.kinds if kind not in EXCHANGE)

    def cell(nbytes: float | None, form: str = ".2f") -> Cell:
        return number(nbytes, lambda nbytes: f"{nbytes / unit_nbytes:{form}}")

    by_kind, peaks = [], []
    for name, mode in found.modes.items():
        exchanged = sum(mode.kinds.get(kind, 0) for kind in EXCHANGE)
        by_kind.append([Cell(name), *(cell(mode.kinds.get(kind) or None) for kind in kinds), cell(exchanged or None)])
        more = None if ddp_nbytes is None else mode.predicted_nbytes - ddp_nbytes
        batch = [number(found.largest_batch.get(name))] if found.largest_batch else []
        peaks.append([Cell(name), cell(mode.predicted_nbytes), cell(more, "+.2f"), *batch])
    title = f"{found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"[:100]
    within = f", within {size(found.within_nbytes)}" if found.within_nbytes is not None else ""
    kinds_of = ["mode", *(kind.replace(" ", "\n") for kind in kinds), "exchange"]
    sums = ["mode", "predicted\npeak", "more than\nDDP", *(["largest batch\nper rank"] if found.largest_batch else [])]
    return [
        Table(f"{title}, {unit}", kinds_of, by_kind, folded=True),
        Table(f"At the peak, {unit}{within}", sums, peaks),
    ]


def memory_report(found: MemoryDocument) -> list[RenderableType]:
    """The tables, and what they assume."""
    return [*map(terminal, memory_tables(found)), Text(plain(f"Assumed: {'; '.join(found.assumptions)}."))]


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
