"""anabranch report: everything that a run left behind as one HTML page."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from anabranch import planning
from anabranch.planning.simulator import simulate
from anabranch.tools.cli.output import check_free, check_other
from anabranch.tools.cli.shared_options import ForceOption
from anabranch.tools.predict.scaling.compression import priced
from anabranch.tools.predict.scaling.result import DDP_DEFAULT
from anabranch.values.errors import NetworkError
from anabranch.values.files import write_text

if TYPE_CHECKING:
    from anabranch.tools.report.runs import Runs
    from anabranch.tools.report.steps import Predicted

RUNS = Argument(
    metavar="RUN...",
    help="Files: traces, networks, plans, timelines, what --json prints, lines of ab.JsonLines, traces of "
    "model.trace_steps. Of a folder, all of these that are in it.",
)


def report(
    runs: Annotated[list[Path], RUNS],
    output: Annotated[Path, Option("-o", "--output", help="Write the page to this file.")] = Path("report.html"),
    title: Annotated[str, Option(help="Its heading.")] = "anabranch report",
    force: ForceOption = False,
) -> None:
    """Draw a run: its plan, predicted and measured steps, curves, tables, memory, in one HTML file."""
    check_free([output], force)
    check_other(output, runs)
    from anabranch.tools.report.formatting import count, plain

    page, found = write_page(runs, output, title, force)
    print(plain(f"{output}: {len(page.encode()) / 1e6:.1f} MB, from {count(len(found.files), 'file')}"))
    for reason in found.skipped:
        print(plain(f"left out: {reason}"))


def write_page(paths: Sequence[Path], output: Path, title: str, force: bool = False) -> "tuple[str, Runs]":
    """Write the page of these files; returns it, and what was read."""
    from anabranch.tools.report.page import report_page
    from anabranch.tools.report.runs import read_runs

    found = read_runs(paths)
    page = report_page(title, found, _predicted(found))
    write_text(page, output, force)
    return page, found


def _predicted(runs: "Runs") -> "list[Predicted]":
    """Each plan on the first trace that it fits and the first network that prices it; without any, DDP's default."""
    from anabranch.tools.report.steps import plan_fits

    if not runs.traces or not runs.networks:
        return []
    wanted = [(name, plan, trace) for name, plan in runs.plans for _, trace in runs.traces if plan_fits(plan, trace)]
    if not runs.plans and not runs.steps:
        trace = runs.traces[0][1]
        plan = planning.plan(trace, runs.networks[0][1], DDP_DEFAULT)
        wanted = [("DDP's default buckets, as no plan was given,", plan, trace)]
    found: dict[str, Predicted] = {}
    for name, plan, trace in wanted:
        for network_name, network in runs.networks:
            if name not in found:
                with suppress(NetworkError):
                    timeline = simulate(trace, plan, priced(network, (bucket.collective for bucket in plan.buckets)))
                    found[name] = (f"{name} on {network_name}, {network.world_size} ranks", timeline, plan, trace)
    return list(found.values())
