"""The sharding plan for a model on its own ranks: recorded, planned, and tried beside a unit per block.

FSDP2 cannot change the units of a model that is sharded. So the trial has models of its own, from ``build``, and
leaves nothing behind but a plan.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anabranch.comm.agree import agree_on, check_same, wire_device
from anabranch.comm.dense import dense
from anabranch.comm.exchange import Group
from anabranch.compression import Compress, settings_of
from anabranch.integrations.one_kind import only_kind
from anabranch.integrations.sharded import replicate
from anabranch.integrations.sharded_watch import Watch
from anabranch.integrations.sharding import shard
from anabranch.network import Network
from anabranch.observe.measure import SHARDED, measure
from anabranch.sharded import Links, ShardedTrace, ShardingPlan, peak_nbytes, step_s
from anabranch.sharded import plan as planned
from anabranch.sharded.files import dumps
from anabranch.sharded.step import BETWEEN
from anabranch.timeline import Timeline

WARM_UP, RECORDED = 3, 6  # steps
MEASURING_S = 2.0  # for each of the networks
LARGEST_NBYTES = 64 << 20
WORTH = 0.99  # a plan is used if its step takes at most this share of the default's
SPARE = 0.8  # of the memory that the device has left: activations vary

Step = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class FoundSharding:
    """What a trial found. Seconds are of forward and backward on the slowest rank; None: the plan was not tried.

    plan        the one to use: ``fastest``, or ``default`` where that was as fast
    default     a unit per block, each freed after forward
    fastest     the planner's
    """

    plan: ShardingPlan
    default: ShardingPlan
    fastest: ShardingPlan
    trace: ShardedTrace
    links: Links
    default_s: float | None = None
    fastest_s: float | None = None

    def explain(self) -> str:
        """What was predicted, what was measured, and which plan to use."""
        lines = []
        for name, plan, measured_s in (
            ("A unit per block", self.default, self.default_s), ("Planned", self.fastest, self.fastest_s)
        ):  # fmt: skip
            predicted_s = step_s(self.trace, plan, self.links)
            measured = "not tried" if measured_s is None else f"{measured_s * 1e3:.1f} ms measured"
            mib = peak_nbytes(self.trace, plan) / (1 << 20)
            lines.append(
                f"{name}: {plan.described()}, {mib:.0f} MiB at most: {predicted_s * 1e3:.1f} ms predicted, {measured}."
            )
        if self.plan != self.default:
            lines.append("The planned units are used.")
        elif self.fastest_s is None:
            lines.append("A unit per block is used: no plan is predicted to gain 1 %.")
        else:
            lines.append("A unit per block is used: the plan did not gain 1 % here.")
        return "\n".join(lines)


def find_sharding(
    build: Callable[[], nn.Module],
    mesh: DeviceMesh,
    step: Step,
    *,
    blocks: Sequence[str] | None = None,
    compress: Compress = None,
    memory_nbytes: int | None = None,
    rounds: int = 5,
    steps: int = 3,
    **options: Any,
) -> FoundSharding:
    """Find units that are faster than one per block for this model on these ranks. Collective.

    The plan was faster in a trial, by 1 % or more; where none was, it is a unit per block.

    build           makes the model, whole, the same on every rank; called twice
    mesh            of one dimension; or of two, nodes and the ranks in a node: between them ``ab.replicate`` averages
    step            trains one batch on the model that it is given: forward and backward
    blocks          names of the modules of which units are made, each called once in a step; by default block_names()
    compress        of ``ab.replicate``; by default exact, as under HSDP
    memory_nbytes   for gathered parameters, gradients and buffers; by default what a unit per block needs and most of
                    what the device has left
    rounds          of the trial, in each of which both models train so many ``steps`` in turn
    options         of fully_shard()
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds is {rounds} and steps is {steps}: expected at least 1 of each, for the trial")
    with ExitStack() as closing:
        found = _find(build, mesh, step, blocks, compress, memory_nbytes, rounds, steps, options, closing)
    gc.collect()  # a model of FSDP2 is a cycle of references
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()
    return found


def _find(
    build: Callable[[], nn.Module],
    mesh: DeviceMesh,
    step: Step,
    blocks: Sequence[str] | None,
    compress: Compress,
    memory_nbytes: int | None,
    rounds: int,
    steps: int,
    options: Mapping[str, Any],
    closing: ExitStack,
) -> FoundSharding:
    """Within ``closing``, so that threads and groups of the trial end even if a step fails."""
    inside, device = _inside(mesh, compress), _device(mesh)

    def sharded_by(plan: ShardingPlan | None) -> nn.Module:
        model = shard(build(), inside, plan, **options)
        if mesh.ndim == 2:
            closing.callback(replicate(model, mesh, compress=compress).close)
        return model

    stock = sharded_by(None if blocks is None else ShardingPlan.per_block(blocks))
    trace, default, recorded = _record(stock, step, mesh)
    links = measure_links(mesh, device, trace.nbytes)
    if compress is not None:
        links = _with_kind(links, compress, trace, recorded, mesh)
    if memory_nbytes is None and device.type == "cuda":
        memory_nbytes = peak_nbytes(trace, default) + _spare_nbytes(stock, mesh, device)
    fastest = planned(trace, links, memory_nbytes)
    for dimension in range(mesh.ndim):
        check_same("the sharding plan", [dumps(fastest)], mesh.get_group(dimension))
    found = FoundSharding(default, default, fastest, trace, links)
    if step_s(trace, fastest, links) <= WORTH * step_s(trace, default, links):
        ours = sharded_by(fastest)
        times = [(_timed(stock, step, steps, mesh), _timed(ours, step, steps, mesh)) for _ in range(rounds + 1)][1:]
        default_s, fastest_s = (median(column) for column in zip(*times, strict=True))
        ratio = median(after / before for before, after in times)
        chosen = fastest if ratio <= WORTH else default
        found = FoundSharding(chosen, default, fastest, trace, links, default_s, fastest_s)
    return found


