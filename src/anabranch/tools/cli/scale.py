"""anabranch scale: the same step at many world sizes, on several networks, as tables and sentences."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from anabranch.fsdp.planning.sharding_modes import SHARDING_MODES, help_of
from anabranch.planning.footprint import Setting
from anabranch.tools.cli import arguments
from anabranch.tools.cli.memory import Optimizer, estimator_of, node_size, unplanned
from anabranch.tools.cli.network_text import MAX_RANKS
from anabranch.tools.cli.output import print_document, progress
from anabranch.tools.cli.shared_options import JsonOption, TraceOption
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling import scale as predict
from anabranch.tools.predict.scaling import strategy_kinds
from anabranch.tools.predict.scaling.compression import LEAN
from anabranch.tools.predict.scaling.prediction import COMPRESS, NETWORKS, PLANNERS, WORLD_SIZES
from anabranch.tools.predict.scaling.result import Basis
from anabranch.values.quantities import size_nbytes
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from anabranch.tools.predict.memory.fitting import Fitting

MAX_BATCH = 1 << 30
OPTIMIZER: Optimizer = "momentum"  # whose state --within counts
DEFAULT_SIZES, DEFAULT_PLANNERS = ",".join(map(str, WORLD_SIZES)), ",".join(PLANNERS)

NETWORK = Option(
    metavar="N",
    help="A name that anabranch list shows, a file of anabranch measure, or a description, as in ring:ranks=16,...; "
    f"may be repeated. Default: {', '.join(NETWORKS)}.",
)
SIZES = Option(
    metavar="N,...", help=f"Numbers of ranks, rising. Default: {', '.join(map(str, WORLD_SIZES))}.", show_default=False
)
SOME_PLANNERS = Option(metavar="P,...", help=f"Some of {', '.join(PLANNERS)}. Default: all.", show_default=False)
COMPRESSION = Option(
    metavar="KIND",
    help="Also plans with compressed buckets where they gain: auto (as faithful as the backward pass hides, down to "
    "int4), auto:oktopk:0.01 (down to 1 % sparse), bf16, int8, int4, oktopk:0.01 (1 % of the elements), "
    "oktopk:0.01:bf16 (with packed values), or oktopk (as dense as is hidden); lean:int8, lean:auto, lean:0.01 or lean "
    "on the Lean engine; int8@nodes, dense@nodes and such between nodes, after exact sums inside; may be repeated; "
    f"{arguments.NO_COMPRESSION} for none. Default: {', '.join(COMPRESS)}.",
)
SHARDED = Option(
    metavar="NAME",
    help="Also models sharded over all ranks, or inside the nodes of a network that has some: "
    f"{help_of(SHARDING_MODES)}; may be repeated.",
)
BATCH = Option(metavar="B", help="Samples per rank (weak) or in all (strong). Default: as recorded.")
WITHIN = Option(metavar="SIZE", help="Every strategy, and Lean, at the largest batch that fits in this: 16GiB.")


def scale(
    trace: TraceOption,
    network: Annotated[list[str] | None, NETWORK] = None,
    world_sizes: Annotated[str, SIZES] = DEFAULT_SIZES,
    planners: Annotated[str, SOME_PLANNERS] = DEFAULT_PLANNERS,
    compress: Annotated[list[str] | None, COMPRESSION] = None,
    sharded: Annotated[list[str] | None, SHARDED] = None,
    scaling: Annotated[Basis, Option(help="Keep the batch of each rank (weak) or the global one (strong).")] = "weak",
    batch: Annotated[int | None, BATCH] = None,
    within: Annotated[str | None, WITHIN] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict which strategy wins at which world size on which network, and by how much, with bands."""
    sizes, recorded = _sizes(world_sizes), arguments.trace(trace)
    ranges = arguments.network_ranges(network or NETWORKS)
    if batch is not None and (within is not None or not 1 <= batch <= MAX_BATCH):
        raise ValueError(f"--batch is {batch}: expected 1 to {MAX_BATCH} samples, and no --within")
    default = COMPRESS if within is None else (*COMPRESS, f"{LEAN}:0.01")
    chosen = [
        list(dict.fromkeys(name.strip() for name in planners.split(","))),
        arguments.compressions(compress, default),
        list(dict.fromkeys(sharded or ())),
    ]
    batches: int | Mapping[str, int] | None = batch
    assumptions: Sequence[str] = ()
    if within is not None:
        if scaling == "strong":
            raise ValueError(f"--within is {within}: it finds the batch of each rank; expected no --scaling strong")
        fitting = _fitting(recorded, chosen, within, ranges, sizes)
        batches, assumptions = fitting.batches, fitting.assumptions
        chosen = [[name for name in names if name in fitting.batches] for names in chosen]
    with progress() as on_point:
        found = predict(
            recorded, ranges, sizes, chosen[0], chosen[1], sharded=chosen[2], scaling=scaling, batch=batches,
            assumptions=assumptions, on_point=on_point,
        )  # fmt: skip
    from anabranch.tools.report.scaling import scaling_report

    print_document(found, as_json, lambda: scaling_report(found))


