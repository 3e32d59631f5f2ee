"""anabranch compare: every planner, and the plan of every compression, in one table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from anabranch.planning.simulator import finish_s, lower_bound_s
from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import JsonOption, NetworkOption, TraceOption
from anabranch.tools.cli.output import print_document, progress
from anabranch.tools.predict.scaling import named_planners
from anabranch.tools.predict.scaling.compression import Compression, as_sent, compressed_strategies
from anabranch.tools.predict.scaling.sweep import Planner
from anabranch.values.kinds.fidelity import by_fidelity, error_of_plan
from anabranch.values.kinds.names import AUTO, COMPRESSED, kind_of
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from anabranch.tools.report.documents import ComparedPlanner

COMPRESS = (AUTO, *COMPRESSED, kind_of(0.01))

COMPRESSION = Option(
    metavar="KIND",
    help="Also plans with compressed buckets where they gain, as in scale; may be repeated; "
    f"{arguments.NO_COMPRESSION} for none. Default: {', '.join(COMPRESS)}.",
)


def compare(
    trace: TraceOption,
    network: NetworkOption,
    compress: Annotated[list[str] | None, COMPRESSION] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every planner and every compression on one trace and network."""
    from anabranch.tools.report import comparison
    from anabranch.tools.report.documents import CompareDocument
    from anabranch.tools.report.figures import has_spread

    gradients, links = arguments.trace(trace), arguments.network(network)
    strategies = compressed_strategies(arguments.compressions(compress, COMPRESS), gradients, links)
    around = (links.shifted(-1), links.shifted(+1)) if has_spread(links) else ()
    networks = [strategies.priced(one) for one in (links, *around)]
    named = named_planners.NAMED_PLANNERS
    ddp_s = gradients.forward_s + finish_s(
        gradients, named[named_planners.DDP_DEFAULT](gradients, networks[0]), networks[0]
    )
    planners: dict[str, Planner] = {**named, **strategies.planners}
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
    print_document(document, as_json, lambda: [comparison.comparison_report(document)])


def _row(name: str, planner: Planner, trace: Trace, networks: Sequence[Network], ddp_s: float) -> "ComparedPlanner":
    """What a planner makes for the first network, and how that does on all of them."""
    from anabranch.tools.report.documents import ComparedPlanner
    from anabranch.tools.report.figures import ratio

    network, *around = networks
    made = planner(trace, network)
    timeline = predict(trace, made, network)
    bound_s = lower_bound_s(trace, network, made.lanes)
    low_s, high_s = (trace.forward_s + finish_s(trace, made, at) for at in around) if around else (None, None)
    named, sent = named_planners.NAMED_PLANNERS.get(name), as_sent(made)
    return ComparedPlanner(
        name=name,
        planner=named.planner if named else Compression.named(name).planner_name,
        options=dict(named.options) if named else {},
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
