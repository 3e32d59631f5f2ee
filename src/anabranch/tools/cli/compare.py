"""anabranch compare: every planner, and the plan of every compression, in one table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from anabranch.planning.simulator import finish_s, lower_bound_s
from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import JsonOption, NetworkOption, TraceOption
from anabranch.tools.cli.output import print_json, progress, show_tables
from anabranch.tools.predict.scaling import named_planners
from anabranch.tools.predict.scaling.compression import (
    CompressedStrategies,
    Compression,
    as_sent,
    compressed_strategies,
)
from anabranch.values.kinds.fidelity import by_fidelity, error_of_plan
from anabranch.values.kinds.names import AUTO, COMPRESSED, kind_of
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from anabranch.tools.report.documents import ComparedPlanner

COMPRESS = (AUTO, *COMPRESSED, kind_of(0.01))

Compressions = Annotated[
    list[str] | None,
    Option(
        "--compress",
        metavar="KIND",
        help="Also plans with compressed buckets where they gain, as in scale; may be repeated; "
        f"{arguments.NO_COMPRESSION} for none. Default: {', '.join(COMPRESS)}.",
    ),
]


def compare(
    trace: TraceOption,
    network: NetworkOption,
    compress: Compressions = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every planner and every compression on one trace and network."""
    from anabranch.tools.report import comparison
    from anabranch.tools.report.documents import CompareDocument, printed

    gradients, links = arguments.trace(trace), arguments.network(network)
    strategies = compressed_strategies(arguments.compressions(compress, COMPRESS), gradients, links)
    rows, compressed = _rows(gradients, links, strategies)
    best = comparison.best(rows)
    document = CompareDocument(
        trace=trace,
        network=network,
        world_size=links.world_size,
        forward_s=gradients.forward_s,
        backward_s=gradients.backward_s,
        best=best.name,
        rows=tuple(rows),
        compressed=tuple(compressed),
        assumptions=tuple(strategies.assumptions),
    )
    if as_json:
        print_json(printed(document))
    else:
        show_tables(comparison.comparison_report(document))


class _Contestant(NamedTuple):
    """A planner of the library, or the planner of a compression, by its name, with its options."""

    name: str
    planner: str
    options: dict[str, Any]
    plan: Callable[[Trace, Network], Plan]


def _rows(
    trace: Trace, network: Network, strategies: CompressedStrategies
) -> "tuple[list[ComparedPlanner], list[ComparedPlanner]]":
    """The rows of all planners, and those of all compressions."""
    from anabranch.tools.report.figures import has_spread

    around = (network.shifted(-1), network.shifted(+1)) if has_spread(network) else ()
    here, *others = (strategies.priced(one) for one in (network, *around))
    ddp_s = trace.forward_s + finish_s(
        trace, named_planners.NAMED_PLANNERS[named_planners.DDP_DEFAULT](trace, here), here
    )
    contestants = [
        _Contestant(name, made.planner, dict(made.options), made)
        for name, made in named_planners.NAMED_PLANNERS.items()
    ]
    contestants += [
        _Contestant(name, Compression.named(name).planner_name, {}, planner)
        for name, planner in strategies.planners.items()
    ]
    rows: list[ComparedPlanner] = []
    with progress() as update:
        for one in contestants:
            rows.append(_row(one, trace, here, ddp_s, others))
            update("planning", len(rows), len(contestants))
    return rows[: len(named_planners.NAMED_PLANNERS)], rows[len(named_planners.NAMED_PLANNERS) :]


def _row(
    one: _Contestant, trace: Trace, network: Network, ddp_s: float, around: Sequence[Network]
) -> "ComparedPlanner":
    from anabranch.tools.report.documents import ComparedPlanner
    from anabranch.tools.report.figures import ratio

    made = one.plan(trace, network)
    timeline = predict(trace, made, network)
    bound_s = lower_bound_s(trace, network, made.lanes)
    low_s, high_s = (trace.forward_s + finish_s(trace, made, at) for at in around) if around else (None, None)
    sent = as_sent(made)
    return ComparedPlanner(
        name=one.name,
        planner=one.planner,
        options=one.options,
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
