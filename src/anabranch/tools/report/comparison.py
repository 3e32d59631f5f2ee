"""Every planner side by side on one trace and network."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.tools.predict.scaling.result import ScalePoint
from anabranch.tools.report.documents import CompareDocument, ComparedPlanner
from anabranch.tools.report.figures import ratio
from anabranch.tools.report.formatting import factor, percent, plain, time_scale
from anabranch.tools.report.tables import columns

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
Column = tuple[str, Callable[[ComparedPlanner], str]]  # its header, and the cell of a row


def best(
    rows: Sequence[ComparedPlanner], seconds: Callable[[ComparedPlanner], float | None] = lambda row: row.iteration_s
) -> ComparedPlanner:
    """The fastest; among equals the one with fewest lanes, then buckets, then the first."""
    return min(rows, key=lambda row: (seconds(row) or 0.0, row.lanes, row.buckets))


def comparison_report(found: CompareDocument) -> RenderableType:
    """The table, one for ways to compress, and one more each where the network's spread was measured."""
    winner = best(found.rows)
    lanes, above_bound = ("lanes", lambda row: str(row.lanes)), ("above\nbound", lambda row: percent(row.above_bound))
    planners = _table("Planners", found.rows, lanes, above_bound, winner)
    planners.caption = Text(CAPTION)
    parts: list[RenderableType] = [planners]
    if found.compressed:
        gain = (f"over\n{winner.name}", lambda row: factor(ratio(winner.iteration_s, row.iteration_s)))
        compressed = _table("Compressed", found.compressed, ("error", error), gain)  # all of them on one lane
        compressed.caption = Text(plain(about_compressed(found)))
        parts += [Text(), compressed]
    if found.rows[0].iteration_high_s is not None:
        parts += [Text(), _spread([*found.rows, *found.compressed], len(found.rows))]
    if found.assumptions:
        parts += [Text(), Text(plain(f"Assumed: {'; '.join(found.assumptions)}."))]
    return Group(*parts)


def about_compressed(found: CompareDocument) -> str:
    """What the errors of compressed rows are, and what was chosen for those that choose among several kinds."""
    mixes = {row.name: row.kinds for row in found.compressed if row.planner == "least_lossy"}
    said = [f"{name}: {', '.join(f'{kind} {percent(kinds[kind])}' for kind in kinds)}" for name, kinds in mixes.items()]
    return f"{ERROR}. {'Shares of the values: ' if said else ''}{''.join(f'{one}. ' for one in said)}".rstrip()


def error(row: ComparedPlanner | ScalePoint) -> str:
    """The error of a plan, in two digits."""
    return "-" if row.error is None else f"{row.error:.2g}"


def _table(
    title: str,
    rows: Sequence[ComparedPlanner],
    third: Column,
    last: Column,
    winner: ComparedPlanner | None = None,
) -> Table:
    scale = time_scale(row.iteration_s for row in rows)
    times = [f"{what}\n{scale.unit}" for what in ("finish", "exposed", "iteration")]
    table = columns(title, "planner", "buckets", third[0], *times, "speed-\nup", last[0], left=["planner"])
    for row in rows:
        cells = [
            ("* " if row is winner else "  ") + row.name, f"{row.buckets:,}", third[1](row),
            scale(row.finish_s), scale(row.exposed_s), scale(row.iteration_s),
            factor(row.speedup), last[1](row),
        ]  # fmt: skip
        table.add_row(*map(Text, cells), style="bold" if row is winner else None)
    return table


def _spread(rows: Sequence[ComparedPlanner], dense: int) -> Table:
    """All rows on faster and slower networks; the first ``dense`` of them send everything in full."""
    scale = time_scale(row.iteration_high_s or 0.0 for row in rows)
    headers = [f"{what}\n{scale.unit}" for what in ("fast network", "median", "slow network")]
    table = columns("Iteration across the measured spread", "planner", *headers, left=["planner"])
    views: list[Callable[[ComparedPlanner], float | None]] = [
        lambda row: row.iteration_low_s,
        lambda row: row.iteration_s,
        lambda row: row.iteration_high_s,
    ]
    winners = [best(rows[:dense], view) for view in views]
    for row in rows:
        cells = [
            ("* " if row is winner else "") + scale(view(row) or 0.0)
            for view, winner in zip(views, winners, strict=True)
        ]
        table.add_row(Text(row.name), *map(Text, cells))
    table.caption = Text(
        "Each plan as made for the median, on costs one spread lower and higher; * best of its column that sends "
        "everything in full."
    )
    return table
