"""anabranch scale: the same step at many world sizes, on several networks, as tables, sentences and a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from anabranch.fsdp.planning.sharding_modes import PLANNED, SHARDING_MODES, help_of, sharding_mode
from anabranch.tools.cli import arguments
from anabranch.tools.cli.memory import Optimizer, estimator_of, node_size
from anabranch.tools.cli.network_text import MAX_RANKS
from anabranch.tools.cli.options import ForceOption, JsonOption, PlotOption, TraceOption
from anabranch.tools.cli.output import check_free, check_plot, print_json, progress, show_tables, write_plot
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling import Scaling, named_planners, strategy_kinds
from anabranch.tools.predict.scaling import scale as predict
from anabranch.tools.predict.scaling.compression import LEAN
from anabranch.tools.predict.scaling.prediction import COMPRESS, NETWORKS, PLANNERS, WORLD_SIZES
from anabranch.values.quantities import size_nbytes
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from anabranch.planning.memory import Setting

MAX_BATCH = 1 << 30
OPTIMIZER = Optimizer.momentum  # whose state --within counts
DEFAULT_SIZES, DEFAULT_PLANNERS = ",".join(map(str, WORLD_SIZES)), ",".join(PLANNERS)


class Basis(StrEnum):
    """Which batch stays the same as ranks are added: that of each rank, or the global one."""

    weak = "weak"
    strong = "strong"


Networks = Annotated[
    list[str] | None,
    Option(
        "--network",
        metavar="N",
        help="A name that anabranch list shows, a file of anabranch measure, or a description, as in "
        f"ring:ranks=16,...; may be repeated. Default: {', '.join(NETWORKS)}.",
    ),
]
Spread = Annotated[
    float | None, Option(help="For networks without a spread: all costs this share lower and higher, as in 0.2.")
]
Sizes = Annotated[
    str,
    Option(
        metavar="N,...",
        help=f"Numbers of ranks, rising. Default: {', '.join(map(str, WORLD_SIZES))}.",
        show_default=False,
    ),
]
Planners = Annotated[
    str,
    Option(
        metavar="P,...",
        help=f"Some of {', '.join(named_planners.NAMED_PLANNERS)}. Default: all but "
        f"{', '.join(name for name in named_planners.NAMED_PLANNERS if name not in PLANNERS)}.",
        show_default=False,
    ),
]
Compressions = Annotated[
    list[str] | None,
    Option(
        "--compress",
        metavar="KIND",
        help="Also plans with compressed buckets where they gain: auto (as faithful as the backward pass hides, down "
        "to int4), auto:oktopk:0.01 (down to 1 % sparse), bf16, int8, int4, oktopk:0.01 (1 % of the elements), "
        "oktopk:0.01:bf16 (with packed values), or oktopk (as dense as is hidden); lean:int8, lean:auto, lean:0.01 or "
        "lean on the Lean engine; int8@nodes between nodes that are dense inside; may be repeated; "
        f"{arguments.NO_COMPRESSION} for none. Default: {', '.join(COMPRESS)}.",
    ),
]
Sharded = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Also models sharded over all ranks, or inside the nodes of a network that has some: "
        f"{help_of(SHARDING_MODES)}; may be repeated.",
    ),
]
Within = Annotated[
    str | None,
    Option(metavar="SIZE", help="Every strategy, and Lean, at the largest batch that fits in this: 16GiB."),
]


def scale(
    trace: TraceOption,
    network: Networks = None,
    spread: Spread = None,
    world_sizes: Sizes = DEFAULT_SIZES,
    planners: Planners = DEFAULT_PLANNERS,
    compress: Compressions = None,
    sharded: Sharded = None,
    scaling: Annotated[
        Basis, Option(help="Keep the batch of each rank (weak) or the global batch (strong).")
    ] = Basis.weak,
    batch: Annotated[
        int | None, Option(metavar="B", help="Samples per rank (weak) or in all (strong). Default: as recorded.")
    ] = None,
    within: Within = None,
    plot: PlotOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict which strategy wins at which world size on which network, and by how much, with bands."""
    check_plot(plot)
    check_free([plot], force)
    sizes = _sizes(world_sizes)
    recorded = arguments.trace(trace)
    ranges = arguments.network_ranges(network or NETWORKS, spread)
    chosen = _chosen(planners, compress, sharded, batch, within)
    if within is not None:
        setting = _sharded_setting(chosen.sharded, ranges, sizes[0], within)
        chosen = _fitting(recorded, chosen, within, scaling, sizes[-1], setting)
    with progress() as on_point:
        found = predict(
            recorded, ranges, sizes, chosen.planners, chosen.compress, sharded=chosen.sharded, scaling=scaling.value,
            batch=chosen.batch, assumptions=chosen.assumptions, on_point=on_point,
        )  # fmt: skip
    found = replace(found, written=str(plot) if plot else None)
    if plot:
        write_plot(found, plot, force)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)


