"""anabranch show: the content of a trace, network, plan, timeline or cached plan, or of a sharded trace or plan."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from anabranch.fsdp.planning import ShardedTrace, ShardingPlan
from anabranch.fsdp.planning import values as sharding_values
from anabranch.tools.cli import arguments
from anabranch.tools.cli.cache import choice_figures
from anabranch.tools.cli.options import JsonOption
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tuning.plan_cache import Entry
from anabranch.values.files import dumps
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

File = Annotated[
    str,
    Argument(
        metavar="FILE",
        help="A trace, network, plan, timeline, cached plan, sharded trace or sharding plan; also a bundled trace, or "
        "a description.",
    ),
]


def show(file: File, as_json: JsonOption = False) -> None:
    """Show a trace, network, plan or timeline; with --json its summary and its content."""
    found = arguments.content(file)
    summary, report = _described(found)
    if not as_json:
        show_tables(*report)
        return
    written: Any = dumps
    if isinstance(found, Entry):
        written = Entry.text
    elif isinstance(found, ShardedTrace | ShardingPlan):
        written = sharding_values.dumps
    print_json({"command": "show", "summary": summary, "content": json.loads(written(found))})


def print_saved(
    command: str, noun: Trace | Network, output: Path, as_json: bool, notes: Sequence[str], more: Mapping[str, Any]
) -> None:
    """Print what is in a noun that was written to ``output``: tables and notes, or JSON with ``more`` fields."""
    from rich.text import Text

    from anabranch.tools.report.formatting import plain

    summary, report = _described(noun)
    if as_json:
        print_json({"command": command, **summary, **more, "written": str(output)})
    else:
        show_tables(*report, *(Text(plain(note)) for note in notes), f"Written to {output}.")


def _described(found: Any) -> "tuple[dict[str, Any], list[RenderableType]]":
    """The summary of a file's content, and the tables to print."""
    from anabranch.tools.report import figures, tables

    if isinstance(found, Entry):
        return choice_figures(found), _cached_report(found)
    if isinstance(found, ShardedTrace):
        summary: dict[str, Any] = {"blocks": len(found), "nbytes": found.nbytes, "compute_s": found.compute_s}
        return summary, _sharded_trace_report(found)
    if isinstance(found, ShardingPlan):
        freed = sum(unit.reshard for unit in found.units)
        summary = {"units": len(found), "blocks": len(found.names), "freed": freed, "prefetch": found.prefetch}
        return summary, _sharding_plan_report(found)
    of_kind: dict[type, tuple[Any, Any]] = {
        Trace: (figures.trace_figures, tables.trace_report),
        Network: (figures.network_figures, tables.network_report),
        Plan: (figures.plan_figures, tables.plan_report),
        Timeline: (figures.timeline_figures, tables.timeline_report),
    }
    summarise, report = of_kind[type(found)]
    return summarise(found), [report(found)]


def _cached_report(entry: Entry) -> "list[RenderableType]":
    """What was chosen for which training and why, and the plan; the training's own lines are for --json."""
    from anabranch.tools.report import tables
    from anabranch.tools.report.formatting import factor, label, seconds

    choice = entry.choice
    pairs: list[tuple[str, str | Text]] = [
        ("model", label(entry.key.model)),
        ("ranks", str(choice.network.world_size)),
        ("input", label(entry.key.input.removeprefix("input "))),
        ("versions", label(", ".join(entry.key.versions))),
        ("choice", label(choice.label)),
        ("step", f"{seconds(choice.step_s)}, spread {seconds(choice.spread_s)}"),
        ("own buckets", f"{seconds(choice.default_step_s)}: the choice is {factor(choice.gain)} as fast"),
        ("date", choice.date),
    ]
    plan = [tables.plan_report(choice.plan)] if choice.plan is not None else []
    return [tables.facts("Cached plan, for the next start of this training", pairs), *plan]


def _sharded_trace_report(trace: ShardedTrace) -> "list[RenderableType]":
    """The blocks, with what they weigh and compute."""
    from anabranch.tools.report.formatting import count, seconds, size, time_scale
    from anabranch.tools.report.tables import Cell, Table, facts, meta_pairs, number, terminal

    pairs: list[tuple[str, str | Text]] = [
        ("blocks", f"{count(len(trace), 'block')}, {size(trace.nbytes)} with {size(trace.rest_nbytes)} in none"),
        ("computing", f"{seconds(trace.compute_s)}; of it {seconds(trace.update_s)} for the update"),
        *meta_pairs(trace.meta),
    ]
    scale = time_scale(block.backward_s for block in trace.blocks)
    headers = ["parameters", "gradients", f"forward, {scale.unit}", f"backward, {scale.unit}", "block"]
    rows = [
        [number(b.nbytes, size), number(b.gradient_nbytes, size), number(b.forward_s, scale),
         number(b.backward_s, scale), Cell(b.name)]
        for b in trace.blocks
    ]  # fmt: skip
    return [facts("Sharded trace", pairs), terminal(Table("Blocks", headers, rows))]


def _sharding_plan_report(plan: ShardingPlan) -> "list[RenderableType]":
    """The units, with their first and last block."""
    from anabranch.tools.report.tables import Cell, Table, facts, number, terminal

    rows = [
        [
            number(at, str),
            number(len(u.names)),
            Cell("freed" if u.reshard else "kept"),
            Cell(u.names[0]),
            Cell(u.names[-1]),
        ]
        for at, u in enumerate(plan.units)
    ]
    table = Table("Units", ["#", "blocks", "after forward", "first", "last"], rows)
    return [facts("Sharding plan", [("units", plan.described())]), terminal(table)]
