"""Peak memory as a terminal table: a column per way to train, a row per kind of object."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from anabranch.tools.report.formatting import plain
from anabranch.tools.report.tables import columns

GIB, MIB = 2**30, 2**20
DDP = "ddp"  # the mode with which others are compared
ROOM = 76  # for the names of modes, beside those of rows, in 100 columns


def unit(largest_nbytes: int) -> tuple[str, int]:
    """The unit for sizes up to this one: GiB, or MiB where all are below 1 GiB."""
    return ("GiB", GIB) if largest_nbytes >= GIB else ("MiB", MIB)


def abreast(modes: Sequence[str]) -> list[list[str]]:
    """The modes in groups, in their order: as many in each as 100 columns have room for."""
    groups: list[list[str]] = []
    left = 0
    for mode in modes:
        taken = max(len(mode), len("00000.00")) + 2
        if not groups or taken > left:
            groups.append([])
            left = ROOM
        groups[-1].append(mode)
        left -= taken
    return groups


def memory_report(
    title: str,
    kinds: Mapping[str, Mapping[str, int]],
    host: Mapping[str, int],
    measured: Mapping[str, int],
    shown: Sequence[str] | None = None,
) -> Table:
    """Predicted bytes by mode and kind, their sum, and beside it the measured peak where there is one.

    shown   the modes that this table is of; all if None
    """
    modes = list(kinds) if shown is None else shown
    peaks = {mode: sum(kinds[mode].values()) for mode in kinds}
    name, size = unit(max([*peaks.values(), *measured.values()]))

    def cell(nbytes: int) -> Text:
        return Text(f"{nbytes / size:.2f}" if nbytes else "-")

    table = columns(f"{plain(title)[:100]}, {name}", "", *modes, left=[""])
    for kind in next(iter(kinds.values())):
        table.add_row(Text(kind), *(cell(kinds[mode][kind]) for mode in modes))
    table.add_section()
    table.add_row(Text("predicted peak"), *(cell(peaks[mode]) for mode in modes))
    if DDP in peaks and len(peaks) > 1:
        table.add_row(Text("more than DDP"), *(Text(_more(peaks[mode] - peaks[DDP], size)) for mode in modes))
    if measured:
        table.add_row(Text("measured peak"), *(cell(measured.get(mode, 0)) for mode in modes))
        cells = [_error(peaks[mode], measured.get(mode, 0)) for mode in modes]
        table.add_row(Text("predicted, off by"), *map(Text, cells))
    if any(host.values()):
        table.add_row(Text("in host memory"), *(cell(host.get(mode, 0)) for mode in modes))
    return table


def batch_report(title: str, modes: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> Table:
    """Largest batches and throughputs: a row of texts per name, a column per mode."""
    table = columns(plain(title)[:100], "", *modes, left=[""])
    for name, cells in rows.items():
        table.add_row(Text(name), *(Text(cells.get(mode, "-")) for mode in modes))
    return table


def _more(nbytes: int, size: int) -> str:
    return f"{nbytes / size:+.2f}" if nbytes else "-"


def _error(predicted: int, measured: int) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"
