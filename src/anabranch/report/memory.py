"""What each way to train holds in memory: a column each, a row for every kind of object."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from anabranch.report.cells import plain
from anabranch.report.tables import columns

GIB = 2**30


def gib(nbytes: int) -> str:
    """In GiB; a dash for nothing."""
    return f"{nbytes / GIB:.2f}" if nbytes else "-"


def memory_report(
    title: str,
    kinds: Mapping[str, Mapping[str, int]],
    host: Mapping[str, int],
    measured: Mapping[str, int],
) -> Table:
    """Predicted bytes by mode and kind, their sum, and beside it the measured peak where there is one."""
    modes = list(kinds)
    table = columns(f"{plain(title)[:100]}, GiB", "", *modes, left=[""])
    for kind in next(iter(kinds.values())):
        table.add_row(Text(kind), *(Text(gib(kinds[mode][kind])) for mode in modes))
    table.add_section()
    table.add_row(Text("predicted peak"), *(Text(gib(sum(kinds[mode].values()))) for mode in modes))
    if measured:
        table.add_row(Text("measured peak"), *(Text(gib(measured.get(mode, 0))) for mode in modes))
        cells = [_off(sum(kinds[mode].values()), measured.get(mode, 0)) for mode in modes]
        table.add_row(Text("predicted, off by"), *map(Text, cells))
    if any(host.values()):
        table.add_row(Text("in host memory"), *(Text(gib(host.get(mode, 0))) for mode in modes))
    return table


def batch_report(title: str, modes: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> Table:
    """What fits and how fast that is: a row of texts by mode for each name."""
    table = columns(plain(title)[:100], "", *modes, left=[""])
    for name, cells in rows.items():
        table.add_row(Text(name), *(Text(cells.get(mode, "-")) for mode in modes))
    return table


def _off(predicted: int, measured: int) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"
