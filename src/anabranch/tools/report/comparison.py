"""Every planner on one trace and network, and the plan for every compression, as tables."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.report.documents import CompareDocument, ComparedPlanner
from anabranch.tools.report.figures import ratio
from anabranch.tools.report.formatting import count, factor, percent, plain, time_scale
from anabranch.tools.report.tables import Cell, Table, number, terminal

CAPTION = (
    "* best. Speed-up: iteration against by_bytes. Above bound: how much later than the earliest finish conceivable on "
    "that many lanes. per_tensor: every gradient by itself (WFBP); single: one message after backward; by_bytes: torch "
    "DDP's default (25 MiB, first bucket 1 MiB); horovod: 128 MiB; mgwfbp and asc: the rules of MG-WFBP and ASC-WFBP; "
    "optimal: exact on one lane; lanes: searched on several."
)
MEANING = "the expected squared error of a step's averages, relative to them"
ERROR = (
    f"Error: {MEANING}. One kind travels by the exact plan; of several, the least lossy plan is taken that ends at "
    "most 1 % of the computing time after the fastest, or less where the network is slow."
)
SPREAD = " Iteration: under it its range over the measured spread of costs, each plan as made for the median."
Column = tuple[str, Callable[[ComparedPlanner], Cell]]  # its header, and the cell of a row


def best(rows: Sequence[ComparedPlanner]) -> ComparedPlanner:
    """The fastest; among equals the one with fewest lanes, then buckets, then the first."""
    return min(rows, key=lambda row: (row.iteration_s, row.lanes, row.buckets))


def comparison_report(found: CompareDocument) -> RenderableType:
    """The tables for a terminal, and what they assume."""
    parts = [part for table in comparison_tables(found) for part in (terminal(table), Text())]
    return Group(*parts, *([Text(plain(f"Assumed: {'; '.join(found.assumptions)}."))] if found.assumptions else []))


def comparison_tables(found: CompareDocument) -> list[Table]:
    """All planners, and the plans for all compressions."""
    of = f"{found.trace} on {found.network}" if found.trace and found.network else count(found.world_size, "rank")
    lanes: Column = ("lanes", lambda row: number(row.lanes))
    above: Column = ("above\nbound", lambda row: number(row.above_bound, percent))
    spread = SPREAD if any(row.iteration_high_s is not None for row in found.rows) else ""
    tables = [_table(f"Planners, predicted: {of}", found.rows, lanes, above, CAPTION + spread, found.best)]
    if found.compressed and found.rows:  # all of them on one lane
        winner = best(found.rows)
        errors: Column = ("error", lambda row: number(row.error, "{:.2g}".format))
        gain: Column = (f"over\n{winner.name}", lambda row: number(ratio(winner.iteration_s, row.iteration_s), factor))
        # What was chosen for those that choose among several kinds.
        mixes = {row.name: row.kinds for row in found.compressed if row.planner == "least_lossy"}
        said = [
            f" {name}: {', '.join(f'{kind} {percent(kinds[kind])}' for kind in kinds)}."
            for name, kinds in mixes.items()
        ]
        caption = ERROR + (f" Shares of the values:{''.join(said)}" if said else "")
        tables.append(_table("Compressed", found.compressed, errors, gain, caption))
    return tables


def _table(
    title: str, rows: Sequence[ComparedPlanner], third: Column, last: Column, caption: str, best: str | None = None
) -> Table:
    scale = time_scale(row.iteration_s for row in rows)
    slowest = max((row.iteration_s for row in rows), default=0.0) or 1.0
    times = [f"{what}\n{scale.unit}" for what in ("finish", "exposed", "iteration")]

    def iteration(row: ComparedPlanner) -> str:
        band = f"\n{scale(row.iteration_low_s or 0.0)}–{scale(row.iteration_high_s)}" if row.iteration_high_s else ""
        return scale(row.iteration_s) + band

    cells = [
        [
            Cell(row.name), number(row.buckets), third[1](row), number(row.finish_s, scale),
            number(row.exposed_s, scale), Cell(iteration(row), row.iteration_s, row.iteration_s / slowest),
            number(row.speedup, factor), last[1](row),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(title, ["planner", "buckets", third[0], *times, "speed-\nup", last[0]], cells, caption, best)
