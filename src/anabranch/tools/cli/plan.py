"""anabranch plan: decide which gradients travel together, and say what that should cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from anabranch.planning.simulator import finish_s, lower_bound_s
from anabranch.planning.simulator import simulate as predict
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import ForceOption, JsonOption, NetworkOption, TraceOption
from anabranch.tools.cli.output import check_free, print_json, show_tables
from anabranch.tools.predict.scaling import named_planners
from anabranch.values.files import save

if TYPE_CHECKING:
    from anabranch.tools.report.documents import PlanDocument


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
    from anabranch.tools.report.documents import PlanDocument, printed
    from anabranch.tools.report.figures import planned_buckets, ratio, timeline_figures

    ddp_s, alone_s = (
        gradients.forward_s + finish_s(gradients, named_planners.NAMED_PLANNERS[name](gradients, links), links)
        for name in (named_planners.DDP_DEFAULT, named_planners.NO_MERGING)
    )
    document = PlanDocument(
        planner=chosen.planner,
        options=dict(chosen.options),
        world_size=links.world_size,
        fingerprint=made.fingerprint,
        lanes=made.lanes,
        **timeline_figures(timeline),
        lower_bound_s=lower_bound_s(gradients, links, made.lanes),
        speedup_over_ddp_default=ratio(ddp_s, timeline.iteration_s),
        speedup_over_per_tensor=ratio(alone_s, timeline.iteration_s),
        buckets=planned_buckets(dict(enumerate(made.buckets)), timeline, gradients),
        written=str(output) if output else None,
    )
    if as_json:
        print_json(printed(document))
    else:
        _print(planner, document)


def _print(planner: str, document: "PlanDocument") -> None:
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
    title = f"Plan by {planner}: {buckets} on {lanes}, {count(document.world_size, 'rank')}"
    show_tables(terminal(bucket_table("Buckets in launch order", document.buckets)), facts(title, pairs))
