"""The sharding plan for a model on its own ranks: recorded, planned, and tried against a unit per block.

FSDP2 cannot change the units of a model that is sharded. So the trial has models of its own, from ``build``, and
leaves nothing behind but a plan.
"""

import gc
from collections import Counter
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

from anabranch.exchange.agreement import agree_on, from_all_ranks
from anabranch.exchange.compression import Compress, Settings, described, settings_of
from anabranch.exchange.dense import dense
from anabranch.exchange.external_buckets import only_kind
from anabranch.exchange.interface import Collective, Group
from anabranch.fsdp import planning
from anabranch.fsdp.mesh import (
    check_same_over,
    described_model,
    described_options,
    fails_together,
    mesh_groups,
    over_mesh,
)
from anabranch.fsdp.planning import Links, ShardedTrace, ShardingPlan, peak_nbytes, step_s
from anabranch.fsdp.planning.sharded_step import BETWEEN
from anabranch.fsdp.replicate import replicate
from anabranch.fsdp.shard import no_groups_reason, shard
from anabranch.fsdp.watch import Watch
from anabranch.observe.measure import SHARDED, measure
from anabranch.values.files import dumps
from anabranch.values.network import Network
from anabranch.values.timeline import Timeline

WARM_UP, RECORDED = 3, 6  # steps
MEASURING_S = 2.0  # for each of the networks
LARGEST_NBYTES = 64 << 20
WORTH = 0.99  # a plan is used if its step takes at most this share of the default's
SPARE = 0.8  # a plan may use this share of the memory that the device has left: activations vary

