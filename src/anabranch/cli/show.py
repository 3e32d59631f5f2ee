"""anabranch show: the content of a trace, network, plan, timeline or cached plan."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import arguments
from anabranch.cli.cache import choice_figures
from anabranch.cli.output import JsonOption, print_json, show_tables
from anabranch.files import dumps
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.trace import Trace
from anabranch.tuning.plan_cache import Entry, is_cached_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A trace, network, plan, timeline or cached plan; also a bundled trace, or a description."
    ),
]


def show(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show a trace, network, plan or timeline; with --json its summary and its content."""
    from anabranch.report import figures, tables

    if is_cached_plan(file):
        entry = Entry.read(Path(file))
        if as_json:
            print_json({"command": "show", "summary": choice_figures(entry), "content": json.loads(entry.text())})
        else:
            show_tables(*_cached_report(entry))
        return
    noun = arguments.noun(file)
    if isinstance(noun, Trace):
        summary, report = figures.trace_figures(noun), tables.trace_report(noun)
    elif isinstance(noun, Network):
        summary, report = figures.network_figures(noun), tables.network_report(noun)
    elif isinstance(noun, Plan):
        summary, report = figures.plan_figures(noun), tables.plan_report(noun)
    else:
        summary, report = figures.timeline_figures(noun), tables.timeline_report(noun)
    if as_json:
        print_json({"command": "show", "summary": summary, "content": json.loads(dumps(noun))})
    else:
        show_tables(report)


def _cached_report(entry: Entry) -> "list[RenderableType]":
    """What was chosen for which training and why, and the plan; the training's own lines are for --json."""
    from rich.text import Text

    from anabranch.report import tables
    from anabranch.report.formatting import factor, label, seconds

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
