"""anabranch simulate: predict one training step under a plan, as a timeline."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import ForceOption, JsonOption, NetworkOption, TraceOption
from anabranch.tools.cli.output import check_free, print_json, show_tables
from anabranch.tools.predict.scaling import named_planners
from anabranch.tools.predict.scaling.compression import priced
from anabranch.values.files import save, write_text
from anabranch.values.timeline import Timeline

if TYPE_CHECKING:
    from anabranch.tools.report.documents import SimulateDocument


def simulate(
    trace: TraceOption,
    network: NetworkOption,
    plan: Annotated[Path | None, Option(help="A plan file.")] = None,
    planner: Annotated[str | None, Option(help="Plan first, with one of the planners; default: optimal.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Write the timeline to this file.")] = None,
    chrome: Annotated[Path | None, Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict one training step under a plan: when each bucket travels, and what of that is exposed."""
    if plan is not None and planner is not None:
        raise ValueError(f"--plan {plan} and --planner {planner} are both given: expected one of them")
    check_free([output, chrome], force)
    gradients, links = arguments.trace(trace), arguments.network(network)
    made = arguments.plan(plan) if plan else named_planners.named_planner(planner or "optimal")(gradients, links)
    links = priced(links, (bucket.collective for bucket in made.buckets))
    timeline = predict(gradients, made, links)
    if output:
        save(timeline, output, force)
    if chrome:
        write_text(json.dumps(timeline.trace_events(), allow_nan=False) + "\n", chrome, force)
    from anabranch.tools.report.documents import SimulateDocument, printed
    from anabranch.tools.report.figures import planned_buckets, timeline_figures

    document = SimulateDocument(
        plan=str(plan) if plan else None,
        planner=None if plan else planner or "optimal",
        world_size=links.world_size,
        fingerprint=made.fingerprint,
        lanes=made.lanes,
        **timeline_figures(timeline),
        buckets=planned_buckets(dict(enumerate(made.buckets)), timeline, gradients),
        written=tuple(str(path) for path in (output, chrome) if path),
    )
    if as_json:
        print_json(printed(document))
    else:
        _print(document, timeline)


def _print(document: "SimulateDocument", timeline: Timeline) -> None:
    from anabranch.tools.report.formatting import count, plain
    from anabranch.tools.report.tables import bucket_table, duration_pairs, facts, gantt, terminal

    pairs = [*duration_pairs(document), ("fingerprint", document.fingerprint)]
    pairs += [("written to", plain(path)) for path in document.written]
    title = f"One step among {count(document.world_size, 'rank')}, predicted"
    buckets = terminal(bucket_table("Buckets in launch order", document.buckets))
    show_tables(buckets, gantt(timeline), facts(title, pairs))