Step = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class FoundSharding:
    """What a trial found. Seconds are of forward and backward on the slowest rank; None: the plan was not tried.

    plan        the one to use: ``fastest``, or ``default`` where that was as fast
    default     a unit per block, each freed after forward
    fastest     the planner's
    ungrouped   why units have one block each; empty if they may have more
    """

    plan: ShardingPlan
    default: ShardingPlan
    fastest: ShardingPlan
    trace: ShardedTrace
    links: Links
    default_s: float | None = None
    fastest_s: float | None = None
    ungrouped: str = ""

    def predicted_s(self, plan: ShardingPlan) -> float:
        """Seconds of a step by this plan: simulated, times what a unit per block took for each simulated second.

        The simulator does not know what slows all plans alike, such as computing while messages are sent. So for a
        unit per block it is what the trial measured. Without a trial, as simulated; ``explain()`` has both.
        """
        simulated_s = step_s(self.trace, plan, self.links)
        if self.default_s is None:
            return simulated_s
        return simulated_s * self.default_s / step_s(self.trace, self.default, self.links)

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
                f"{name}: {plan.described()}, {mib:.0f} MiB at most: {predicted_s * 1e3:.1f} ms simulated, {measured}."
            )
        if self.ungrouped:
            lines.append(f"Units have one block each: {self.ungrouped}.")
        if self.plan != self.default:
            return "\n".join([*lines, "The planned units are used."])
        why = "no plan is predicted to gain 1 %" if self.fastest_s is None else "the plan did not gain 1 % here"
        return "\n".join([*lines, f"A unit per block is used: {why}."])


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

    The plan was faster in a trial, by 1 % or more; where none was, it is a unit per block. If the arguments differ
    between ranks, or cannot be used on one of them, all ranks get an error.

    build           makes the model, whole, the same on every rank; called twice
    mesh            of one dimension; or of two, nodes and the ranks in a node: between them ``ab.replicate`` averages
    step            trains one batch on the model that it is given: forward and backward
    blocks          names of the modules of which units are made, each called once in a step; by default block_names()
    compress        of ``ab.replicate``; by default exact, as under HSDP
    memory_nbytes   for gathered parameters, gradients and buffers; by default what a unit per block needs and most of
                    what the device has left
    rounds          of the trial; in each, both models train for ``steps``, in turn
    options         of fully_shard()
    """
    with fails_together("find_sharding()", mesh):
        inside, settings = _sharding_mesh(mesh, compress, memory_nbytes, rounds, steps)
    given = {"blocks": blocks and list(blocks), "memory_nbytes": memory_nbytes, "rounds": rounds, "steps": steps}
    lines = [*(f"{name} {value}" for name, value in given.items()), described(settings), *described_options(options)]
    check_same_over("what find_sharding() was given", lines, mesh)
    with ExitStack() as closing:
        trial = _Trial(build, mesh, inside, step, compress, rounds, steps, options, closing)
        found = trial.run(blocks, memory_nbytes)
    gc.collect()  # a model of FSDP2 is a cycle of references
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()
    return found


@dataclass(frozen=True)
class _Trial:
    """What every part of a trial needs. Within ``closing``, so that threads and groups end even if a step fails."""

    build: Callable[[], nn.Module]
    mesh: DeviceMesh
    inside: DeviceMesh
    step: Step
    compress: Compress
    rounds: int
    steps: int
    options: Mapping[str, Any]
    closing: ExitStack

    def run(self, blocks: Sequence[str] | None, memory_nbytes: int | None) -> FoundSharding:
        """Record, measure, plan, and let the plan take turns with a unit per block."""
        mesh, on_gpu = self.mesh, self.mesh.device_type == "cuda"
        # Where the models compute; their parameters may be offloaded to the CPU.
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
        stock = self.sharded_by(None if blocks is None else ShardingPlan.per_block(blocks))
        trace, default, recorded = self.recorded(stock)
        links = measure_links(mesh, device, trace.nbytes)
        if self.compress is not None:
            links = _with_compressed_cost(links, self.compress, trace, recorded, mesh)
        if memory_nbytes is None and on_gpu:
            memory_nbytes = peak_nbytes(trace, default) + _spare_nbytes(stock, mesh, device)
        ungrouped = no_groups_reason(self.options)
        with fails_together("planning", mesh):
            fastest = planning.plan(trace, links, memory_nbytes, per_block=bool(ungrouped))
        check_same_over("the sharding plan", dumps(fastest).splitlines(), mesh)
        if step_s(trace, fastest, links) > WORTH * step_s(trace, default, links):
            return FoundSharding(default, default, fastest, trace, links, ungrouped=ungrouped)
        ours = self.sharded_by(fastest)
        times = [(self.timed(stock), self.timed(ours)) for _ in range(self.rounds + 1)][1:]
        default_s, fastest_s = (median(column) for column in zip(*times, strict=True))
        ratio = median(after / before for before, after in times)
        chosen = fastest if ratio <= WORTH else default
        return FoundSharding(chosen, default, fastest, trace, links, default_s, fastest_s, ungrouped)

    def sharded_by(self, plan: ShardingPlan | None) -> nn.Module:
        """A model of the trial's own; without a plan, a unit per block."""
        with fails_together("build()", self.mesh):
            model = self.build()
        check_same_over("the model of build()", described_model(model), self.mesh)
        shard(model, self.inside, plan, **self.options)
        if self.mesh.ndim == 2:
            self.closing.callback(replicate(model, self.mesh, compress=self.compress).close)
        return model

    def recorded(self, model: nn.Module) -> tuple[ShardedTrace, ShardingPlan, Timeline]:
        """The trace of the slowest rank, the layout in the order of forward, and a step as it was."""
        for _ in range(WARM_UP):
            _train_step(model, self.step)
        if self.mesh.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the whole model, as it was built, is not what a step needs
        with fails_together("ab.watch()", self.mesh):
            watch = Watch(model)
        for _ in range(RECORDED):
            _train_step(model, self.step)
        with fails_together("recording steps", self.mesh):
            timeline = watch.timeline()
            trace = replace(watch.trace(), update_s=0.0)  # between two steps there is the trial, and no optimizer
            watch.close()
        names = [block.name for block in trace.blocks]
        check_same_over("the order in which forward calls blocks", names, self.mesh)
        trace = trace.with_times(over_mesh(trace.times, self.mesh, dist.ReduceOp.MAX))
        return trace, ShardingPlan.per_block(names), timeline

    def timed(self, model: nn.Module) -> float:
        """Seconds of a step on the slowest rank."""
        _synchronise(self.mesh)
        begun = perf_counter()
        for _ in range(self.steps):
            _train_step(model, self.step)
        _synchronise(self.mesh)
        (seconds,) = over_mesh([(perf_counter() - begun) / self.steps], self.mesh, dist.ReduceOp.MAX)
        return seconds


