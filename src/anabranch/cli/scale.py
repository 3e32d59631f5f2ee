"""anabranch scale: the same step at many world sizes, on several networks, as tables, words and a picture."""

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import arguments
from anabranch.cli.network_text import MAX_RANKS
from anabranch.cli.output import ForceOption, JsonOption, check_free, plot_format, print_json, show_tables
from anabranch.files import write_bytes
from anabranch.network_presets import PRESETS
from anabranch.scaling import line_up
from anabranch.scaling.compression import LEAN
from anabranch.scaling.result import Scaling
from anabranch.scaling.study import Sweep
from anabranch.scaling.sweep import Compute
from anabranch.sim.ranks import MAX_JITTER

if TYPE_CHECKING:
    from anabranch.report.plot import Format

STRAGGLER_FACTOR = 2.0
MAX_FACTOR = 1e3
MAX_BATCH = 1 << 30
MAX_DRAWN = 1 << 17  # ranks: some seconds
NETWORKS = ("10gbe", "nvlink+100gbe")
COMPRESS = ("oktopk:0.01",)
NO_COMPRESSION = "none"


class Basis(StrEnum):
    """What stays the same as ranks are added: the batch of each rank, or the batch of all."""

    weak = "weak"
    strong = "strong"


NetworksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        metavar="N",
        help=f"A name ({', '.join(PRESETS)}), a file of anabranch measure, or a description: "
        f"{arguments.network_text.EXAMPLES['ring']}; may be repeated. Unless told: {', '.join(NETWORKS)}.",
    ),
]
SpreadOption = Annotated[
    float | None, typer.Option(help="For networks that bring no spread: all costs this share lower and higher, 0.2.")
]
SizesOption = Annotated[str, typer.Option(help="Numbers of ranks, rising.")]
PlannersOption = Annotated[str, typer.Option(help=f"Some of {', '.join(line_up.LINEUP)}.")]
CompressOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help="Also the exact plan with sparse buckets where they gain: oktopk:0.01 (1 % of the elements), or oktopk "
        f"(as dense as the backward pass hides), lean alike; may be repeated; {NO_COMPRESSION} for neither.",
    ),
]
ScalingOption = Annotated[Basis, typer.Option(help="Keep the batch of each rank (weak) or of all (strong).")]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_BATCH, help="Samples per rank (weak) or in all (strong); as recorded unless told."),
]
FixedOption = Annotated[float, typer.Option(help="Share of the recorded computing that does not grow with the batch.")]
WithinOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Every strategy, and Lean, at the largest batch that fits in this: 16GiB."),
]
JitterOption = Annotated[float, typer.Option(help="Each piece of work takes exp(jitter·z) as long, z standard normal.")]
StragglersOption = Annotated[int, typer.Option(help="How many ranks compute slower than the others.")]
FactorOption = Annotated[
    float | None, typer.Option(help=f"How many times as long a straggler computes; {STRAGGLER_FACTOR:g} unless told.")
]
SeedOption = Annotated[int, typer.Option(help="Of the jitter: the same seed gives the same numbers.", min=0)]
PlotOption = Annotated[Path | None, typer.Option(help="Write a plot to this .png or .svg file.")]


def scale(
    trace: arguments.TraceOption,
    network: NetworksOption = None,
    spread: SpreadOption = None,
    world_sizes: SizesOption = "4,8,16,32,64,128,256,512,1024,2048",
    planners: PlannersOption = "per_tensor,single,by_bytes,mgwfbp,optimal,asc,lanes",
    compress: CompressOption = None,
    scaling: ScalingOption = Basis.weak,
    batch: BatchOption = None,
    fixed_share: FixedOption = 0.0,
    within: WithinOption = None,
    jitter: JitterOption = 0.0,
    stragglers: StragglersOption = 0,
    straggler_factor: FactorOption = None,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict which strategy wins at which world size on which network, and by how much, with bands."""
    form = plot_format(plot)
    check_free([plot], force)
    if straggler_factor is not None and not stragglers:
        raise ValueError(f"--straggler-factor is {straggler_factor:g} but --stragglers is 0: say how many there are")
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(f"--jitter is {jitter:g}: expected 0 to {MAX_JITTER:g}; 0.05 varies most pieces by about 5 %")
    if straggler_factor is not None and not 0 < straggler_factor <= MAX_FACTOR:
        raise ValueError(f"--straggler-factor is {straggler_factor:g}: expected above 0 to {MAX_FACTOR:g}, such as 2")
    slow = STRAGGLER_FACTOR if straggler_factor is None else straggler_factor
    compute = Compute(fixed_share, jitter, stragglers, slow, seed)
    sizes = _sizes(world_sizes)
    if (jitter or stragglers) and sizes[-1] > MAX_DRAWN:
        raise ValueError(
            f"--world-sizes has {sizes[-1]}: expected {MAX_DRAWN} at most with --jitter or --stragglers, "
            "for which every rank is drawn by itself"
        )
    gradients = arguments.trace(trace)
    ranges = arguments.network_ranges(network or NETWORKS, spread)
    ways = list(dict.fromkeys(compress or (COMPRESS if within is None else (*COMPRESS, f"{LEAN}:0.01"))))
    ways = [] if ways == [NO_COMPRESSION] else ways
    swept = Sweep(gradients, sizes, _names(planners), ways, scaling.value, compute)
    swept.set_batches(batch, within)
    found = swept.run(ranges)
    from anabranch.report.scaling_answer import answer

    found = replace(found, answer=tuple(answer(found)), written=str(plot) if plot else None)
    if plot and form:
        write_bytes(_drawn(found, form), plot, force)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)


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


def _drawn(found: Scaling, form: "Format") -> bytes:
    from anabranch.report.plot import scaling_plot

    return scaling_plot(found, form)


def _print(found: Scaling) -> None:
    from rich.text import Text

    from anabranch.report.formatting import plain
    from anabranch.report.scaling import scaling_report

    notes = [Text(plain(f"Plot written to {found.written}"))] if found.written else []
    show_tables(scaling_report(found), *notes)
