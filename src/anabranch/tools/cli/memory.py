"""anabranch memory: predicted peak memory of every mode of training, and the largest batch that fits."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from anabranch.fsdp.planning.sharding_modes import UNPLANNED, ShardingMode, sharding_mode
from anabranch.planning.footprint import FRAGMENTATION, Setting
from anabranch.tools.bench.compress_option import compression
from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import print_document
from anabranch.tools.cli.shared_options import JsonOption, Precision
from anabranch.tools.cli.user_function import backward_errors, build_at
from anabranch.tools.network_presets import PRESETS
from anabranch.values.kinds.names import AUTO, COMPRESSED, DENSE, OKTOPK, between_nodes, is_two_level, two_level
from anabranch.values.kinds.options import OkTopk
from anabranch.values.links import TwoLevel
from anabranch.values.quantities import size_nbytes

if TYPE_CHECKING:
    from anabranch.tools.predict.memory.estimator import MemoryEstimator
    from anabranch.values.network import Network

DEFAULT_RANKS = 4
DEFAULT_DENSITY = 0.01
SHARDED_ASSUMPTION = "units of fsdp2 and hsdp are the parameters with the same number in their names"
AUTO_AS = "auto in the memory of int4, its least faithful kind, which keeps a residual"

Optimizer = Literal["sgd", "momentum", "adamw"]  # by its state: none, one number per parameter, or two
Activations = Literal["keep", "recompute"]

MODEL = Option(
    metavar="M", help="A model of torchvision or transformers, such as resnet152 or gpt2; or your own: module:function."
)
NETWORK = Option(metavar="N", help="For the number of ranks, and their nodes: as in scale.")
COMPRESS = Option(
    metavar="KIND",
    help=f"Exchanges of DataParallel and Lean: oktopk, oktopk:0.01:bf16 (1 %, packed values), {AUTO}, "
    f"{', '.join(COMPRESSED)}; int4@nodes and such on a network with nodes; may be repeated. Default: oktopk, of a "
    f"share of {DEFAULT_DENSITY}.",
)
SHARDED = Option(
    metavar="NAME", help=f"Also sharded over all ranks, or inside nodes: {', '.join(UNPLANNED)}; may be repeated."
)
WITHIN = Option(metavar="SIZE", help="Find the largest batch that fits in this, such as 16GiB.")


def memory(
    model: Annotated[str, MODEL],
    batch_size: Annotated[int, Option(metavar="B", min=1, help="Images or sequences per rank.")],
    ranks: Annotated[int | None, Option(metavar="N", min=1, help="Default: the network's, or 4 without one.")] = None,
    compress: Annotated[list[str] | None, COMPRESS] = None,
    sharded: Annotated[list[str] | None, SHARDED] = None,
    optimizer: Annotated[Optimizer, Option(help="Whose state to count.")] = "momentum",
    activations: Annotated[Activations, Option(help="How the Lean modes keep activations.")] = "keep",
    precision: Annotated[Precision, Option(help="bf16: under autocast.")] = "fp32",
    within: Annotated[str | None, WITHIN] = None,
    network: Annotated[str | None, NETWORK] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory by kind of object: for DDP, compressed exchanges and Lean; the largest batch that fits."""
    limit_nbytes = None if within is None else size_nbytes("--within", within)
    links, shardings = network_of(network, ranks), list(dict.fromkeys(sharded or ()))
    exchanges, oktopk = _asked(compress or [OKTOPK])
    density = float(oktopk.density)
    ranks, node = ranks or (links.world_size if links else DEFAULT_RANKS), _ranks_per_node(links, shardings, exchanges)
    setting = Setting(ranks, density, options=oktopk, ranks_per_node=node)
    from anabranch.tools.predict.memory.estimator import MAX_BATCH
    from anabranch.tools.report.documents import MemoryDocument, MemoryMode
    from anabranch.tools.report.memory import memory_report

    estimator = estimator_of(model, optimizer, activations, half=precision == "bf16")
    batches: dict[str, int] | None = None
    with backward_errors(model):
        footprints = estimator.footprints(batch_size, setting, _modes(exchanges, shardings))
        assumptions = [*estimator.assumptions, *_about(exchanges, setting, shardings)]
        if limit_nbytes is not None:
            batches = {mode: estimator.largest_batch(mode, setting, limit_nbytes) for mode in footprints}
            assumptions.append(f"{FRAGMENTATION:.0%} of the memory is lost between torch's blocks")
            if max(batches.values()) == MAX_BATCH:
                assumptions.append(f"no batch above {MAX_BATCH} was looked at")
    document = MemoryDocument(
        model=model,
        batch_size=batch_size,
        ranks=setting.ranks,
        density=setting.density,
        optimizer=optimizer,
        activations=activations,
        assumptions=tuple(assumptions),
        modes={
            mode: MemoryMode(kinds=peak.kinds, predicted_nbytes=peak.nbytes, at=peak.at)
            for mode, peak in footprints.items()
        },
        within_nbytes=limit_nbytes,
        largest_batch=batches,
    )
    print_document(document, as_json, lambda: memory_report(document))


