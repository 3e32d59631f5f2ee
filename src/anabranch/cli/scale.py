"""anabranch scale: the same step at many world sizes, as tables and a plot."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import lineup, specs
from anabranch.cli.links import MAX_RANKS
from anabranch.cli.output import ForceOption, JsonOption, check_free, plot_format, print_json, progress, show_tables
from anabranch.cli.sparse import sparse_rows
from anabranch.files import write_bytes
from anabranch.network import Network
from anabranch.sim import ScalePoint, sweep
from anabranch.trace import Trace

if TYPE_CHECKING:
    from anabranch.report.plot import Format
    from anabranch.report.scaling import Curves

STRAGGLER_FACTOR = 2.0
MAX_JITTER = 3.0  # work that varies by more than e³ is no longer the same work


class Scaling(StrEnum):
    """What stays the same as ranks are added: the batch of each rank, or the batch of all."""

    weak = "weak"
    strong = "strong"


SizesOption = Annotated[str, typer.Option(help="Numbers of ranks, rising.")]
PlannersOption = Annotated[str, typer.Option(help=f"Some of {', '.join(lineup.LINEUP)}.")]
CompressOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help="Also the exact plan with sparse buckets where they gain: oktopk:0.01 (1 % of the elements), or oktopk "
        "(as dense as the backward pass hides); may be repeated.",
    ),
]
ScalingOption = Annotated[Scaling, typer.Option(help="Keep the batch of each rank (weak) or of all (strong).")]
JitterOption = Annotated[float, typer.Option(help="Each piece of work takes exp(jitter·z) as long, z standard normal.")]
StragglersOption = Annotated[int, typer.Option(help="How many ranks compute slower than the others.")]
FactorOption = Annotated[
    float | None, typer.Option(help=f"How many times as long a straggler computes; {STRAGGLER_FACTOR:g} unless told.")
]
SeedOption = Annotated[int, typer.Option(help="Of the jitter: the same seed gives the same numbers.", min=0)]
PlotOption = Annotated[Path | None, typer.Option(help="Write a plot to this .png or .svg file.")]


def scale(
    trace: specs.TraceOption,
    network: specs.NetworkOption,
    world_sizes: SizesOption = "4,8,16,32,64,128,256,512,1024,2048",
    planners: PlannersOption = "per_tensor,by_bytes,mgwfbp,optimal,lanes",
    compress: CompressOption = None,
    scaling: ScalingOption = Scaling.weak,
    jitter: JitterOption = 0.0,
    stragglers: StragglersOption = 0,
    straggler_factor: FactorOption = None,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict iteration time, speed-up and efficiency at many world sizes."""
    form = plot_format(plot)
    check_free([plot], force)
    if straggler_factor is not None and not stragglers:
        raise ValueError(f"--straggler-factor is {straggler_factor:g} but --stragglers is 0: say how many there are")
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(f"--jitter is {jitter:g}: expected 0 to {MAX_JITTER:g}; 0.05 varies most pieces by about 5 %")
    slow = STRAGGLER_FACTOR if straggler_factor is None else straggler_factor
    ranks = {"jitter": jitter, "stragglers": stragglers, "straggler_factor": slow, "seed": seed}
    gradients, links = specs.trace(trace), specs.network(network)
    sizes, sparse = _sizes(world_sizes), sparse_rows(list(dict.fromkeys(compress or ())), gradients, links)
    functions = {**{name: lineup.entry(name).function for name in _names(planners)}, **sparse.planners}
    given = {"scaling": scaling.value, "pricing": sparse.pricing, **ranks}
    steps = sweep(gradients, links, sizes, functions, **given)  # type: ignore[arg-type]
    points = list(progress(steps, len(sizes) * len(functions), "sweeping"))
    assumptions = _assumptions(links, sizes, scaling) + sparse.assumptions
    if plot and form:
        write_bytes(_drawn(gradients, points, assumptions, form), plot, force)
    document = {
        "command": "scale", "scaling": scaling.value, **ranks, "assumptions": assumptions,
        "points": [asdict(point) for point in points], "written": str(plot) if plot else None,
    }  # fmt: skip
    if as_json:
        print_json(document)
    else:
        _print(points, document)


def _sizes(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = [int(piece) if piece.isascii() and piece.isdigit() and len(piece) < 10 else 0 for piece in pieces]
    for piece, size, before in zip(pieces, sizes, [0, *sizes], strict=False):
        if not before < size <= MAX_RANKS:
            raise ValueError(
                f"--world-sizes has {piece!r}: expected rising whole numbers to {MAX_RANKS}, such as 4,8,16"
            )
    return sizes


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _assumptions(network: Network, sizes: Sequence[int], scaling: Scaling) -> list[str]:
    """What the numbers rest on besides the two files."""
    kept = "batch per rank kept (weak scaling)"
    batch = kept if scaling is Scaling.weak else "global batch kept (strong scaling), computing time ∝ 1/ranks"
    carried = [size for size in sizes if size != network.world_size]
    if not carried:
        return [batch]
    note = network.at(carried[-1]).meta.get("assumption") or f"formula given for {network.world_size} ranks"
    return [batch, f"network extrapolated by {note}", "lanes contend as there"]


def _curves(points: Sequence[ScalePoint], value: Callable[[ScalePoint], float]) -> "Curves":
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        curves.setdefault(point.planner, {})[point.world_size] = value(point)
    return curves


def _drawn(trace: Trace, points: Sequence[ScalePoint], assumptions: Sequence[str], form: "Format") -> bytes:
    from anabranch.report.plot import scaling_plot

    model = str(trace.meta.get("model", f"{len(trace)} gradients"))[:60]
    iteration_s, efficiency = _curves(points, lambda p: p.iteration_s), _curves(points, lambda p: p.efficiency)
    return scaling_plot(f"{model}: predicted scaling", "; ".join(assumptions), iteration_s, efficiency, form)


def _print(points: Sequence[ScalePoint], document: dict[str, Any]) -> None:
    from rich.text import Text

    from anabranch.report.cells import plain
    from anabranch.report.scaling import scaling_report

    tables = scaling_report(
        _curves(points, lambda p: p.iteration_s),
        _curves(points, lambda p: p.speedup),
        _curves(points, lambda p: p.efficiency),
    )
    notes = [Text(plain(f"Assumed: {'; '.join(document['assumptions'])}."))]
    if document["written"]:
        notes.append(Text(plain(f"Plot written to {document['written']}")))
    show_tables(tables, *notes)
