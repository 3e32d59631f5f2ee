"""anabranch memory: predicted peak memory of every mode of training, the largest batch that fits, and throughput."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from anabranch.fsdp.planning.modes import UNPLANNED, help_of, sharding_mode
from anabranch.tools.cli import arguments, network_text, own_model
from anabranch.tools.cli.output import JsonOption, print_json, show_tables
from anabranch.tools.network_presets import PRESETS
from anabranch.values.files import bundled_traces
from anabranch.values.kinds.names import AUTO, COMPRESSED, DENSE
from anabranch.values.kinds.oktopk import OkTopk
from anabranch.values.kinds.sparse_names import KIND, given_density, split_wire
from anabranch.values.kinds.sparse_sizes import Precision as Wire
from anabranch.values.links import TwoLevel
from anabranch.values.quantities import size_nbytes

if TYPE_CHECKING:
    from anabranch.planning.memory import Footprint, Setting
    from anabranch.tools.predict.memory.estimator import BuildAt, MemoryEstimator
    from anabranch.tools.report.documents import MemoryDocument, MemoryMode
    from anabranch.values.network import Network

RATE_ALPHA = "30us"
DEFAULT_RANKS = 4
DEFAULT_DENSITY = 0.01
SHARDED_ASSUMPTION = (
    "units of fsdp2 and hsdp are the parameters with the same number in their names; they are predicted alone, and not "
    "measured"
)
AUTO_AS = "auto in the memory of int4, its least faithful kind, which keeps a residual"
CLIPPED = "lean holds averages until the norm over all gradients is known"
ZOO_DTYPE = "float32, as in torchvision or transformers"
PURE_DTYPE = (
    "weights, gradients and the optimizer's state in bfloat16; residuals of Ok-Topk and int4 in float32 unless stored "
    "rounded"
)


class Optimizer(StrEnum):
    """The optimizer by its state: none, one number per parameter, or two."""

    sgd = "sgd"
    momentum = "momentum"
    adamw = "adamw"


class Activations(StrEnum):
    """Where activations are between forward and backward."""

    keep = "keep"
    recompute = "recompute"


class Precision(StrEnum):
    """In what the model is trained."""

    fp32 = "fp32"
    bf16 = "bf16"
    pure_bf16 = "pure-bf16"


ModelOption = Annotated[
    str,
    typer.Option(
        metavar="M",
        help="A model of torchvision or transformers, such as resnet152 or gpt2; or your own, as module:function.",
    ),
]
BatchOption = Annotated[int, typer.Option("--batch-size", metavar="B", min=1, help="Images or sequences per rank.")]
RanksOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of ranks. Default: the network's, or 4 without one.")
]
DensityOption = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        help=f"Share of the elements that the sparse modes send. Default: {DEFAULT_DENSITY}.",
    ),
]
OptimizerOption = Annotated[Optimizer, typer.Option(help="Whose state to count.")]
PrecisionOption = Annotated[Precision, typer.Option(help="bf16: under autocast; pure-bf16: weights and state, too.")]
ActivationsOption = Annotated[Activations, typer.Option(help="How the Lean modes keep activations.")]
WithinOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Find the largest batch that fits in this, and what Lean(within=) chooses: 16GiB."
    ),
]
NetworkOption = Annotated[str | None, typer.Option(metavar="N", help="For throughput: a network, as in scale.")]
RateOption = Annotated[
    str | None, typer.Option(metavar="R", help="Instead of a network: a ring of links of this rate, such as 10gbit.")
]
TraceOption = Annotated[
    str | None, typer.Option(metavar="T", help="For throughput: a trace. Default: the bundled one of the model.")
]
PlanOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A plan whose buckets oktopk and lean exchange. Default: 25 MiB each."),
]
CompressOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help=f"Ways to compress, in DataParallel and on Lean: oktopk, oktopk:0.01:bf16 (1 %, packed values), {AUTO}, "
        f"{', '.join(COMPRESSED)}; may be repeated. Default: oktopk.",
    ),
]
ShardedOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WAY",
        help=f"Also sharded over all ranks, or inside nodes: {help_of(UNPLANNED)}; may be repeated.",
    ),
]
NodeOption = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        help="For hsdp: ranks in a node. Default: the network's, if it has nodes.",
    ),
]
ClipsOption = Annotated[
    bool, typer.Option("--clip-norm", help="Count averages that Lean(clip_norm=...) holds until backward ends.")
]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Also run a few steps of each mode on this GPU.")]


def memory(
    model: ModelOption,
    batch_size: BatchOption,
    ranks: RanksOption = None,
    compress: CompressOption = None,
    sharded: ShardedOption = None,
    ranks_per_node: NodeOption = None,
    density: DensityOption = None,
    optimizer: OptimizerOption = Optimizer.momentum,
    activations: ActivationsOption = Activations.keep,
    precision: PrecisionOption = Precision.fp32,
    within: WithinOption = None,
    network: NetworkOption = None,
    rate: RateOption = None,
    trace: TraceOption = None,
    plan: PlanOption = None,
    clips: ClipsOption = False,
    measure: MeasureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory by kind of object: for DDP, compressed exchanges and Lean; the largest batch that fits."""
    limit_nbytes = None if within is None else size_nbytes("--within", within)
    links = throughput_network(network, rate, ranks)
    ranks = ranks or (links.world_size if links else DEFAULT_RANKS)
    from anabranch.planning.memory import Setting
    from anabranch.tools.report.documents import MemoryDocument

    if measure:
        _check_measurable(plan, clips, compress or ())
    buckets = None if plan is None else [bucket.names for bucket in arguments.plan(plan).buckets]
    asked = _asked(compress or [KIND], density)
    modes = _modes(asked.exchanges, sharded or ())
    node = _ranks_per_node(ranks_per_node, links, sharded or ())
    setting = Setting(ranks, asked.density, buckets, clips, options=OkTopk(wire=asked.wire), ranks_per_node=node)
    estimator = estimator_of(model, optimizer, activations, plan, precision)
    assumptions = [*asked.assumptions, *_about(setting, sharded or ())]
    with own_model.backward_errors(model):
        footprints = estimator.footprints(batch_size, setting, modes)
        measured = _measured(model, batch_size, optimizer, activations, setting, modes, precision) if measure else {}
        batches, chosen = dict.fromkeys(footprints, batch_size), dict[str, "Footprint"]()
        if limit_nbytes is not None:
            batches = {mode: estimator.largest_batch(mode, setting, limit_nbytes) for mode in footprints}
            chosen, more = _chosen(model, batch_size, optimizer, precision, asked.exchanges, setting, limit_nbytes)
            assumptions += [*_limits(batches), *more]
    assumptions = [*estimator.assumptions, *assumptions]
    speeds, more = _throughputs(trace or model, links, batches, setting, estimator.activations_of)
    document = MemoryDocument(
        model=model,
        batch_size=batch_size,
        ranks=ranks,
        density=setting.density,
        optimizer=optimizer.value,
        activations=activations.value,
        assumptions=(*assumptions, *more),
        modes={mode: _mode(footprint, measured.get(mode)) for mode, footprint in (footprints | chosen).items()},
        within_nbytes=limit_nbytes,
        largest_batch=batches if limit_nbytes is not None else None,
        samples_per_s=speeds,
    )
    _show(document, as_json)


