"""anabranch show: the content of a trace, network, plan or timeline file."""

import json
from typing import Annotated

import typer

from anabranch.cli import arguments
from anabranch.cli.output import JsonOption, print_json, show_tables
from anabranch.files import dumps
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.trace import Trace

FileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE", help="A trace, network, plan or timeline; also a bundled trace, or a description."),
]


def show(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show a trace, network, plan or timeline; with --json its summary and its content."""
    from anabranch.report import figures, tables

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
