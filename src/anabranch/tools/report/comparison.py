"""Every planner on one trace and network, and the plan for every compression, as tables."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.report.documents import CompareDocument, ComparedPlanner
from anabranch.tools.report.formatting import count, factor, percent, plain, time_scale
from anabranch.tools.report.tables import Cell, Table, number, terminal

CAPTION = (
    "* best. Speed-up: iteration against by_bytes. Above bound: how much later than the earliest finish conceivable on "
    "that many lanes. per_tensor: every gradient by itself (WFBP); single: one message after backward; by_bytes: torch "
    "DDP's default (25 MiB, first bucket 1 MiB); mgwfbp and asc: the rules of MG-WFBP and ASC-WFBP; "
    "optimal: exact on one lane; lanes: searched on several."
)
MEANING = "the expected squared error of a step's averages, relative to them"
ERROR = (
    f"Error: {MEANING}. One kind travels by the exact plan; of several, the least lossy plan is taken that ends at "
    "most 1 % of the computing time after the fastest, or less where the network is slow."
)
SPREAD = " Iteration: under it its range over the measured spread of costs, each plan as made for the median."


def best(rows: Sequence[ComparedPlanner]) -> ComparedPlanner:
    """The fastest; among equals the one with fewest lanes, then buckets, then the first."""
    return min(rows, key=lambda row: (row.iteration_s, row.lanes, row.buckets))


def comparison_report(found: CompareDocument) -> list[RenderableType]:
    """The tables for a terminal, and what they assume."""
    assumed = [Text(plain(f"Assumed: {'; '.join(found.assumptions)}."))] if found.assumptions else []
    return [*map(terminal, comparison_tables(found)), *assumed]


def comparison_tables(found: CompareDocument) -> list[Table]:
    """All planners, and the plans for all compressions."""
    of = f"{found.trace} on {found.network}" if found.trace and found.network else count(found.world_size, "rank")
    spread = SPREAD if any(row.iteration_high_s is not None for row in found.rows) else ""
    tables = [_table(f"Planners, predicted: {of}", found.rows, CAPTION + spread, found.best)]
    if found.compressed:
        # What was chosen for those that choose among several kinds.
        said = [
            f" {row.name}: {', '.join(f'{kind} {percent(share)}' for kind, share in row.kinds.items())}."
            for row in found.compressed
            if row.planner == "least_lossy"
        ]
        caption = ERROR + (f" Shares of the values:{''.join(said)}" if said else "")
        tables.append(_table("Compressed", found.compressed, caption))
    return tables


def _table(title: str, rows: Sequence[ComparedPlanner], caption: str, best: str | None = None) -> Table:
    """With the lanes of planners, of which one is the best, and the error of compressed plans, all on one lane."""
    scale = time_scale(row.iteration_s for row in rows)
    slowest = max((row.iteration_s for row in rows), default=0.0) or 1.0
    cells = []
    for row in rows:
        lanes_or_error = number(row.lanes) if best else number(row.error, "{:.2g}".format)
        band = f"\n{scale(row.iteration_low_s or 0.0)}–{scale(row.iteration_high_s)}" if row.iteration_high_s else ""
        iteration = Cell(scale(row.iteration_s) + band, row.iteration_s, row.iteration_s / slowest)
        cells.append([Cell(row.name), number(row.buckets), lanes_or_error, number(row.finish_s, scale),
                      number(row.exposed_s, scale), iteration, number(row.speedup, factor),
                      number(row.above_bound, percent)])  # fmt: skip
    times = [f"{what}\n{scale.unit}" for what in ("finish", "exposed", "iteration")]
    headers = ["planner", "buckets", "lanes" if best else "error", *times, "speed-\nup", "above\nbound"]
    return Table(title, headers, cells, caption, best)