def _check_measurable(plan: Path | None, clips: bool, compress: Sequence[str]) -> None:
    """ValueError if --measure would run something else than what is predicted."""
    if other := next((way for way in compress if way == AUTO or split_wire(way)[1] != "fp32"), None):
        raise ValueError(
            f"--compress is {other}, and --measure runs one kind in every bucket, sparse values as fp32: expected "
            "another way, or no --measure"
        )
    if clips:
        raise ValueError("--clip-norm and --measure were given, and --measure clips nothing: expected one of them")
    if plan is not None:
        raise ValueError(f"--plan is {plan}, and --measure runs buckets of 25 MiB: expected one of them")


class _Asked(NamedTuple):
    """The exchanges that --compress asks for, each once, and how sparse ones send."""

    exchanges: Sequence[str]
    density: float
    wire: "Wire"

    @property
    def assumptions(self) -> list[str]:
        packed = [f"Ok-Topk sends values as {self.wire}"] if self.wire != "fp32" else []
        return [*packed, *([AUTO_AS] if AUTO in self.exchanges else [])]


def _asked(compress: Sequence[str], density: float | None) -> _Asked:
    """What these values of --compress and --density ask for; ValueError if they do not fit together."""
    sparse = list(dict.fromkeys(way for way in compress if way.partition(":")[0] == KIND))
    if unknown := next((way for way in compress if way not in (AUTO, *COMPRESSED, *sparse)), None):
        raise ValueError(
            f"--compress is {unknown!r}: expected {KIND} (or {KIND}:0.01, {KIND}:0.01:bf16), {AUTO}, or one of "
            f"{', '.join(COMPRESSED)}"
        )
    if len(sparse) > 1:
        raise ValueError(f"--compress is {' and '.join(sparse)}: expected one density and one wire; run them apart")
    plain, wire = split_wire(sparse[0] if sparse else KIND)
    if plain != KIND:
        if density is not None:
            raise ValueError(f"--density is {density:g} and --compress is {sparse[0]}: expected the density once")
        density = given_density(sparse[0], wires=True)
    exchanges = list(dict.fromkeys(KIND if way in sparse else way for way in compress))
    return _Asked(exchanges, DEFAULT_DENSITY if density is None else density, wire)