class _Strategies(NamedTuple):
    """What is compared, at which batch, and what choosing that batch assumes."""

    planners: Sequence[str]
    compress: Sequence[str]
    sharded: Sequence[str]
    batch: int | Mapping[str, int] | None = None
    assumptions: Sequence[str] = ()


def _chosen(
    planners: str, compress: Sequence[str] | None, sharded: Sequence[str] | None, batch: int | None, within: str | None
) -> _Strategies:
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"--batch is {batch}: expected 1 to {MAX_BATCH} samples")
    if batch is not None and within is not None:
        raise ValueError(f"--batch is {batch} and --within is {within}: expected one of them")
    default = COMPRESS if within is None else (*COMPRESS, f"{LEAN}:0.01")
    names = list(dict.fromkeys(name.strip() for name in planners.split(",")))
    return _Strategies(names, arguments.compressions(compress, default), list(dict.fromkeys(sharded or ())), batch)


def _sharded_setting(
    sharded: Sequence[str], ranges: Sequence[NetworkRange], fewest: int, within: str
) -> "Setting | None":
    """How sharded strategies are trained where each rank holds most: at the fewest ranks. None if there is none."""
    if planned := next((name for name in sharded if sharding_mode(name).units == PLANNED), None):
        raise ValueError(f"--within is {within}: the memory of --sharded {planned} is not predicted; run them apart")
    if not sharded:
        return None
    from anabranch.planning.memory import Setting

    in_nodes = any(sharding_mode(name).nodes for name in sharded)
    sizes = {node_size(network.middle) for network in ranges} if in_nodes else {None}
    if len(sizes) > 1:
        raise ValueError(
            f"--within is {within}: what a rank holds under hsdp depends on the nodes of the network, and these have "
            f"{sorted(size or 1 for size in sizes)} ranks; run them apart"
        )
    size = sizes.pop()
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
    estimator = estimator_of(model, OPTIMIZER)
    fitting = largest_batches(estimator, kinds, limit_nbytes, ranks, OPTIMIZER.value, sharded)
    if not fitting.batches:
        raise ValueError(f"--within is {within}: not one sample fits, whatever the strategy; give more")
    largest = (
        f"every strategy at the largest batch per rank that fits in {size(limit_nbytes)} at {count(ranks, 'rank')}"
    )
    planners, compress, shardings = (
        [name for name in names if name in fitting.batches]
        for names in (chosen.planners, chosen.compress, chosen.sharded)
    )
    return _Strategies(planners, compress, shardings, fitting.batches, [largest, *fitting.assumptions])


def _sizes(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = [int(piece) if piece.isascii() and piece.isdigit() and len(piece) < 10 else 0 for piece in pieces]
    for piece, size, before in zip(pieces, sizes, [0, *sizes], strict=False):
        if not before < size <= MAX_RANKS:
            raise ValueError(
                f"--world-sizes has {piece!r}: expected rising whole numbers to {MAX_RANKS}, such as 4,8,16"
            )
    return sizes


def _print(found: Scaling) -> None:
    from rich.text import Text

    from anabranch.tools.report.formatting import plain
    from anabranch.tools.report.scaling import scaling_report

    notes = [Text(plain(f"Plot written to {found.written}"))] if found.written else []
    show_tables(scaling_report(found), *notes)
