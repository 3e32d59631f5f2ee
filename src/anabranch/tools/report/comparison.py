"""Every planner on one trace and network, and the plan for every compression, as tables."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.predict.scaling.result import ScalePoint
from anabranch.tools.report.documents import CompareDocument, ComparedPlanner
from anabranch.tools.report.figures import ratio
from anabranch.tools.report.formatting import count, factor, percent, plain, time_scale
from anabranch.tools.report.tables import Cell, Table, number, terminal

PLANNER_NAMES = (
    "per_tensor: every gradient by itself (WFBP); single: one message after backward; by_bytes: torch DDP's default "
    "(25 MiB, first bucket 1 MiB); horovod: 128 MiB; mgwfbp and asc: the rules of MG-WFBP and ASC-WFBP; optimal: exact "
    "on one lane; lanes: searched on several."
)
CAPTION = (
    "* best. Speed-up: iteration against by_bytes. Above bound: how much later than the earliest finish conceivable on "
    f"that many lanes. {PLANNER_NAMES}"
)
MEANING = "the expected squared error of a step's averages, relative to them"
ERROR = (
    f"Error: {MEANING}. One kind travels by the exact plan; of several, the least lossy plan is taken that ends at "
    "most 1 % of the computing time after the fastest, or less where the network is slow"
)
SPREAD = " Iteration: under it its range over the measured spread of costs, each plan as made for the median."
Column = tuple[str, Callable[[ComparedPlanner], Cell]]  # its header, and the cell of a row


def best(rows: Sequence[ComparedPlanner]) -> ComparedPlanner:
    """The fastest; among equals the one with fewest lanes, then buckets, then the first."""
    return min(rows, key=lambda row: (row.iteration_s, row.lanes, row.buckets))


def comparison_report(found: CompareDocument) -> RenderableType:
    """The tables for a terminal, and what they assume."""
    parts: list[RenderableType] = []
    for table in comparison_tables(found):
        parts += [terminal(table), Text()]
    return Group(*parts, *([Text(plain(f"Assumed: {'; '.join(found.assumptions)}."))] if found.assumptions else []))


def comparison_tables(found: CompareDocument) -> list[Table]:
    """All planners, and the plans for all compressions."""
    winner = best(found.rows) if found.rows else None
    of = f"{found.trace} on {found.network}" if found.trace and found.network else count(found.world_size, "rank")
    lanes: Column = ("lanes", lambda row: number(row.lanes))
    above: Column = ("above\nbound", lambda row: number(row.above_bound, percent))
    spread = SPREAD if any(row.iteration_high_s is not None for row in found.rows) else ""
    tables = [_table(f"Planners, predicted: {of}", found.rows, lanes, above, CAPTION + spread, found.best)]
    if found.compressed:  # all of them on one lane
        errors: Column = ("error", lambda row: number(row.error, error_text))
        gain: Column = (
            f"over\n{winner.name if winner else 'none'}",
            lambda row: number(ratio(winner.iteration_s, row.iteration_s) if winner else None, factor),
        )
        tables.append(_table("Compressed", found.compressed, errors, gain, about_compressed(found)))
    return tables


def about_compressed(found: CompareDocument) -> str:
    """What the errors of compressed rows are, and what was chosen for those that choose among several kinds."""
    mixes = {row.name: row.kinds for row in found.compressed if row.planner == "least_lossy"}
    said = [f"{name}: {', '.join(f'{kind} {percent(kinds[kind])}' for kind in kinds)}" for name, kinds in mixes.items()]
    return f"{ERROR}. {'Shares of the values: ' if said else ''}{''.join(f'{one}. ' for one in said)}".rstrip()


def error_text(error: float) -> str:
    """The error of a plan, in two digits."""
    return f"{error:.2g}"


def error_of(point: ScalePoint) -> str:
    """The same of a point of a sweep; a dash where it is not known."""
    return "-" if point.error is None else error_text(point.error)


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
