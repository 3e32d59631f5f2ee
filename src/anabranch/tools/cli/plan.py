"""anabranch plan, simulate and compare: which gradients travel together, the step that this makes, and every rival."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from anabranch import planning
from anabranch.planning.simulator import finish_s, lower_bound_s
from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import check_free, print_document, progress
from anabranch.tools.cli.shared_options import ForceOption, JsonOption, NetworkOption, TraceOption
from anabranch.tools.network_presets import NO_SPREAD, NetworkRange
from anabranch.tools.predict.scaling.compression import (
    Compression,
    Planner,
    as_sent,
    compressed_strategies,
    priced,
)
from anabranch.tools.predict.scaling.result import DDP_DEFAULT
from anabranch.values.files import load_as, save, write_text
from anabranch.values.kinds.fidelity import by_fidelity, error_of_plan
from anabranch.values.kinds.names import AUTO, COMPRESSED, kind_of
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anabranch.tools.report.documents import ComparedPlanner, PlanDocument, SimulateDocument

NO_MERGING = "per_tensor"
COMPRESS = (AUTO, *COMPRESSED, kind_of(0.01))

COMPRESSION = Option(
    metavar="KIND",
    help="Also plans with compressed buckets where they gain, as in scale; may be repeated; "
    f"{arguments.NO_COMPRESSION} for none. Default: {', '.join(COMPRESS)}.",
)


def plan(
    trace: TraceOption,
    network: NetworkOption,
    planner: Annotated[str, Option(help=f"One of {', '.join(planning.PLANNERS)}.")] = "optimal",
    output: Annotated[Path | None, Option("-o", "--output", help="Write the plan to this file.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a plan: which gradients travel together, on which lane, in which order, and what that should cost."""
    check_free([output], force)
    gradients, links = arguments.trace(trace), arguments.network(network)
    made = planning.plan(gradients, links, planner)
    timeline = predict(gradients, made, links)
    if output:
        save(made, output, force)
    from anabranch.tools.report.documents import PlanDocument
    from anabranch.tools.report.figures import ratio
    from anabranch.tools.report.formatting import count, factor, seconds

    ddp_s, alone_s = (
        gradients.forward_s + finish_s(gradients, planning.plan(gradients, links, name), links)
        for name in (DDP_DEFAULT, NO_MERGING)
    )
    document = PlanDocument(
        planner=planner,
        **_step(gradients, made, timeline, links),
        lower_bound_s=lower_bound_s(gradients, links, made.lanes),
        speedup_over_ddp_default=ratio(ddp_s, timeline.iteration_s),
        speedup_over_per_tensor=ratio(alone_s, timeline.iteration_s),
        written=str(output) if output else None,
    )
    title = f"Plan by {planner}: {count(len(made), 'bucket')} on {count(made.lanes, 'lane')}"
    bound = f"{seconds(document.lower_bound_s)} for the finish of any plan on {count(made.lanes, 'lane')}"
    ddp, alone = factor(document.speedup_over_ddp_default), factor(document.speedup_over_per_tensor)
    more = [("lower bound", bound), ("speed-up", f"{ddp} over DDP's default, {alone} over no merging")]
    print_document(document, as_json, lambda: _report(f"{title}, {count(links.world_size, 'rank')}", document, more))


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
    made = load_as(Plan, plan) if plan else planning.plan(gradients, links, planner or "optimal")
    links = priced(links, (bucket.collective for bucket in made.buckets))
    timeline = predict(gradients, made, links)
    if output:
        save(timeline, output, force)
    if chrome:
        write_text(json.dumps(timeline.trace_events(), allow_nan=False) + "\n", chrome, force)
    from anabranch.tools.report.documents import SimulateDocument
    from anabranch.tools.report.formatting import count

    document = SimulateDocument(
        plan=str(plan) if plan else None,
        planner=None if plan else planner or "optimal",
        **_step(gradients, made, timeline, links),
        written=tuple(str(path) for path in (output, chrome) if path),
    )
    title = f"One step among {count(links.world_size, 'rank')}, predicted"
    print_document(document, as_json, lambda: _report(title, document))


