"""Every strategy at every world size on every network, with its assumptions and an answer in words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

from anabranch import planning
from anabranch.fsdp.planning.sharding_modes import sharding_mode
from anabranch.planning.simulator import finish_s
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling import sharding
from anabranch.tools.predict.scaling.compression import (
    Compression,
    Planner,
    as_sent,
    compressed_strategies,
)
from anabranch.tools.predict.scaling.conclusions import answer
from anabranch.tools.predict.scaling.result import Basis, Kind, NetworkUsed, Ran, ScalePoint, Scaling, Strategy
from anabranch.values.kinds.fidelity import error_of_plan
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network
from anabranch.values.trace import Trace

WORLD_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PLANNERS = tuple(planning.PLANNERS)
NETWORKS = ("10gbe", "nvlink+100gbe")
COMPRESS = ("int8", "oktopk:0.01")
PRESET_RANKS = 2  # at which a preset is built before it is carried to the world sizes asked for
MANY_RANKS = 128  # from here on NCCL may prefer trees, whose latency grows with log P
OF_LEAN = (
    "lean sends what the same exchange does without it, so its step at the same batch is the same; its optimizer runs "
    "in backward"
)

AnyNetwork = NetworkRange | Network | str
OnPoint = Callable[[str, int, int], None]
Runner = Callable[[Trace, Sequence[Network]], Ran]


def scale(
    trace: Trace,
    networks: Sequence[AnyNetwork] = NETWORKS,
    world_sizes: Sequence[int] = WORLD_SIZES,
    planners: Sequence[str] = PLANNERS,
    compress: Sequence[str] = COMPRESS,
    *,
    sharded: Sequence[str] = (),
    scaling: Basis = "weak",
    batch: int | Mapping[str, int] | None = None,
    assumptions: Sequence[str] = (),
    on_point: OnPoint | None = None,
) -> Scaling:
    """Predict which strategy wins at which world size on which network, and by how much.

    networks        preset names such as "10gbe", Networks, or NetworkRanges, which add a name, a source and a band
    world_sizes     numbers of ranks, rising
    planners        names of ``planning.PLANNERS``: strategies that send every value
    compress        further strategies with compressed buckets where they gain: names that ``Compression.named`` knows,
                    such as "int8", "oktopk:0.01", "auto", "lean:int8" or "int8@nodes"
    sharded         further strategies that shard the model by FSDP2: a name of ``SHARDING_MODES``; "hsdp" and its like
                    shard inside nodes, on two-level networks, "hsdp@int8" with int8 between them
    scaling         "weak" keeps the batch of each rank, "strong" the global batch
    batch           that batch, for all strategies or by name of the strategy; as recorded unless given. The trace's
                    meta must then say for which batch it was recorded.
    assumptions     sentences to add to the result's own, such as how the batches were chosen
    on_point        called after each point with the network's name, how many of its points are known, and how many
                    there will be

    ValueError for an argument that makes no sense; NetworkError for a network that cannot be carried to a world size.
    """
    if not world_sizes or world_sizes[0] < 1 or any(high <= low for low, high in pairwise(world_sizes)):
        raise ValueError(f"world_sizes is {list(world_sizes)}: expected rising whole numbers from 1 on")
    kinds = strategy_kinds(planners, compress, sharded)
    batches, ranges = _batches(trace, kinds, batch), _ranges(networks)
    points: list[ScalePoint] = []
    of_networks: list[str] = []  # what the strategies assume of the networks
    report = on_point or (lambda *_: None)
    dense = {name: planned(partial(planning.plan, planner=name)) for name in planners}
    in_shards: dict[str, Runner] = {name: partial(sharding.run, sharding_mode(name)) for name in sharded}
    for network in ranges:
        compressed = compressed_strategies(compress, trace, network.middle)
        of_networks += compressed.assumptions
        in_buckets = {name: planned(planner) for name, planner in compressed.planners.items()}
        runners = {**dense, **in_buckets, **in_shards}
        steps = sweep(trace, network, world_sizes, runners, scaling=scaling, batches=batches, pricing=compressed.priced)
        for number, point in enumerate(steps, 1):
            points.append(point)
            report(network.name, number, len(world_sizes) * len(kinds))
    of_networks += _network_assumptions(ranges, world_sizes)
    assumed = _assumptions(scaling, recorded_batch(trace), batches, world_sizes, kinds)
    result = Scaling(
        model=str(trace.meta.get("model", f"{len(trace)} gradients"))[:60],
        scaling=scaling,
        networks=tuple(NetworkUsed(n.name, n.source, n.spread, n.extrapolation) for n in ranges),
        strategies=tuple(Strategy(name, kind, batches.get(name)) for name, kind in kinds.items()),
        points=tuple(points),
        assumptions=tuple(dict.fromkeys([*assumed, *assumptions, *of_networks, *sharding.assumptions(sharded)])),
    )
    return replace(result, answer=tuple(answer(result)))


def strategy_kinds(planners: Sequence[str], compress: Sequence[str], sharded: Sequence[str] = ()) -> dict[str, Kind]:
    """Every strategy by name, with its kind: planners, then those with compressed buckets, then those of FSDP2."""
    kinds: dict[str, Kind] = dict.fromkeys(planners, "dense")
    kinds |= {name: Compression.named(name).strategy_kind for name in compress}
    return kinds | dict.fromkeys(sharded, "sharded")


def sweep(
    trace: Trace,
    network: NetworkRange,
    world_sizes: Sequence[int],
    runners: Mapping[str, Runner],
    *,
    scaling: Basis = "weak",
    batches: Mapping[str, int] | None = None,
    pricing: Callable[[Network], Network] = lambda network: network,
) -> Iterator[ScalePoint]:
    """Every strategy at every world size, on ``network`` carried to that size; a point as soon as it is known.

    Weak scaling keeps the batch per rank. Strong scaling keeps the global batch, of which each of N ranks computes 1/N.
    ``batches`` is that batch by strategy; strategies that it does not name have the batch of the trace.

    Computing takes time in proportion to the batch. A strategy is planned for the middle of the network's band; its
    shortest and its longest step in the band are the band of the point. ``pricing`` adds the costs of further
    collectives to a network of any world size.
    """
    if scaling not in ("weak", "strong"):
        raise ValueError(f"scaling is {scaling!r}: expected 'weak' or 'strong'")
    alone_s, scaled, recorded = trace.forward_s + trace.backward_s, cache(trace.scaled), recorded_batch(trace)
    for world_size in world_sizes:
        networks = [pricing(other.at(world_size)) for other in (network.middle, network.low, network.high)]
        for name, run in runners.items():
            # Of all ranks (strong) or of each (weak), in recorded batches.
            total = batches[name] / recorded if batches and recorded and name in batches else 1.0
            here = scaled(total / world_size if scaling == "strong" else total)
            buckets, lanes, steps, error = run(here, networks)
            done = total if scaling == "strong" else total * world_size  # recorded batches per step, by all ranks
            speedup = done * alone_s / steps[0] if steps[0] else float(world_size)
            samples = done * recorded / steps[0] if recorded and steps[0] else None
            yield ScalePoint(
                network.name, name, world_size, buckets, lanes, steps[0], min(steps), max(steps),
                steps[0] - here.forward_s - here.backward_s, speedup, speedup / world_size, samples, error,
            )  # fmt: skip


def planned(planner: Planner) -> Runner:
    """The strategy that sends the buckets of this planner."""

    def run(trace: Trace, networks: Sequence[Network]) -> Ran:
        plan = planner(trace, networks[0])
        steps_s = [trace.forward_s + finish_s(trace, plan, at) for at in networks]
        return Ran(len(plan), plan.lanes, steps_s, error_of_plan(trace, as_sent(plan)))

    return run


def recorded_batch(trace: Trace) -> int | None:
    """The samples per rank for which the trace was recorded, from its meta; None if the meta does not say."""
    batch = trace.meta.get("batch")
    return batch if isinstance(batch, int) and batch > 0 else None


def _assumptions(
    scaling: Basis,
    recorded: int | None,
    batches: Mapping[str, int],
    world_sizes: Sequence[int],
    kinds: Mapping[str, Kind],
) -> list[str]:
    """What the numbers assume of batches, of computing and of strategies."""
    said = ["batch per rank kept (weak scaling)" if scaling == "weak" else "global batch kept (strong scaling)"]
    if scaling == "strong" or any(batch != recorded for batch in batches.values()):
        said.append("computing takes time in proportion to the batch")
    least = min(batches.values(), default=0)
    beyond = [size for size in world_sizes if size > least]
    if scaling == "strong" and least and beyond:
        said.append(f"a batch of {least:,} has no sample for every rank from {beyond[0]:,} ranks on: only on paper")
    return [
        *said,
        "bands are of the network alone, each plan as made for its middle",
        "the optimizer's step and the loading of data are not counted",
        *([OF_LEAN] if "lean" in kinds.values() else []),
    ]


def _batches(trace: Trace, kinds: Mapping[str, Kind], batch: int | Mapping[str, int] | None) -> Mapping[str, int]:
    """The batch of each strategy; empty where neither the caller nor the trace says one."""
    recorded = recorded_batch(trace)
    if batch is None:
        return dict.fromkeys(kinds, recorded) if recorded else {}
    if recorded is None:
        raise ValueError(
            f"the trace's meta has batch {trace.meta.get('batch')!r}: expected for how many samples it was recorded; "
            "without that, leave out --batch and --within (batch=)"
        )
    if isinstance(batch, int):
        return dict.fromkeys(kinds, batch)
    if missing := [name for name in kinds if name not in batch]:
        raise ValueError(f"batch has no entry for the strategy {missing[0]!r}: expected one for each of them")
    return {name: batch[name] for name in kinds}


def _ranges(networks: Sequence[AnyNetwork]) -> list[NetworkRange]:
    """Every network with a name and a band; a Network without a name is called by its place."""
    if not networks:
        raise ValueError("networks is empty: expected at least one, such as '10gbe'")
    ranges = []
    for place, network in enumerate(networks, 1):
        if isinstance(network, str):
            ranges.append(NetworkRange.preset(network, PRESET_RANKS))
        elif isinstance(network, Network):
            ranges.append(NetworkRange.given(f"network {place}", network, "as given"))
        else:
            ranges.append(network)
    return ranges


def _network_assumptions(ranges: Sequence[NetworkRange], sizes: Sequence[int]) -> list[str]:
    said = []
    if any(network.middle.contention.slowdown(2) >= 2 for network in ranges):
        said.append("one message fills a link, so that lanes gain their start-ups only")
    fitted = [network for network in ranges if network.middle.model is None]
    for network in fitted:
        if elsewhere := [size for size in sizes if size != network.middle.world_size]:
            said.append(f"{network.name} extrapolated by {network.middle.at(elsewhere[-1]).meta['assumption']}")
    if sizes[-1] >= MANY_RANKS and (fitted or any(_is_ring(network.middle.model) for network in ranges)):
        said.append(
            f"all-reduces are rings at any size; from about {MANY_RANKS} ranks on NCCL may choose trees, whose latency "
            "grows with log P instead of P (describe them as halving_doubling:...)"
        )
    return said


def _is_ring(model: AlphaBeta | TwoLevel | None) -> bool:
    links = model.across if isinstance(model, TwoLevel) else model
    return links is not None and links.algorithm == "ring"
