"""anabranch show: the content of a trace, network, plan, timeline or cached plan, or of a sharded trace or plan."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.fsdp.planning import ShardedTrace, ShardingPlan
from anabranch.fsdp.planning import values as sharding_values
from anabranch.tools.cli import arguments
from anabranch.tools.cli.cache import choice_figures
from anabranch.tools.cli.output import JsonOption, print_json, show_tables
from anabranch.tuning.plan_cache import Entry
from anabranch.values.files import dumps
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A trace, network, plan, timeline, cached plan, sharded trace or sharding plan; also a bundled trace, or "
        "a description.",
    ),
]


def show(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show a trace, network, plan or timeline; with --json its summary and its content."""
    from anabranch.tools.report import figures, tables

    found = arguments.content(file)
    if isinstance(found, Entry):
        if as_json:
            print_json({"command": "show", "summary": choice_figures(found), "content": json.loads(found.text())})
        else:
            show_tables(*_cached_report(found))
        return
    if isinstance(found, ShardedTrace | ShardingPlan):
        if as_json:
            content = json.loads(sharding_values.dumps(found))
            print_json({"command": "show", "summary": _sharded_figures(found), "content": content})
        else:
            show_tables(_sharded_report(found))
        return
    if isinstance(found, Trace):
        summary, report = figures.trace_figures(found), tables.trace_report(found)
    elif isinstance(found, Network):
        summary, report = figures.network_figures(found), tables.network_report(found)
    elif isinstance(found, Plan):
        summary, report = figures.plan_figures(found), tables.plan_report(found)
    else:
        summary, report = figures.timeline_figures(found), tables.timeline_report(found)
    if as_json:
        print_json({"command": "show", "summary": summary, "content": json.loads(dumps(found))})
    else:
        show_tables(report)


def _cached_report(entry: Entry) -> "list[RenderableType]":
    """What was chosen for which training and why, and the plan; the training's own lines are for --json."""
    from rich.text import Text

    from anabranch.tools.report import tables
    from anabranch.tools.report.formatting import factor, label, seconds

    choice = entry.choice
    about = ("backend ", "devices ", "hosts ")
    training = [entry.key.input, *(line for line in entry.key.training if line.startswith(about))]
    pairs: list[tuple[str, str | Text]] = [
        ("model", label(entry.key.model)),
        ("ranks", str(choice.network.world_size)),
        *((name, label(value)) for name, _, value in (line.partition(" ") for line in training)),
        ("versions", label(", ".join(entry.key.versions))),
        ("choice", label(choice.label)),
        ("step", f"{seconds(choice.step_s)}, spread {seconds(choice.spread_s)}"),
        ("own buckets", f"{seconds(choice.default_step_s)}: the choice is {factor(choice.gain)} as fast"),
        ("date", choice.date),
    ]
    plan = [tables.plan_report(choice.plan)] if choice.plan is not None else []
    return [tables.facts("Cached plan, for the next start of this training", pairs), *plan]


def _sharded_figures(found: ShardedTrace | ShardingPlan) -> dict[str, float]:
    if isinstance(found, ShardedTrace):
        return {"blocks": len(found), "nbytes": found.nbytes, "compute_s": found.compute_s}
    freed = sum(unit.reshard for unit in found.units)
    return {"units": len(found), "blocks": len(found.names), "freed": freed, "prefetch": found.prefetch}


def _sharded_report(found: ShardedTrace | ShardingPlan) -> "RenderableType":
    """The blocks of a sharded trace with what they weigh and compute, or the units of a plan."""
    from rich.console import Group
    from rich.text import Text

    from anabranch.tools.report.formatting import count, label, seconds, size, time_scale
    from anabranch.tools.report.tables import add_rows, columns, facts, meta_pairs

    if isinstance(found, ShardingPlan):
        pairs: list[tuple[str, str | Text]] = [("units", found.described())]
        table = columns(
            "Units", "#", "blocks", "after forward", "first", "last", left=["after forward", "first", "last"]
        )
        rows = (
            [str(i), str(len(u.names)), "freed" if u.reshard else "kept", label(u.names[0]), label(u.names[-1])]
            for i, u in enumerate(found.units)
        )
        return Group(facts("Sharding plan", pairs), Text(), add_rows(table, rows, len(found), "unit"))
    pairs = [
        ("blocks", f"{count(len(found), 'block')}, {size(found.nbytes)} with {size(found.rest_nbytes)} in none"),
        ("computing", f"{seconds(found.compute_s)}; of it {seconds(found.update_s)} for the update"),
        *meta_pairs(found.meta),
    ]
    scale = time_scale(block.backward_s for block in found.blocks)
    headers = ["parameters", "gradients", f"forward, {scale.unit}", f"backward, {scale.unit}", "block"]
    table = columns("Blocks", *headers, left=["block"])
    rows = (
        [size(b.nbytes), size(b.gradient_nbytes), scale(b.forward_s), scale(b.backward_s), label(b.name)]
        for b in found.blocks
    )
    return Group(facts("Sharded trace", pairs), Text(), add_rows(table, rows, len(found), "block"))