def _fitting(
    trace: Trace, chosen: Sequence[Sequence[str]], within: str, ranges: Sequence[NetworkRange], sizes: Sequence[int]
) -> "Fitting":
    """The largest batch of each strategy of which at least one sample fits in ``within``.

    The model of the trace must be one that anabranch can build: a trace does not hold activations.
    """
    limit_nbytes, ranks = size_nbytes("--within", within), sizes[-1]
    from anabranch.tools.bench import zoo
    from anabranch.tools.predict.memory.fitting import largest_batches
    from anabranch.tools.report.formatting import count, size

    model = trace.meta.get("model")
    if not isinstance(model, str) or model not in zoo.MODELS:
        raise ValueError(
            f"--within: a trace holds no activations, and its model ({model!r}) is none that anabranch can build "
            f"({', '.join(zoo.MODELS)}): leave --within out, or give the batch by --batch"
        )
    setting = _sharded_setting(chosen[2], ranges, sizes[0], within)
    kinds = strategy_kinds(*chosen)
    fitting = largest_batches(estimator_of(model, OPTIMIZER), kinds, limit_nbytes, ranks, OPTIMIZER, setting)
    if not fitting.batches:
        raise ValueError(f"--within is {within}: not one sample fits, whatever the strategy; give more")
    largest = (
        f"every strategy at the largest batch per rank that fits in {size(limit_nbytes)} at {count(ranks, 'rank')}"
    )
    return fitting._replace(assumptions=[largest, *fitting.assumptions])


def _sharded_setting(
    sharded: Sequence[str], ranges: Sequence[NetworkRange], fewest: int, within: str
) -> Setting | None:
    """How sharded strategies are trained where each rank holds most: at the fewest ranks. None if there is none."""
    in_nodes = [unplanned(name).nodes for name in sharded]
    if not sharded:
        return None
    nodes = {node_size(network.middle) for network in ranges} if any(in_nodes) else {None}
    if len(nodes) > 1:
        raise ValueError(
            f"--within is {within}: what a rank holds under hsdp depends on the nodes of the network, and these have "
            f"{sorted(size or 1 for size in nodes)} ranks; run them apart"
        )
    size = nodes.pop()
    return Setting(ranks=fewest, ranks_per_node=size and min(size, fewest))


def _sizes(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = [int(piece) if piece.isascii() and piece.isdigit() and len(piece) < 10 else 0 for piece in pieces]
    for piece, size, before in zip(pieces, sizes, [0, *sizes], strict=False):
        if not before < size <= MAX_RANKS:
            raise ValueError(
                f"--world-sizes has {piece!r}: expected rising whole numbers to {MAX_RANKS}, such as 4,8,16"
            )
    return sizes