def estimator_of(
    model: str, optimizer: Optimizer, activations: Activations = "keep", half: bool = False
) -> "MemoryEstimator":
    """The estimator of a model of torchvision or transformers, or of the user's own as module:function.

    half   under autocast to bfloat16
    """
    from anabranch.tools.bench import zoo
    from anabranch.tools.predict.memory.estimator import OPTIMIZERS, MemoryEstimator

    builds = build_at(model) if ":" in model else partial(zoo.build_at, model)
    return MemoryEstimator(builds, OPTIMIZERS[optimizer], activations, half=half)


def _asked(compress: Sequence[str]) -> tuple[list[str], OkTopk]:
    """The exchanges that --compress asks for, each once, and how sparse ones send; ValueError if they do not fit."""
    if ladder := next((text for text in compress if text.startswith(f"{AUTO}:")), None):
        raise ValueError(f"--compress is {ladder!r}: expected {AUTO}, or the least faithful kind of that ladder itself")
    found = {
        text: DENSE if text == two_level(DENSE) else compression(between_nodes(text), OkTopk(density=DEFAULT_DENSITY))
        for text in compress
    }
    sparse = {text: options for text, options in found.items() if isinstance(options, OkTopk)}
    if len(sparse) > 1:
        raise ValueError(f"--compress is {' and '.join(sparse)}: expected one density and one wire; run them apart")
    named = {text: OKTOPK if text in sparse else between_nodes(text) for text in found}
    exchanges = dict.fromkeys(two_level(kind) if is_two_level(text) else kind for text, kind in named.items())
    return list(exchanges), next(iter(sparse.values()), OkTopk(density=DEFAULT_DENSITY))


def _modes(exchanges: Sequence[str], sharded: Sequence[str]) -> list[str]:
    """DDP, Lean without compression, and the modes of these exchanges, the naive one too; then FSDP2's."""
    from anabranch.tools.predict.memory.training_modes import DDP, LEAN_DENSE, NAIVE, modes_of

    naive = [NAIVE] if OKTOPK in map(between_nodes, exchanges) else []
    return [DDP, LEAN_DENSE, *naive, *(mode for exchange in exchanges for mode in modes_of(exchange)), *sharded]


def network_of(text: str | None, ranks: int | None) -> "Network | None":
    """The network of --network, with this number of ranks; None if it was not given."""
    if text is None:
        return None
    network = arguments.network(f"{text}:ranks={ranks or DEFAULT_RANKS}" if text in PRESETS else text)
    return network if ranks is None else network.at(ranks)


def unplanned(name: str) -> ShardingMode:
    """The sharding mode of this name; ValueError for one whose memory is not predicted."""
    mode = sharding_mode(name, UNPLANNED)
    if mode.exchange != DENSE:
        raise ValueError(
            f"--sharded is {name!r}: memory is predicted for dense averages between nodes, so give "
            f"{name.partition('@')[0]}; int4 and oktopk also keep a residual, with 4 bytes for each value of a shard"
        )
    return mode


def node_size(network: "Network") -> int | None:
    """How many ranks a node of this network can have; None if it has no nodes."""
    if isinstance(network.model, TwoLevel):
        return network.model.ranks_per_node
    return network.inside.ranks_per_node if network.inside is not None else None


def _ranks_per_node(network: "Network | None", sharded: Sequence[str], exchanges: Sequence[str]) -> int | None:
    """How many ranks hold one copy of the model under hsdp, and share a bucket's exchange: those of a node."""
    size = None if network is None else node_size(network)
    inside = [name for name in sharded if unplanned(name).nodes]
    if inside and size is None:
        raise ValueError(
            f"--sharded is {inside[0]}, which shards inside nodes: expected a --network with nodes, such as "
            "nvlink+25gbe"
        )
    if (in_stages := next(filter(is_two_level, exchanges), None)) and size is None:
        raise ValueError(
            f"--compress is {in_stages}, which sums inside nodes: expected a --network with nodes, such as nvlink+25gbe"
        )
    return size and min(size, network.world_size if network else size)


def _about(exchanges: Sequence[str], setting: Setting, sharded: Sequence[str]) -> list[str]:
    """What is assumed of exchanges and of the sharded modes."""
    said = {
        f"Ok-Topk sends values as {setting.options.wire}": setting.options.wire != "fp32",
        AUTO_AS: AUTO in map(between_nodes, exchanges),
        SHARDED_ASSUMPTION: bool(sharded),
    }
    if any(map(is_two_level, exchanges)):
        said[f"@nodes: {setting.ranks_per_node} ranks per node, each with its share of residuals and messages"] = True
    if setting.ranks_per_node is not None and any(sharding_mode(name).nodes for name in sharded):
        nodes = setting.ranks // setting.ranks_per_node
        said[f"hsdp: {nodes} nodes of {setting.ranks_per_node} ranks, each with one copy of the model"] = True
    return [words for words, applies in said.items() if applies]