def _modes(exchanges: Sequence[str], sharded: Sequence[str]) -> list[str]:
    """DDP, Lean without compression, and the modes of these exchanges, the naive one too; then FSDP2's."""
    from anabranch.tools.predict.memory.modes import DDP, LEAN_DENSE, NAIVE, OKTOPK, modes_of

    for way in sharded:
        sharding_mode(way, UNPLANNED)  # refuses what it does not know
    naive = [NAIVE] if OKTOPK in exchanges else []
    compressed = [mode for exchange in exchanges for mode in modes_of(exchange)]
    return [DDP, LEAN_DENSE, *naive, *compressed, *dict.fromkeys(sharded)]


def node_size(network: "Network") -> int | None:
    """How many ranks a node of this network can have; None if it has no nodes."""
    return network.model.ranks_per_node if isinstance(network.model, TwoLevel) else None


def _ranks_per_node(given: int | None, network: "Network | None", sharded: Sequence[str]) -> int | None:
    """How many ranks hold one copy of the model under hsdp: as given, or those of a node of the network."""
    known = None if network is None or (size := node_size(network)) is None else min(size, network.world_size)
    if given is not None and known is not None and given != known:
        raise ValueError(f"--ranks-per-node is {given}, and the network has {known} in a node: expected one of them")
    if inside := next((way for way in sharded if sharding_mode(way).nodes), None):
        if given is None and known is None:
            raise ValueError(
                f"--sharded is {inside}, which shards inside nodes: say how many ranks a node has by --ranks-per-node, "
                "or give a --network with nodes, such as nvlink+25gbe"
            )
        if network is not None and known is None:
            raise ValueError(
                f"--sharded is {inside}, and its throughput needs a network with nodes: expected one such as "
                "nvlink+25gbe; or leave out --network and --rate"
            )
        return given or known
    return given


def _about(setting: "Setting", sharded: Sequence[str]) -> list[str]:
    """What is assumed of clipping and of the sharded modes."""
    said = [*([CLIPPED] if setting.clips else []), *([SHARDED_ASSUMPTION] if sharded else [])]
    if setting.ranks_per_node is not None and any(sharding_mode(way).nodes for way in sharded):
        nodes = setting.ranks // setting.ranks_per_node
        said.append(f"hsdp: {nodes} nodes of {setting.ranks_per_node} ranks, each with one copy of the model")
    return said


