"""anabranch scale: the same step at many world sizes, on several networks, as tables, sentences and a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from anabranch.fsdp.planning.modes import PLANNED, SHARDING_MODES, help_of, sharding_mode
from anabranch.planning.simulator.ranks import MAX_JITTER
from anabranch.tools.cli import arguments, network_text
from anabranch.tools.cli.memory import Activations, Optimizer, estimator_of, node_size
from anabranch.tools.cli.network_text import MAX_RANKS
from anabranch.tools.cli.output import (
    ForceOption,
    JsonOption,
    check_free,
    plot_format,
    print_json,
    progress_bar,
    show_tables,
)
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling import Compute, Scaling, line_up, strategy_kinds
from anabranch.tools.predict.scaling import scale as predict
from anabranch.tools.predict.scaling.compression import LEAN
from anabranch.tools.predict.scaling.study import COMPRESS, NETWORKS, PLANNERS, WORLD_SIZES
from anabranch.values.files import write_bytes
from anabranch.values.quantities import size_nbytes
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from anabranch.planning.memory import Setting
    from anabranch.tools.report.plot import Format

STRAGGLER_FACTOR = 2.0
MAX_STRAGGLER_FACTOR = 1e3
MAX_BATCH = 1 << 30
MAX_RANKS_WITH_JITTER = 1 << 17  # every rank is drawn: some seconds
OPTIMIZER = Optimizer.momentum  # whose state --within counts
DEFAULT_SIZES, DEFAULT_PLANNERS = ",".join(map(str, WORLD_SIZES)), ",".join(PLANNERS)


class Basis(StrEnum):
    """Which batch stays the same as ranks are added: that of each rank, or the global one."""

    weak = "weak"
    strong = "strong"


NetworksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        metavar="N",
        help="A name that anabranch list shows, a file of anabranch measure, or a description, as in "
        f"{network_text.SHORT_EXAMPLE}; may be repeated. Default: {', '.join(NETWORKS)}.",
    ),
]
SpreadOption = Annotated[
    float | None, typer.Option(help="For networks without a spread: all costs this share lower and higher, as in 0.2.")
]
SizesOption = Annotated[
    str,
    typer.Option(
        metavar="N,...",
        help=f"Numbers of ranks, rising. Default: {', '.join(map(str, WORLD_SIZES))}.",
        show_default=False,
    ),
]
PlannersOption = Annotated[
    str,
    typer.Option(
        metavar="P,...",
        help=f"Some of {', '.join(line_up.LINE_UP)}. Default: all but "
        f"{', '.join(name for name in line_up.LINE_UP if name not in PLANNERS)}.",
        show_default=False,
    ),
]
CompressOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help="Also plans with compressed buckets where they gain: auto (as faithful as the backward pass hides, down "
        "to int4), auto:oktopk:0.01 (down to 1 % sparse), bf16, int8, int4, oktopk:0.01 (1 % of the elements), "
        "oktopk:0.01:bf16 (with packed values), or oktopk (as dense as is hidden); lean:int8, lean:auto, lean:0.01 or "
        "lean on the Lean engine; "
        f"int8@nodes between nodes that are dense inside; may be repeated; {arguments.NO_COMPRESSION} for none. "
        f"Default: {', '.join(COMPRESS)}.",
    ),
]
ShardedOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help=f"Also models sharded over all ranks, or inside the nodes of a network: {help_of(SHARDING_MODES)}; "
        "may be repeated.",
    ),
]
ScalingOption = Annotated[Basis, typer.Option(help="Keep the batch of each rank (weak) or the global batch (strong).")]
BatchOption = Annotated[
    int | None,
    typer.Option(metavar="B", help="Samples per rank (weak) or in all (strong). Default: as recorded."),
]
FixedOption = Annotated[
    float, typer.Option(help="Share of the recorded compute time that does not grow with the batch.")
]
WithinOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Every strategy, and Lean, at the largest batch that fits in this: 16GiB."),
]
JitterOption = Annotated[float, typer.Option(help="Each piece of work takes exp(jitter·z) as long, z standard normal.")]
StragglersOption = Annotated[int, typer.Option(help="How many ranks compute slower than the others.")]
FactorOption = Annotated[
    float | None, typer.Option(help=f"How many times as long a straggler computes. Default: {STRAGGLER_FACTOR:g}.")
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", min=0, help="Of the jitter: the same seed gives the same numbers.")
]
PlotOption = Annotated[Path | None, typer.Option(help="Write a plot to this .png or .svg file.")]


def scale(
    trace: arguments.TraceOption,
    network: NetworksOption = None,
    spread: SpreadOption = None,
    world_sizes: SizesOption = DEFAULT_SIZES,
    planners: PlannersOption = DEFAULT_PLANNERS,
    compress: CompressOption = None,
    sharded: ShardedOption = None,
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
    sizes = _sizes(world_sizes)
    compute = _compute(fixed_share, jitter, stragglers, straggler_factor, seed, sizes[-1])
    recorded = arguments.trace(trace)
    ranges = arguments.network_ranges(network or NETWORKS, spread)
    chosen = _chosen(planners, compress, batch, within)
    ways = list(dict.fromkeys(sharded or ()))
    if within is not None:
        setting = _sharded_setting(ways, ranges, sizes[0], within)
        chosen = _fitting(recorded, chosen._replace(sharded=ways), within, scaling, sizes[-1], setting)
        ways = list(chosen.sharded)
    with progress_bar() as on_point:
        found = predict(
            recorded, ranges, sizes, chosen.planners, chosen.compress, sharded=ways, scaling=scaling.value,
            batch=chosen.batch, compute=compute, assumptions=chosen.assumptions, on_point=on_point,
        )  # fmt: skip
    found = replace(found, written=str(plot) if plot else None)
    if plot and form:
        write_bytes(_drawn(found, form), plot, force)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)


class _Strategies(NamedTuple):
    """What is compared, at which batch, and what choosing that batch assumes."""

    planners: Sequence[str]
    compress: Sequence[str]
    batch: int | Mapping[str, int] | None = None
    assumptions: Sequence[str] = ()
    sharded: Sequence[str] = ()


def _chosen(planners: str, compress: Sequence[str] | None, batch: int | None, within: str | None) -> _Strategies:
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"--batch is {batch}: expected 1 to {MAX_BATCH} samples")
    if batch is not None and within is not None:
        raise ValueError(f"--batch is {batch} and --within is {within}: expected one of them")
    default = COMPRESS if within is None else (*COMPRESS, f"{LEAN}:0.01")
    names = list(dict.fromkeys(name.strip() for name in planners.split(",")))
    return _Strategies(names, arguments.compressions(compress, default), batch)


def _sharded_setting(ways: Sequence[str], ranges: Sequence[NetworkRange], fewest: int, within: str) -> "Setting | None":
    """How sharded strategies are trained where each rank holds most: at the fewest ranks. None if there is none."""
    if planned := next((way for way in ways if sharding_mode(way).units == PLANNED), None):
        raise ValueError(f"--within is {within}: the memory of --sharded {planned} is not predicted; run them apart")
    if not ways:
        return None
    from anabranch.planning.memory import Setting

    sizes = {node_size(network.middle) for network in ranges}
    if len(sizes) > 1 and any(sharding_mode(way).nodes for way in ways):
        raise ValueError(
            f"--within is {within}: what a rank holds under hsdp depends on the nodes of the network, and these have "
            f"{sorted(size or 1 for size in sizes)} ranks; run them apart"
        )
    size = sizes.pop() if any(sharding_mode(way).nodes for way in ways) else None
    return Setting(ranks=fewest, ranks_per_node=size and min(size, fewest))


def _fitting(
    trace: Trace, chosen: _Strategies, within: str, scaling: Basis, ranks: int, sharded: "Setting | None"
) -> _Strategies:
    """The strategies of which at least one sample fits in ``within``, each at the largest batch that does.

    The model of the trace must be one that anabranch can build: a trace does not hold activations.
    """
    if scaling is Basis.strong:
        raise ValueError(f"--within is {within}: it finds the batch of each rank, which --scaling strong does not keep")
    limit_nbytes = size_nbytes("--within", within)
    from anabranch.tools.bench import zoo
    from anabranch.tools.predict.memory.fitting import largest_batches
    from anabranch.tools.report.formatting import count, size

    model = trace.meta.get("model")
    if not isinstance(model, str) or model not in zoo.MODELS:
        raise ValueError(
            f"--within: a trace holds no activations, and its model ({model!r}) is none that anabranch can build "
            f"({', '.join(zoo.MODELS)}): leave --within out, or give the batch by --batch"
        )
    kinds = strategy_kinds(chosen.planners, chosen.compress, chosen.sharded)
    estimator = estimator_of(model, OPTIMIZER, Activations.keep)
    fitting = largest_batches(estimator, kinds, limit_nbytes, ranks, OPTIMIZER.value, sharded)
    if not fitting.batches:
        raise ValueError(f"--within is {within}: not one sample fits, whatever the strategy; give more")
    largest = (
        f"every strategy at the largest batch per rank that fits in {size(limit_nbytes)} at {count(ranks, 'rank')}"
    )
    return _Strategies(
        [name for name in chosen.planners if name in fitting.batches],
        [name for name in chosen.compress if name in fitting.batches],
        fitting.batches,
        [largest, *fitting.assumptions],
        [name for name in chosen.sharded if name in fitting.batches],
    )


def _compute(
    fixed_share: float, jitter: float, stragglers: int, straggler_factor: float | None, seed: int, most_ranks: int
) -> Compute:
    if straggler_factor is not None and not stragglers:
        raise ValueError(f"--straggler-factor is {straggler_factor:g} but --stragglers is 0: say how many there are")
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(f"--jitter is {jitter:g}: expected 0 to {MAX_JITTER:g}; 0.05 varies most pieces by about 5 %")
    if straggler_factor is not None and not 0 < straggler_factor <= MAX_STRAGGLER_FACTOR:
        raise ValueError(
            f"--straggler-factor is {straggler_factor:g}: expected above 0 to {MAX_STRAGGLER_FACTOR:g}, such as 2"
        )
    if (jitter or stragglers) and most_ranks > MAX_RANKS_WITH_JITTER:
        raise ValueError(
            f"--world-sizes has {most_ranks}: expected {MAX_RANKS_WITH_JITTER} at most with --jitter or --stragglers, "
            "for which every rank is drawn by itself"
        )
    return Compute(fixed_share, jitter, stragglers, straggler_factor or STRAGGLER_FACTOR, seed)


def _sizes(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = [int(piece) if piece.isascii() and piece.isdigit() and len(piece) < 10 else 0 for piece in pieces]
    for piece, size, before in zip(pieces, sizes, [0, *sizes], strict=False):
        if not before < size <= MAX_RANKS:
            raise ValueError(
                f"--world-sizes has {piece!r}: expected rising whole numbers to {MAX_RANKS}, such as 4,8,16"
            )
    return sizes


def _drawn(found: Scaling, form: "Format") -> bytes:
    from anabranch.tools.report.plot import scaling_plot

    return scaling_plot(found, form)


def _print(found: Scaling) -> None:
    from rich.text import Text

    from anabranch.tools.report.formatting import plain
    from anabranch.tools.report.scaling import scaling_report

    notes = [Text(plain(f"Plot written to {found.written}"))] if found.written else []
    show_tables(scaling_report(found), *notes)