def compare(
    trace: TraceOption,
    network: NetworkOption,
    compress: Annotated[list[str] | None, COMPRESSION] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every planner and every compression on one trace and network."""
    from anabranch.tools.report import comparison
    from anabranch.tools.report.documents import CompareDocument

    gradients, links = arguments.trace(trace), arguments.network(network)
    strategies = compressed_strategies(arguments.compressions(compress, COMPRESS), gradients, links)
    known = NetworkRange.given(network, links, "")
    around = (known.low, known.high) if known.spread != NO_SPREAD else ()
    networks = [strategies.priced(one) for one in (links, *around)]
    ddp = planning.plan(gradients, networks[0], DDP_DEFAULT)
    ddp_s = gradients.forward_s + finish_s(gradients, ddp, networks[0])
    named, planners = planning.PLANNERS, {**planning.PLANNERS, **strategies.planners}
    rows: list[ComparedPlanner] = []
    with progress() as update:
        for name, planner in planners.items():
            rows.append(_row(name, planner, gradients, networks, ddp_s))
            update("planning", len(rows), len(planners))
    document = CompareDocument(
        trace=trace,
        network=network,
        world_size=links.world_size,
        forward_s=gradients.forward_s,
        backward_s=gradients.backward_s,
        best=comparison.best(rows[: len(named)]).name,
        rows=tuple(rows[: len(named)]),
        compressed=tuple(rows[len(named) :]),
        assumptions=tuple(strategies.assumptions),
    )
    print_document(document, as_json, lambda: comparison.comparison_report(document))


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


def _report(
    title: str, document: "PlanDocument | SimulateDocument", more: Sequence[tuple[str, str]] = ()
) -> "Iterator[RenderableType]":
    """The buckets, and what is predicted of the step; ``more`` facts of a plan."""
    from anabranch.tools.report.formatting import plain
    from anabranch.tools.report.tables import bucket_table, duration_pairs, facts, terminal

    files = [document.written] if isinstance(document.written, str) else document.written or ()
    written = [("written to", plain(path)) for path in files]
    yield terminal(bucket_table("Buckets in launch order", document.buckets))
    yield facts(title, [*duration_pairs(document), *more, ("fingerprint", document.fingerprint), *written])


def _row(name: str, planner: Planner, trace: Trace, networks: Sequence[Network], ddp_s: float) -> "ComparedPlanner":
    """What a planner makes for the first network, and how that does on all of them."""
    from anabranch.tools.report.documents import ComparedPlanner
    from anabranch.tools.report.figures import ratio

    network, *around = networks
    made = planner(trace, network)
    timeline = predict(trace, made, network)
    bound_s = lower_bound_s(trace, network, made.lanes)
    low_s, high_s = (trace.forward_s + finish_s(trace, made, at) for at in around) if around else (None, None)
    sent = as_sent(made)
    return ComparedPlanner(
        name=name,
        planner=name if name in planning.PLANNERS else Compression.named(name).planner_name,
        options={},
        fingerprint=made.fingerprint,
        buckets=len(made),
        lanes=made.lanes,
        finish_s=timeline.finish_s,
        exposed_s=timeline.exposed_s,
        iteration_s=timeline.iteration_s,
        speedup=ratio(ddp_s, timeline.iteration_s),
        lower_bound_s=bound_s,
        above_bound=timeline.finish_s / bound_s - 1 if bound_s else 0.0,
        iteration_low_s=low_s,
        iteration_high_s=high_s,
        kinds=_shares(trace, sent),
        error=error_of_plan(trace, sent),
    )


def _shares(trace: Trace, plan: Plan) -> dict[str, float]:
    """The share of all values that travels by each kind, the most faithful first."""
    numels = {tensor.name: tensor.numel for tensor in trace.tensors}
    sent: dict[str, int] = {}
    for bucket in plan.buckets:
        sent[bucket.collective] = sent.get(bucket.collective, 0) + sum(numels[name] for name in bucket.names)
    return {kind: sent[kind] / sum(sent.values()) for kind in by_fidelity(list(sent))}
