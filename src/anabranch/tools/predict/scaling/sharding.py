"""Strategies that shard the model by FSDP2, over all ranks or inside nodes (HSDP), at any world size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from anabranch.fsdp.planning import Block, Links, ShardedTrace, plan, step_s
from anabranch.fsdp.planning.sharding_modes import PLANNED, ShardingMode, sharding_mode
from anabranch.tools.predict.scaling.compression import Compression, priced
from anabranch.tools.predict.scaling.result import Ran
from anabranch.values.kinds.names import DENSE
from anabranch.values.links import TwoLevel
from anabranch.values.network import Network
from anabranch.values.trace import Trace

ASSUMPTION = (
    "blocks of sharded strategies are the parameters with the same number in their names, and forward is divided among "
    "them as backward is; their gathers and reduce-scatters take half an all-reduce each; memory is not bounded"
)
BETWEEN = (
    "hsdp@…: what is sent between nodes costs what the same exchange costs in a bucket; what it computes does not slow "
    "the backward pass"
)


def assumptions(names: Iterable[str]) -> list[str]:
    """What the predictions for these sharding modes assume."""
    exchanges = [sharding_mode(name).exchange for name in names]
    return [ASSUMPTION] * bool(exchanges) + [BETWEEN] * bool(set(exchanges) - {DENSE})


def run(mode: ShardingMode, trace: Trace, networks: Sequence[Network]) -> Ran:
    """The step of a sharding mode, planned for the first network, as planners of buckets are."""
    links = [links_of(mode, network) for network in networks]
    sharded = sharded_trace(trace)
    chosen = mode.per_block([block.name for block in sharded.blocks])
    if mode.units == PLANNED:
        chosen = plan(sharded, links[0])
    return Ran(len(chosen), 1, [step_s(sharded, chosen, one) for one in links])


def links_of(mode: ShardingMode, network: Network) -> Links:
    """What a step sends on, on this network."""
    if not mode.nodes:
        return Links(network)
    model = network.model
    if not isinstance(model, TwoLevel):
        raise ValueError("hsdp shards inside nodes, and this network has none: expected one like nvlink+25gbe")
    ranks = min(network.world_size, model.ranks_per_node)
    inside = Network.modelled(ranks, model.inside)
    count = ceil(network.world_size / model.ranks_per_node)
    if count == 1:
        return Links(inside)
    # The shards of a node pass its one card together.
    card = replace(model.across, beta_s_per_byte=ranks * model.across.beta_s_per_byte)
    (kind,) = (DENSE,) if mode.exchange == DENSE else Compression.named(mode.exchange).kinds
    return Links(inside, priced(Network.modelled(count, card), [kind]), kind)


def sharded_trace(trace: Trace) -> ShardedTrace:
    """The blocks of a trace: parameters whose names begin alike, up to a number ("layer1.0.conv.weight": "layer1.0").

    A block's backward ends with its last gradient. ValueError if no name has a number.
    """
    ready_s: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    for tensor in trace.tensors:
        block = block_of(tensor.name)
        nbytes[block] = nbytes.get(block, 0) + tensor.nbytes
        ready_s[block] = tensor.ready_s
    rest = nbytes.pop("", 0)
    if not nbytes:
        raise ValueError(
            f"no block can be told from the names of the trace, such as {trace.tensors[0].name}: sharded strategies "
            "need names with the numbers of layers, such as layers.0.weight"
        )
    order = sorted(nbytes, key=lambda block: ready_s[block])
    ends = [0.0, *(ready_s[block] for block in order[:-1]), trace.backward_s]
    spans = [end - start for start, end in pairwise(ends)]
    total = sum(spans) or 1.0
    blocks = [
        Block(block, nbytes[block], nbytes[block], trace.forward_s * span / total, span)
        for block, span in zip(order, spans, strict=True)
    ]
    return ShardedTrace(tuple(reversed(blocks)), rest, rest)


def block_of(name: str) -> str:
    """The part of a parameter's name up to a number; empty where there is none."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), -1)
    return ".".join(parts[: at + 1])
