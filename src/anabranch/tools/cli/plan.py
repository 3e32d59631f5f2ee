"""anabranch plan and simulate: which gradients travel together, and the step that this should make."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from anabranch.planning.simulator import finish_s, lower_bound_s
from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import ForceOption, JsonOption, NetworkOption, TraceOption
from anabranch.tools.cli.output import check_free, print_document
from anabranch.tools.predict.scaling import named_planners
from anabranch.tools.predict.scaling.compression import priced
from anabranch.values.files import save, write_text
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anabranch.tools.report.documents import PlanDocument, SimulateDocument


def plan(
    trace: TraceOption,
    network: NetworkOption,
    planner: Annotated[str, Option(help=f"One of {', '.join(named_planners.NAMED_PLANNERS)}.")] = "optimal",
    lanes: Annotated[int | None, Option(help="How many lanes (lanes: at most); for asc and lanes.")] = None,
    cap_mb: Annotated[float | None, Option(help="Bucket cap in MiB, as DDP's; for by_bytes and optimal.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Write the plan to this file.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a plan: which gradients travel together, on which lane, in which order, and what that should cost."""
    check_free([output], force)
    chosen = named_planners.named_planner(planner, lanes, cap_mb)
    gradients, links = arguments.trace(trace), arguments.network(network)
    made = chosen(gradients, links)
    timeline = predict(gradients, made, links)
    if output:
        save(made, output, force)
    from anabranch.tools.report.documents import PlanDocument
    from anabranch.tools.report.figures import ratio

    ddp_s, alone_s = (
        gradients.forward_s + finish_s(gradients, named_planners.NAMED_PLANNERS[name](gradients, links), links)
        for name in (named_planners.DDP_DEFAULT, named_planners.NO_MERGING)
    )
    document = PlanDocument(
        planner=chosen.planner,
        options=dict(chosen.options),
        **_step(gradients, made, timeline, links),
        lower_bound_s=lower_bound_s(gradients, links, made.lanes),
        speedup_over_ddp_default=ratio(ddp_s, timeline.iteration_s),
        speedup_over_per_tensor=ratio(alone_s, timeline.iteration_s),
        written=str(output) if output else None,
    )
    print_document(document, as_json, lambda: _plan_report(planner, document))


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
    from anabranch.tools.report.documents import SimulateDocument

    document = SimulateDocument(
        plan=str(plan) if plan else None,
        planner=None if plan else planner or "optimal",
        **_step(gradients, made, timeline, links),
        written=tuple(str(path) for path in (output, chrome) if path),
    )
    print_document(document, as_json, lambda: _step_report(document))


def _step(trace: Trace, made: Plan, timeline: Timeline, network: Network) -> dict[str, Any]:
    """What both documents say of a step under a plan."""
    from anabranch.tools.report.figures import planned_buckets, timeline_figures

    return {
        "world_size": network.world_size,
        "fingerprint": made.fingerprint,
        "lanes": made.lanes,
        **timeline_figures(timeline),
        "buckets": planned_buckets(dict(enumerate(made.buckets)), timeline, trace),
    }


def _plan_report(planner: str, document: "PlanDocument") -> "Iterator[RenderableType]":
    from anabranch.tools.report.formatting import count, factor, plain, seconds
    from anabranch.tools.report.tables import bucket_table, duration_pairs, facts, terminal

    buckets, lanes = count(len(document.buckets), "bucket"), count(document.lanes, "lane")
    ddp, alone = factor(document.speedup_over_ddp_default), factor(document.speedup_over_per_tensor)
    pairs = [
        *duration_pairs(document),
        ("lower bound", f"{seconds(document.lower_bound_s)} for the finish of any plan on {lanes}"),
        ("speed-up", f"{ddp} over DDP's default, {alone} over no merging"),
        ("fingerprint", document.fingerprint),
        *([("written to", plain(document.written))] if document.written else []),
    ]
    yield terminal(bucket_table("Buckets in launch order", document.buckets))
    yield facts(f"Plan by {planner}: {buckets} on {lanes}, {count(document.world_size, 'rank')}", pairs)


def _step_report(document: "SimulateDocument") -> "Iterator[RenderableType]":
    from anabranch.tools.report.formatting import count, plain
    from anabranch.tools.report.tables import bucket_table, duration_pairs, facts, terminal

    written = [("written to", plain(path)) for path in document.written]
    pairs = [*duration_pairs(document), ("fingerprint", document.fingerprint), *written]
    yield terminal(bucket_table("Buckets in launch order", document.buckets))
    yield facts(f"One step among {count(document.world_size, 'rank')}, predicted", pairs)