def _mode(footprint: "Footprint", measured_nbytes: int | None) -> "MemoryMode":
    from anabranch.tools.report.documents import MemoryMode

    return MemoryMode(
        kinds=dict(footprint.kinds),
        predicted_nbytes=footprint.nbytes,
        at=footprint.at,
        measured_nbytes=measured_nbytes,
    )


def estimator_of(
    model: str,
    optimizer: Optimizer,
    activations: Activations,
    plan: Path | None = None,
    precision: Precision = Precision.fp32,
) -> "MemoryEstimator":
    """The estimator of a model of torchvision or transformers, or of the user's own as module:function."""
    from anabranch.tools.bench.memory import OPTIMIZERS
    from anabranch.tools.predict.memory.estimator import MemoryEstimator

    words: dict[str, Any] = {} if plan is None else {"buckets": f"those of {plan}"}
    if ":" not in model:
        words["dtype"] = ZOO_DTYPE
    if precision is Precision.pure_bf16:
        words["dtype"] = PURE_DTYPE
    half = precision is Precision.bf16
    return MemoryEstimator(
        _build_at(model, precision), OPTIMIZERS[optimizer.value], activations.value, half=half, **words
    )


def _build_at(model: str, precision: Precision) -> "BuildAt":
    """By batch, what makes the model; with weights of bfloat16 if it is pure."""
    from anabranch.tools.bench.memory import in_bfloat16

    made = _made_at(model)
    return (lambda batch: in_bfloat16(made(batch))) if precision is Precision.pure_bf16 else made


def _made_at(model: str) -> "BuildAt":
    """By batch, what makes the model. A function of the user's own is looked up once."""
    if ":" in model:
        return own_model.build_at(model)
    from anabranch.tools.bench.memory import zoo_build

    return partial(zoo_build, model)


def _limits(batches: Mapping[str, int]) -> list[str]:
    """What the search for the largest batches assumes."""
    from anabranch.planning.memory import FRAGMENTATION
    from anabranch.tools.predict.memory.largest_batch import MAX_BATCH

    limits = [f"{FRAGMENTATION:.0%} of the memory is lost between torch's blocks"]
    return [*limits, f"no batch above {MAX_BATCH} was looked at"] if max(batches.values()) == MAX_BATCH else limits


def _chosen(
    model: str,
    batch: int,
    optimizer: Optimizer,
    precision: Precision,
    exchanges: Sequence[str],
    setting: "Setting",
    limit_nbytes: int,
) -> tuple[dict[str, "Footprint"], list[str]]:
    """What ``Lean(within=...)`` would choose at this batch, dense and by exchange: peaks, and choices in words."""
    from anabranch.lean.activations.solver import BudgetError
    from anabranch.lean.memory_budget import described
    from anabranch.planning.memory import TrainingMode
    from anabranch.tools.bench.memory import OPTIMIZERS
    from anabranch.tools.bench.within import ASSUMED, chosen_within, profile
    from anabranch.tools.predict.memory.modes import LEAN, OKTOPK

    found, words = {}, [f"{LEAN}, within: blocks take the time of a device with {ASSUMED}"]
    profiled = profile(_build_at(model, precision)(batch), half=precision is Precision.bf16)
    for exchange in (DENSE, *exchanges):
        name = LEAN if exchange == OKTOPK else f"{LEAN}, {exchange}"
        way = (TrainingMode(exchange, lean=True), setting)
        try:
            choice, found[f"{name}, within"] = chosen_within(profiled, OPTIMIZERS[optimizer.value], way, limit_nbytes)
            words.append(f"{name}, {described(choice.message(limit_nbytes))}")
        except BudgetError as error:
            words.append(f"{name}, {error}")
    return found, words