def measure_links(mesh: DeviceMesh, device: torch.device, largest_nbytes: int = LARGEST_NBYTES) -> Links:
    """The networks of a mesh: inside its last dimension, and between along the first of two. Collective."""
    largest = max(1 << 20, min(LARGEST_NBYTES, largest_nbytes))

    def network(group: Group, others: Group | None, sharding: bool) -> Network:
        collectives = {"dense": dense, **(SHARDED if sharding else {})}
        found = measure([group], device, largest, MEASURING_S, collectives, growth=4)
        return found if others is None else agree_on(Network, found, others)

    if mesh.ndim == 1:
        return Links(network(mesh.get_group(0), None, True), overlaps=device.type == "cuda")
    nodes, inside = mesh.get_group(0), mesh.get_group(1)
    return Links(network(inside, nodes, True), network(nodes, inside, False), overlaps=device.type == "cuda")


def _inside(mesh: DeviceMesh, compress: Compress) -> DeviceMesh:
    """The mesh of the ranks among which the model is sharded."""
    if mesh.ndim == 1 and compress is None:
        return mesh
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh has {mesh.ndim} dimension{'s' * (mesh.ndim > 1)}, and compress is {compress!r}: between nodes, mesh "
            "must have two dimensions with names, nodes and the ranks in a node, as init_device_mesh(device, (nodes, "
            'ranks), mesh_dim_names=("replicate", "shard")) makes them'
        )
    return mesh[mesh.mesh_dim_names[1]]


def _device(mesh: DeviceMesh) -> torch.device:
    """Where the models compute; their parameters may be offloaded to the CPU."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _record(model: nn.Module, step: Step, mesh: DeviceMesh) -> tuple[ShardedTrace, ShardingPlan, Timeline]:
    """The trace of the slowest rank, the layout in the order of forward, and a step as it was."""
    for _ in range(WARM_UP):
        _train(model, step)
    if mesh.device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the whole model, as it was built, is not what a step needs
    watch = Watch(model)
    for _ in range(RECORDED):
        _train(model, step)
    timeline = watch.timeline()
    trace = replace(watch.trace(), update_s=0.0)  # between two steps there is the trial, and no optimizer
    watch.close()
    trace = trace.with_times(_over_mesh(list(trace.times), mesh, dist.ReduceOp.MAX))
    return trace, ShardingPlan.per_block([block.name for block in trace.blocks]), timeline


def _with_kind(links: Links, compress: Compress, trace: ShardedTrace, recorded: Timeline, mesh: DeviceMesh) -> Links:
    """The links with a cost of the exchange that was recorded: the dense one's, times what it took relative to that."""
    kind, dense_network = only_kind(settings_of(compress)), links.between
    assert kind is not None and dense_network is not None  # replicate() has accepted both
    took_s = sum(span.seconds for span in recorded.spans if span.track == BETWEEN)
    sizes = [trace.rest_gradient_nbytes, *(block.gradient_nbytes for block in trace.blocks)]
    dense_s = sum(links.average_s(nbytes) for nbytes in sizes)
    (factor,) = _over_mesh([took_s / dense_s if dense_s else 1.0], mesh, dist.ReduceOp.MAX)
    priced = dense_network.curve("dense").scaled(factor)
    between = replace(dense_network, curves={**dense_network.curves, kind: priced})
    return Links(links.inside, between, kind, links.overlaps)


def _spare_nbytes(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> int:
    """What the device has left on the fullest rank, beside another model's shards and their gradients."""
    shards = 2 * sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    free, _ = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    (least,) = _over_mesh([float(left - shards)], mesh, dist.ReduceOp.MIN)
    return max(0, int(SPARE * least))


def _timed(model: nn.Module, step: Step, steps: int, mesh: DeviceMesh) -> float:
    """Seconds of a step on the slowest rank."""
    _settle(mesh)
    begun = perf_counter()
    for _ in range(steps):
        _train(model, step)
    _settle(mesh)
    (seconds,) = _over_mesh([(perf_counter() - begun) / steps], mesh, dist.ReduceOp.MAX)
    return seconds


def _train(model: nn.Module, step: Step) -> None:
    step(model)
    model.zero_grad()


def _settle(mesh: DeviceMesh) -> None:
    """All ranks begin together, and nothing is under way."""
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
    for dimension in range(mesh.ndim):
        dist.barrier(mesh.get_group(dimension))


def _over_mesh(numbers: list[float], mesh: DeviceMesh, operation: Any) -> list[float]:
    """Each number over all ranks of the mesh."""
    group = mesh.get_group(0)
    values = torch.tensor(numbers, dtype=torch.float64, device=wire_device(group))
    for dimension in range(mesh.ndim):
        dist.all_reduce(values, op=operation, group=mesh.get_group(dimension))
    found: list[float] = values.tolist()
    return found
