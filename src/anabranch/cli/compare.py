"""anabranch compare: every planner side by side."""

from typing import TYPE_CHECKING

from anabranch.cli import arguments
from anabranch.cli.output import JsonOption, print_json, progress, show_tables
from anabranch.network import Network
from anabranch.scaling import line_up
from anabranch.sim import finish_s, lower_bound_s
from anabranch.sim import simulate as predict
from anabranch.trace import Trace

if TYPE_CHECKING:
    from anabranch.report.documents import ComparedPlanner


def compare(trace: arguments.TraceOption, network: arguments.NetworkOption, as_json: JsonOption = False) -> None:
    """Compare every planner on one trace and network, and with the bound that none can beat."""
    from anabranch.report import comparison
    from anabranch.report.documents import CompareDocument, printed

    gradients, links = arguments.trace(trace), arguments.network(network)
    rows = _rows(gradients, links)
    best = comparison.best(rows)
    if as_json:
        document = CompareDocument(
            trace=trace,
            network=network,
            world_size=links.world_size,
            forward_s=gradients.forward_s,
            backward_s=gradients.backward_s,
            best=best.name,
            rows=tuple(rows),
        )
        print_json(printed(document))
    else:
        show_tables(comparison.comparison_report(rows))


def _rows(trace: Trace, network: Network) -> "list[ComparedPlanner]":
    from anabranch.report.figures import has_spread

    ddp = line_up.LINE_UP[line_up.DDP_DEFAULT](trace, network)
    ddp_s = trace.forward_s + finish_s(trace, ddp, network)
    around = (network.shifted(-1), network.shifted(+1)) if has_spread(network) else None
    names = progress(list(line_up.LINE_UP), len(line_up.LINE_UP), "planning")
    return [_row(name, trace, network, ddp_s, around) for name in names]


def _row(
    name: str, trace: Trace, network: Network, ddp_s: float, around: tuple[Network, Network] | None
) -> "ComparedPlanner":
    from anabranch.report.documents import ComparedPlanner
    from anabranch.report.figures import ratio

    planner = line_up.LINE_UP[name]
    made = planner(trace, network)
    timeline = predict(trace, made, network)
    bound_s = lower_bound_s(trace, network, made.lanes)
    low_s, high_s = (trace.forward_s + finish_s(trace, made, at) for at in around) if around else (None, None)
    return ComparedPlanner(
        name=name,
        planner=planner.planner,
        options=dict(planner.options),
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
    )