def measure_links(mesh: DeviceMesh, device: torch.device, largest_nbytes: int = LARGEST_NBYTES) -> Links:
    """The networks of a mesh: inside its last dimension, and between along the first of two. Collective.

    Between nodes all ranks of a node send at the same time, as in training: they may share the node's link.
    """
    largest = max(1 << 20, min(LARGEST_NBYTES, largest_nbytes))

    def network(group: Group, collectives: Mapping[str, Collective], contending: Group | None = None) -> Network:
        kinds = {"dense": dense, **collectives}
        return measure([group], device, largest, MEASURING_S, kinds, growth=4, contending=contending)

    overlaps = device.type == "cuda"
    if mesh.ndim == 1:
        return Links(network(mesh.get_group(0), SHARDED), overlaps=overlaps)
    nodes, inside = mesh.get_group(0), mesh.get_group(1)
    within = agree_on(Network, network(inside, SHARDED), nodes)
    between = agree_on(Network, network(nodes, {}, contending=inside), inside)
    return Links(within, between, overlaps=overlaps)


def _sharding_mesh(
    mesh: DeviceMesh, compress: Compress, memory_nbytes: int | None, rounds: int, steps: int
) -> tuple[DeviceMesh, Settings]:
    """The mesh of the ranks among which the model is sharded, and what is sent between nodes."""
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds is {rounds} and steps is {steps}: expected at least 1 of each, for the trial")
    if memory_nbytes is not None and memory_nbytes < 1:
        raise ValueError(f"memory_nbytes is {memory_nbytes}: expected a number of bytes, or None for what is left")
    settings = settings_of(compress)
    if mesh.ndim == 1 and compress is None:
        return mesh, settings
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh has {mesh.ndim} dimension{'s' * (mesh.ndim > 1)}, and compress is {compress!r}: between nodes, mesh "
            "must have two dimensions with names, nodes and the ranks in a node, as init_device_mesh(device, (nodes, "
            'ranks), mesh_dim_names=("replicate", "shard")) makes them'
        )
    return mesh[mesh.mesh_dim_names[1]], settings


def _with_compressed_cost(
    links: Links, compress: Compress, trace: ShardedTrace, recorded: Timeline, mesh: DeviceMesh
) -> Links:
    """The links with a cost of the exchange that was recorded: the dense one's, times what it took relative to that."""
    kind, dense_network = only_kind(settings_of(compress)), links.between
    assert kind is not None and dense_network is not None  # replicate() has accepted both
    took_s = sum(span.seconds for span in recorded.spans if span.track == BETWEEN)
    sizes = [trace.rest_gradient_nbytes, *(block.gradient_nbytes for block in trace.blocks)]
    dense_s = sum(links.average_s(nbytes) for nbytes in sizes)
    (factor,) = over_mesh([took_s / dense_s if dense_s else 1.0], mesh, dist.ReduceOp.MAX)
    priced = dense_network.curve("dense").scaled(factor)
    between = replace(dense_network, curves={**dense_network.curves, kind: priced})
    return Links(links.inside, between, kind, links.overlaps)


def _spare_nbytes(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> int:
    """What the fullest device has left with a second model's shards and their gradients on it. Collective."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    sharing = Counter(from_all_ranks(uuid.encode(), *mesh_groups(mesh)))[uuid.encode()]
    shards = 2 * sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    free, _ = torch.cuda.mem_get_info(device)
    # Each rank on the device sees the same free bytes. What the allocator holds unused is this rank's alone.
    left = free // sharing + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    (least,) = over_mesh([float(left - shards)], mesh, dist.ReduceOp.MIN)
    return max(0, int(SPARE * least))


def _train_step(model: nn.Module, step: Step) -> None:
    try:
        step(model)
    except Exception as error:
        error.add_note(
            f"in a trial of find_sharding(), on rank {dist.get_rank()}: if the step itself is right, another rank has "
            "died, failed or left; look for the first error among all ranks"
        )
        raise
    model.zero_grad()


def _synchronise(mesh: DeviceMesh) -> None:
    """Let all ranks begin together, with nothing in progress."""
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
    for dimension in range(mesh.ndim):
        dist.barrier(mesh.get_group(dimension))
