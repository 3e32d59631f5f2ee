"""anabranch memory: predicted peak memory of every mode of training, and the largest batch that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from anabranch.fsdp.planning.sharding_modes import UNPLANNED, help_of, sharding_mode
from anabranch.tools.cli import arguments
from anabranch.tools.cli.options import JsonOption
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tools.cli.user_function import backward_errors, build_at
from anabranch.tools.network_presets import PRESETS
from anabranch.values.kinds.names import AUTO, COMPRESSED, DENSE, OKTOPK, Wire, given_density, split_wire
from anabranch.values.kinds.options import OkTopk
from anabranch.values.links import TwoLevel
from anabranch.values.quantities import size_nbytes

if TYPE_CHECKING:
    from anabranch.lean.options import OptimizerFactory
    from anabranch.planning.memory import Footprint, Setting
    from anabranch.tools.predict.memory.estimator import BuildAt, MemoryEstimator
    from anabranch.tools.report.documents import MemoryDocument, MemoryMode
    from anabranch.values.network import Network

DEFAULT_RANKS = 4
DEFAULT_DENSITY = 0.01
SHARDED_ASSUMPTION = "units of fsdp2 and hsdp are the parameters with the same number in their names"
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


Model = Annotated[
    str,
    Option(
        metavar="M",
        help="A model of torchvision or transformers, such as resnet152 or gpt2; or your own, as module:function.",
    ),
]
Ranks = Annotated[
    int | None, Option(metavar="N", min=1, help="Number of ranks. Default: the network's, or 4 without one.")
]
Within = Annotated[
    str | None,
    Option(metavar="SIZE", help="Find the largest batch that fits in this, and what Lean(within=) chooses: 16GiB."),
]
NodesNetwork = Annotated[
    str | None, Option("--network", metavar="N", help="For the number of ranks, and the nodes of hsdp: as in scale.")
]
Buckets = Annotated[
    Path | None,
    Option("--plan", metavar="FILE", help="A plan whose buckets oktopk and lean exchange. Default: 25 MiB each."),
]
Compressions = Annotated[
    list[str] | None,
    Option(
        "--compress",
        metavar="KIND",
        help=f"Exchanges of DataParallel and Lean: oktopk, oktopk:0.01:bf16 (1 %, packed values), {AUTO}, "
        f"{', '.join(COMPRESSED)}; may be repeated. Default: oktopk, of a share of {DEFAULT_DENSITY}.",
    ),
]
Sharded = Annotated[
    list[str] | None,
    Option(
        metavar="NAME", help=f"Also sharded over all ranks, or inside nodes: {help_of(UNPLANNED)}; may be repeated."
    ),
]


def memory(
    model: Model,
    batch_size: Annotated[int, Option("--batch-size", metavar="B", min=1, help="Images or sequences per rank.")],
    ranks: Ranks = None,
    compress: Compressions = None,
    sharded: Sharded = None,
    optimizer: Annotated[Optimizer, Option(help="Whose state to count.")] = Optimizer.momentum,
    activations: Annotated[Activations, Option(help="How the Lean modes keep activations.")] = Activations.keep,
    precision: Annotated[
        Precision, Option(help="bf16: under autocast; pure-bf16: weights and state, too.")
    ] = Precision.fp32,
    within: Within = None,
    network: NodesNetwork = None,
    plan: Buckets = None,
    clips: Annotated[
        bool, Option("--clip-norm", help="Count averages that Lean(clip_norm=...) holds until backward ends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory by kind of object: for DDP, compressed exchanges and Lean; the largest batch that fits."""
    limit_nbytes = None if within is None else size_nbytes("--within", within)
    links, shardings = network_of(network, ranks), list(dict.fromkeys(sharded or ()))
    asked = _asked(compress or [OKTOPK])
    from anabranch.planning.memory import Setting

    ranks, node = ranks or (links.world_size if links else DEFAULT_RANKS), _ranks_per_node(links, shardings)
    buckets = None if plan is None else [bucket.names for bucket in arguments.plan(plan).buckets]
    setting = Setting(ranks, asked.density, buckets, clips, options=OkTopk(wire=asked.wire), ranks_per_node=node)
    training = _Training(model, batch_size, optimizer, activations, precision)
    estimator = training.estimator(plan)
    with backward_errors(model):
        footprints = estimator.footprints(batch_size, setting, _modes(asked.exchanges, shardings))
        assumptions = asked.assumptions + _about(setting, shardings)
        batches: dict[str, int] | None = None
        if limit_nbytes is not None:
            batches = {mode: estimator.largest_batch(mode, setting, limit_nbytes) for mode in footprints}
            chosen, choices = _chosen(training, asked.exchanges, setting, limit_nbytes)
            footprints |= chosen
            assumptions += _limits(batches) + choices
    from anabranch.tools.report.documents import MemoryDocument

    document = MemoryDocument(
        model=model,
        batch_size=batch_size,
        ranks=setting.ranks,
        density=setting.density,
        optimizer=optimizer.value,
        activations=activations.value,
        assumptions=(*estimator.assumptions, *assumptions),
        modes={mode: _mode(footprint) for mode, footprint in footprints.items()},
        within_nbytes=limit_nbytes,
        largest_batch=batches,
    )
    _show(document, as_json)