def _measured(
    model: str,
    batch: int,
    optimizer: Optimizer,
    activations: Activations,
    setting: "Setting",
    modes: Sequence[str],
    precision: Precision,
) -> dict[str, int]:
    """The allocator's peak of each mode that can run here."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--measure runs the model on a GPU, and torch finds none here: leave it out")
    from anabranch.lean.activations import policy
    from anabranch.tools.bench.memory import OPTIMIZERS, peak, runnable_modes, under_autocast, world
    from anabranch.tools.predict.memory.modes import is_sharded

    build, factory = _build_at(model, precision)(batch), OPTIMIZERS[optimizer.value]
    build = under_autocast(build) if precision is Precision.bf16 else build
    options = policy.Activations(activations.value)
    with world() as ranks:
        if ranks not in (1, setting.ranks):
            raise ValueError(f"--measure runs on {ranks} ranks and --ranks is {setting.ranks}: leave out --ranks")
        return {
            mode: peak(build, mode, factory, setting.ranks, setting.density, options).steady
            for mode in runnable_modes(modes)
            if not is_sharded(mode)
        }


def _throughputs(
    name: str,
    network: "Network | None",
    batches: Mapping[str, int],
    setting: "Setting",
    activations_of: Callable[[str], str],
) -> tuple[dict[str, float] | None, list[str]]:
    """Samples per second by mode and what they assume; None without a network, none for a model without a trace."""
    if network is None:
        return None, []
    if name not in bundled_traces() and not Path(name).is_file():
        return {}, [f"no throughput: anabranch brings no trace of {name}; record one, and give it by --trace"]
    from anabranch.tools.predict.memory.throughput import ASSUMPTIONS, throughputs

    assumptions = list(ASSUMPTIONS)
    activations = {mode: activations_of(mode) for mode in batches}
    if "recompute" in activations.values():
        assumptions.append("lean's forward runs twice")
    wire = setting.options.wire
    return throughputs(arguments.trace(name), network, batches, setting.density, activations, wire), assumptions


def throughput_network(text: str | None, rate: str | None, ranks: int | None) -> "Network | None":
    """The network for throughput: --network, or a ring of links of --rate; None if neither was given."""
    if text is not None and rate is not None:
        raise ValueError(f"--network is {text} and --rate is {rate}: expected one of them")
    world_size = ranks or DEFAULT_RANKS
    if rate is not None:
        return network_text.network(f"ring:ranks={world_size},alpha={RATE_ALPHA},rate={rate}")
    if text is None:
        return None
    network = arguments.network(f"{text}:ranks={world_size}" if text in PRESETS else text)
    return network if ranks is None else network.at(ranks)


def _show(found: "MemoryDocument", as_json: bool) -> None:
    """Print tables, or JSON."""
    from rich.text import Text

    from anabranch.tools.report.documents import printed
    from anabranch.tools.report.formatting import plain, size
    from anabranch.tools.report.memory import abreast, batch_report, memory_report

    if as_json:
        print_json(printed(found))
        return
    modes = found.modes
    title = f"{found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"
    parts: list[Any] = [
        memory_report(
            title,
            {mode: peak.kinds for mode, peak in modes.items()},
            {},
            {mode: peak.measured_nbytes for mode, peak in modes.items() if peak.measured_nbytes is not None},
            shown,
        )
        for shown in abreast(list(modes))
    ]
    rows: dict[str, dict[str, str]] = {}
    if found.largest_batch is not None:
        rows["largest batch per rank"] = {mode: str(batch) for mode, batch in found.largest_batch.items()}
    if found.samples_per_s:
        rows["samples/s, all ranks"] = {mode: f"{speed:.1f}" for mode, speed in found.samples_per_s.items()}
    if rows:
        where = f"Within {size(found.within_nbytes)}" if found.within_nbytes is not None else "At this batch"
        known = [mode for mode in modes if any(mode in cells for cells in rows.values())]
        parts += [batch_report(where, shown, rows) for shown in abreast(known)]
    parts.append(Text(plain(f"Assumed: {'; '.join(found.assumptions)}.")))
    show_tables(*parts)