def _mode(peak: "Footprint") -> "MemoryMode":
    from anabranch.tools.report.documents import MemoryMode

    return MemoryMode(kinds=dict(peak.kinds), predicted_nbytes=peak.nbytes, at=peak.at)


@dataclass(frozen=True, slots=True)
class _Training:
    """What is trained, and how; of activations, only the Lean modes do other than keep them."""

    model: str
    batch: int
    optimizer: Optimizer
    activations: Activations = Activations.keep
    precision: Precision = Precision.fp32

    @property
    def optimizer_factory(self) -> "OptimizerFactory":
        from anabranch.tools.predict.memory.estimator import OPTIMIZERS

        return OPTIMIZERS[self.optimizer.value]

    def build_at(self) -> "BuildAt":
        """By batch, what makes the model. A function of the user's own is looked up once."""
        from anabranch.tools.bench import zoo
        from anabranch.tools.predict.memory.estimator import in_bfloat16

        made = build_at(self.model) if ":" in self.model else partial(zoo.build_at, self.model)
        return (lambda batch: in_bfloat16(made(batch))) if self.precision is Precision.pure_bf16 else made

    def estimator(self, plan: Path | None = None) -> "MemoryEstimator":
        from anabranch.tools.predict.memory.estimator import MemoryEstimator

        words: dict[str, Any] = {} if plan is None else {"buckets": f"those of {plan}"}
        if ":" not in self.model:
            words["dtype"] = ZOO_DTYPE
        if self.precision is Precision.pure_bf16:
            words["dtype"] = PURE_DTYPE
        half = self.precision is Precision.bf16
        return MemoryEstimator(self.build_at(), self.optimizer_factory, self.activations.value, half=half, **words)


def estimator_of(model: str, optimizer: Optimizer) -> "MemoryEstimator":
    """The estimator of a model of torchvision or transformers, or of the user's own as module:function."""
    return _Training(model, 1, optimizer).estimator()


class _Asked(NamedTuple):
    """The exchanges that --compress asks for, each once, and how sparse ones send."""

    exchanges: Sequence[str]
    density: float
    wire: "Wire"

    @property
    def assumptions(self) -> list[str]:
        packed = [f"Ok-Topk sends values as {self.wire}"] if self.wire != "fp32" else []
        return [*packed, *([AUTO_AS] if AUTO in self.exchanges else [])]


def _asked(compress: Sequence[str]) -> _Asked:
    """What these values of --compress ask for; ValueError if they do not fit together."""
    sparse = list(dict.fromkeys(text for text in compress if text.partition(":")[0] == OKTOPK))
    if unknown := next((text for text in compress if text not in (AUTO, *COMPRESSED, *sparse)), None):
        raise ValueError(
            f"--compress is {unknown!r}: expected {OKTOPK} (or {OKTOPK}:0.01, {OKTOPK}:0.01:bf16), {AUTO}, or one of "
            f"{', '.join(COMPRESSED)}"
        )
    if len(sparse) > 1:
        raise ValueError(f"--compress is {' and '.join(sparse)}: expected one density and one wire; run them apart")
    plain, wire = split_wire(sparse[0] if sparse else OKTOPK)
    density = DEFAULT_DENSITY if plain == OKTOPK else given_density(sparse[0], wires=True)
    return _Asked(list(dict.fromkeys(OKTOPK if text in sparse else text for text in compress)), density, wire)


def _modes(exchanges: Sequence[str], sharded: Sequence[str]) -> list[str]:
    """DDP, Lean without compression, and the modes of these exchanges, the naive one too; then FSDP2's."""
    from anabranch.tools.predict.memory.training_modes import DDP, LEAN_DENSE, NAIVE, modes_of

    naive = [NAIVE] if OKTOPK in exchanges else []
    return [DDP, LEAN_DENSE, *naive, *(mode for exchange in exchanges for mode in modes_of(exchange)), *sharded]


def node_size(network: "Network") -> int | None:
    """How many ranks a node of this network can have; None if it has no nodes."""
    return network.model.ranks_per_node if isinstance(network.model, TwoLevel) else None


def _ranks_per_node(network: "Network | None", sharded: Sequence[str]) -> int | None:
    """How many ranks hold one copy of the model under hsdp: those of a node of the network."""
    size = None if network is None else node_size(network)
    inside = [name for name in sharded if sharding_mode(name, UNPLANNED).nodes]  # refuses what it does not know
    if inside and size is None:
        raise ValueError(
            f"--sharded is {inside[0]}, which shards inside nodes: expected a --network with nodes, such as "
            "nvlink+25gbe"
        )
    return size and min(size, network.world_size if network else size)


def _about(setting: "Setting", sharded: Sequence[str]) -> list[str]:
    """What is assumed of clipping and of the sharded modes."""
    said = [*([CLIPPED] if setting.clips else []), *([SHARDED_ASSUMPTION] if sharded else [])]
    if setting.ranks_per_node is not None and any(sharding_mode(name).nodes for name in sharded):
        nodes = setting.ranks // setting.ranks_per_node
        said.append(f"hsdp: {nodes} nodes of {setting.ranks_per_node} ranks, each with one copy of the model")
    return said


def _limits(batches: Mapping[str, int]) -> list[str]:
    """What the search for the largest batches assumes."""
    from anabranch.planning.memory import FRAGMENTATION
    from anabranch.tools.predict.memory.estimator import MAX_BATCH

    limits = [f"{FRAGMENTATION:.0%} of the memory is lost between torch's blocks"]
    return [*limits, f"no batch above {MAX_BATCH} was looked at"] if max(batches.values()) == MAX_BATCH else limits


def _chosen(
    training: _Training, exchanges: Sequence[str], setting: "Setting", limit_nbytes: int
) -> tuple[dict[str, "Footprint"], list[str]]:
    """What ``Lean(within=...)`` would choose at this batch, dense and by exchange: peaks, and choices in words."""
    from anabranch.lean.activations.solver import BudgetError
    from anabranch.lean.memory_budget import described
    from anabranch.planning.memory import TrainingMode
    from anabranch.tools.predict.memory.training_modes import LEAN
    from anabranch.tools.predict.memory.within_budget import ASSUMED, chosen_within, profile

    found, words = {}, [f"{LEAN}, within: blocks take the time of a device with {ASSUMED}"]
    profiled = profile(training.build_at()(training.batch), half=training.precision is Precision.bf16)
    for exchange in (DENSE, *exchanges):
        name = LEAN if exchange == OKTOPK else f"{LEAN}, {exchange}"
        mode = (TrainingMode(exchange, lean=True), setting)
        try:
            choice, found[f"{name}, within"] = chosen_within(profiled, training.optimizer_factory, mode, limit_nbytes)
            words.append(f"{name}, {described(choice.message(limit_nbytes))}")
        except BudgetError as error:
            words.append(f"{name}, {error}")
    return found, words


def network_of(text: str | None, ranks: int | None) -> "Network | None":
    """The network of --network, with this number of ranks; None if it was not given."""
    if text is None:
        return None
    network = arguments.network(f"{text}:ranks={ranks or DEFAULT_RANKS}" if text in PRESETS else text)
    return network if ranks is None else network.at(ranks)


def _show(found: "MemoryDocument", as_json: bool) -> None:
    """Print tables, or JSON."""
    from anabranch.tools.report.documents import printed
    from anabranch.tools.report.memory import memory_report

    if as_json:
        print_json(printed(found))
    else:
        show_tables(memory_report(found))
