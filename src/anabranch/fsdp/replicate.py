"""Models that FSDP2 shards inside each node: what travels between the nodes, by any kind of exchange.

    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    replication = ab.replicate(model, mesh, compress="int8")

FSDP2 reduces the gradients of a unit inside the node, so that each rank has the sum of its shard, and calls a hook. The
hook averages that shard among the ranks that have the same one in other nodes. Residuals are as small as shards.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from anabranch.exchange.agreement import all_or_none, check_same, true_on_all_ranks
from anabranch.exchange.compression import Compress, Settings, described, settings_of
from anabranch.exchange.dense import all_finite, dense
from anabranch.exchange.external_buckets import ExternalBuckets, only_kind
from anabranch.exchange.groups import USE_A_TORCH_GROUP, no_clone_reason
from anabranch.exchange.interface import Group, Scaler, Steps, record_stream
from anabranch.exchange.lanes import Lane, Lanes, Message
from anabranch.fsdp.mesh import check_same_over, fails_together, inherit_timeouts
from anabranch.fsdp.torch_internals import gradient_dtype, is_finalized_by_hand, is_in_backward, sharded_units
from anabranch.observe.step_timer import tensors_in

MIB = 1 << 20


class ReplicatedUnit(NamedTuple):
    """A unit of FSDP2's as it was when replicate() was called.

    module    that fully_shard() was given
    record    FSDP2's own of the unit's parameters
    trained   whether each of its parameters was trained
    shards    of trained parameters, by name, as the unit's buffer has them; empty if all were frozen
    frozen    likewise of frozen ones
    """

    label: str
    module: FSDPModule
    record: Any
    trained: Sequence[bool]
    shards: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]

    @property
    def numel(self) -> int:
        """Elements of the buffer, if every parameter has a gradient."""
        return sum(shard.numel() for shard in self.shards.values())

    def trains_others(self) -> bool:
        """Whether parameters were frozen or unfrozen since replicate() was called."""
        return _requires_grad(self.record) != self.trained

    def is_whole(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` has the gradients of ``shards``, all of them, and of nothing else."""
        # The size alone does not tell: a parameter that was frozen since may be as large as one that was unfrozen.
        return buffer.numel() == self.numel and not self.trains_others()


def replicate(model: nn.Module, mesh: DeviceMesh, compress: Compress = None) -> "Replication":
    """Average the gradients of a sharded model between nodes, in every backward pass from now on. Collective.

    model      sharded by ``fully_shard(..., mesh=mesh["shard"])``, the same on every rank
    mesh       of two dimensions: nodes, and the ranks in a node among which the model is sharded
    compress   "bf16", "int8", "int4", ``Quantised(...)`` or ``OkTopk(...)``; by default all is sent exactly

    Every node starts with the weights of the first one. Keep the result: checkpoints need its state.
    """
    with fails_together("ab.replicate()", mesh):
        settings = settings_of(compress)
        if only_kind(settings) is None:
            raise ValueError(
                f"compress is {compress!r}: between nodes every unit travels by one kind: expected bf16, int8, int4, "
                "Quantised(...), or OkTopk(...) with one density"
            )
        units = _replicated_units(model)
        nodes, inside = _node_groups(mesh, units)
        if reason := no_clone_reason(nodes):
            raise ValueError(f"replicate() cannot run here: {reason}. {USE_A_TORCH_GROUP}")
        inherit_timeouts(mesh)
    lines = [f"{unit.label}: {list(unit.shards)}, {unit.numel} elements" for unit in units]
    check_same_over("the sharded model", [described(settings), *lines], mesh)
    for parameter in model.parameters():
        dist.broadcast(parameter.to_local().detach(), group_src=0, group=nodes)  # type: ignore[attr-defined]
    # A line between nodes for each rank of a node; where these are all ranks, they can make groups together.
    siblings = mesh.mesh.t().tolist() if mesh.mesh.numel() == dist.get_world_size() else []
    return Replication(model, settings, units, nodes, inside, siblings)


class Replication:
    """The exchange of one sharded model between nodes; ``replicate`` makes it.

    node         and ``node_count``, ``shard``, ``shard_count``: where this rank is
    parameters   by name, those with a state to save: all that are averaged, and frozen ones whose state was loaded
    known        all of the model's

    ``siblings``: as in ``clone_group``, of the group ``nodes``.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        units: Sequence[ReplicatedUnit],
        nodes: Group,
        inside: Group,
        siblings: Sequence[Sequence[int]],
    ) -> None:
        self.node, self.node_count = nodes.rank(), nodes.size()
        self.shard, self.shard_count = inside.rank(), inside.size()
        trained = {name: shard for unit in units for name, shard in unit.shards.items()}
        frozen = {name: shard for unit in units for name, shard in unit.frozen.items()}
        self._shards = {**trained, **frozen}
        self.known: dict[str, DTensor] = dict(model.named_parameters())  # type: ignore[arg-type]
        self.parameters = {name: parameter for name, parameter in self.known.items() if name in trained}
        self._units, self._inside = units, inside
        self._exchanges = ExternalBuckets(settings, trained, nodes, frozen, partial(_scaler_skips, model, inside))
        self._device = next(iter(trained.values())).device
        # On a GPU, exchanges run on the stream on which FSDP2 calls the hook.
        self._lanes = Lanes(nodes, self._device, self._exchanges.collectives.max_ctas, siblings, own_streams=False)
        # Also when the interpreter ends: a thread that is inside a collective then would abort it.
        self._release = weakref.finalize(self, self._lanes.close)
        self._lanes.grow(1)
        self._scaler: Scaler | None = None
        self._compared = False
        # In the last step, by unit: elements, dtype, and whether they were those of all parameters that are known.
        self._last: dict[str, tuple[int, torch.dtype, bool]] = {}
        self._deferred: dict[str, torch.Tensor] = {}  # sums of this node until set_requires_all_reduce(True)
        # An own stream: FSDP2 would run the hook on the one that reduces inside the node, which would wait for it.
        stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        for unit in units:
            unit.module.set_all_reduce_hook(partial(self._average, unit), stream=stream)
        self._around_forward = [
            model.register_forward_pre_hook(self._check_ended, prepend=True),
            model.register_forward_hook(self._await_backward),
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint with the model; {} if nothing is kept between steps."""
        return self._exchanges.state_dict()

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank, on every rank, before the first step.

        If the number of nodes has changed, give every rank the states of all old ranks with the same shard.
        """
        if self._compared:
            raise RuntimeError("load_state_dict() of a Replication after steps were made: load before the first")
        self._exchanges.load_state_dict(*states)

    def save_also(self, names: Collection[str]) -> None:
        """From now on the state of these parameters is saved, too: all ranks of a node must save the same entries."""
        kept = {*self.parameters, *names}
        self.parameters = {name: parameter for name, parameter in self.known.items() if name in kept}

    def padded(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A flat shard of this parameter, with zeros at its end so that all ranks have shards of one size."""
        return pad(shard, (0, self._shards[name].numel() - shard.numel()))

    def padding(self, name: str) -> int:
        """The number of zeros at the end of this rank's shard."""
        return self._shards[name].numel() - self.known[name].to_local().numel()

    def together(self, what: str) -> AbstractContextManager[None]:
        """A context that fails on all ranks of all nodes if it fails on one; nothing in it communicates."""
        return all_or_none(what, self._lanes[0].group, self._inside)

    def any_in_node(self, here: bool) -> bool:
        """Whether any rank of this node says so. Collective in the node."""
        return not true_on_all_ranks(not here, self._inside)

    def follow(self, scaler: Scaler) -> None:
        """Scale residuals with this GradScaler; call it on every rank, before the first step."""
        if self._compared and scaler is not self._scaler:
            raise RuntimeError("follow() of a Replication after steps were made: call it before the first")
        self._scaler = scaler

    def metrics(self) -> dict[str, int]:
        """Numbers for a logger: what this rank sent to other nodes in the last step, and what float32 would be."""
        sent_nbytes = dense_nbytes = 0
        for unit in self._units:
            numel, dtype, whole = self._last.get(unit.label, (0, torch.float32, False))
            exact_nbytes = self._dense_nbytes(numel, dtype)
            sent_nbytes += self._exchanges.sent_nbytes(list(unit.shards), dtype) if whole else exact_nbytes
            dense_nbytes += self._dense_nbytes(max(unit.numel, numel), torch.float32)
        return {"sent_nbytes": sent_nbytes, "dense_nbytes": dense_nbytes}

    def explain(self) -> str:
        """What is sent between the nodes, and the residuals."""
        metrics, trained = self.metrics(), sum(bool(unit.shards) for unit in self._units)
        lines = [
            f"anabranch: {trained} {'unit' if trained == 1 else 'units'} between {self.node_count} nodes, "
            f"by {self._exchanges.kind}.",
            f"This rank sends {metrics['sent_nbytes'] / MIB:.3f} MiB to other nodes in a step; all of it in float32 "
            f"would be {metrics['dense_nbytes'] / MIB:.3f} MiB.",
        ]
        for unit in self._units:
            numel, _, whole = self._last.get(unit.label, (0, None, True))
            if not whole:
                why = (
                    "parameters were unfrozen since, or frozen: close() this Replication, and call ab.replicate() again"
                    if unit.trains_others()
                    else "some of its parameters had no gradient"
                )
                lines.append(
                    f"{unit.label} travelled exactly in the last step, {numel} elements for the {unit.numel} that were "
                    f"trained when ab.replicate() was called: {why}."
                )
        return "\n".join([*lines, *self._exchanges.collectives.residuals.summary()])

    def _dense_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * (self.node_count - 1) * numel * dtype.itemsize // self.node_count

    def close(self) -> None:
        """Remove the hooks, and release threads and groups; nothing is averaged between nodes any more."""
        for unit in self._units:
            unit.module.set_all_reduce_hook(no_average)
        for hook in self._around_forward:
            hook.remove()
        self._deferred.clear()
        self._exchanges.close()
        self._release()

    def _check_ended(self, *_: object) -> None:
        """RuntimeError in a forward after a backward that was broken off: what some units sent in it is in no gradient.

        FSDP2 itself would reduce only some of the gradients from then on. A forward inside backward recomputes.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        if self._exchanges.in_step or any(is_in_backward(unit.module) for unit in self._units):
            raise RuntimeError(
                "the last backward of this model was broken off by an error, and what it sent between the nodes is "
                "lost: make a new model and its Replication on all ranks, and load the last checkpoint"
            )

    def _await_backward(self, _module: nn.Module, _inputs: object, output: object) -> None:
        """The backward that begins with the output of the model is the outermost one."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._exchanges.end_with_this_backward())

    def _average(self, unit: ReplicatedUnit, buffer: torch.Tensor) -> None:
        """FSDP2's hook: returns when ``buffer`` holds the average over the nodes, or will on the current stream."""
        if is_finalized_by_hand(unit.module):
            raise RuntimeError(
                "set_manual_backward_finalization(True) and ab.replicate() do not work together: finalize_backward() "
                "would reduce units when the step is already over between the nodes: call it with False"
            )
        if not self._adds_deferred(unit, buffer):
            return
        lane = self._lanes[0]
        if not self._compared:
            self._compare(lane.group)
        if not self._exchanges.in_step:
            self._last.clear()
            self._exchanges.begin_step(self._scaler)
            self._exchanges.end_with_this_backward()  # unless that of the model's output will end it
        whole = unit.is_whole(buffer)
        # Else FSDP2 does not say which parameters have no gradient.
        steps = self._steps(unit, buffer, lane) if whole else dense(buffer, lane.group, lane.group.size())
        record_stream(buffer)  # FSDP2 has it from another stream, and may drop it while this one still uses it
        kind = self._exchanges.kind_of(buffer.dtype)
        label = f"{unit.label} between nodes ({kind})"
        lane.submit(Message((steps,), buffer, label)).wait()  # on a GPU the host does not
        if unit.record.gradient_divide_factor is not None:  # set_gradient_divide_factor(): HSDP adds between nodes then
            buffer *= self.node_count
        self._last[unit.label] = buffer.numel(), buffer.dtype, whole

    def _adds_deferred(self, unit: ReplicatedUnit, buffer: torch.Tensor) -> bool:
        """Add the sum that was deferred; False while all-reduce is off: ``buffer`` is deferred, and then zero."""
        deferred = self._deferred.pop(unit.label, None)
        if deferred is not None:
            if deferred.shape != buffer.shape:
                raise RuntimeError(
                    f"{unit.label} has other parameters without a gradient than in the backward before, which "
                    "set_requires_all_reduce(False) has kept in the node: use set_requires_gradient_sync(False) instead"
                )
            buffer += deferred
        if unit.record.all_reduce_grads:
            return True
        self._deferred[unit.label] = buffer.clone()
        buffer.zero_()
        return False

    def _compare(self, nodes: Group) -> None:
        """Before the first exchange: an error on all ranks of all nodes if what they were given since is not the same.

        What was loaded belongs to shards, which differ inside a node: so ranks compare it between the nodes, and tell
        the others in their node how that went.
        """
        follows = "no scaler" if self._scaler is None else "a scaler"
        check_same("what Replication.follow() was given", [follows], nodes, self._inside)
        with all_or_none("comparing what was loaded", self._inside):
            check_same("the state of the replication", self._exchanges.agreed(), nodes)
        self._compared = True

    def _steps(self, unit: ReplicatedUnit, buffer: torch.Tensor, lane: Lane) -> Steps:
        """The exchange of a unit; of a copy where a scaler may skip the step: what was sent is then put back from it.

        From the buffer it could not: where gradients are float16, FSDP2 divides it once more, in place.
        """
        names = list(unit.shards)
        if self._scaler is None:
            return chain(*self._exchanges.stages(names, buffer, lane, None))
        copy = buffer.clone()
        stages = self._exchanges.stages(names, copy, lane, self._scaler)

        def exchanged() -> Steps:
            yield from chain(*stages)
            buffer.copy_(copy)

        return exchanged()


def no_average(buffer: torch.Tensor) -> None:
    """The hook of a replication that is closed: FSDP2 takes no None."""


def _scaler_skips(model: nn.Module, inside: Group) -> bool:
    """Whether a loss scaler will skip this step: it does on all ranks of a node if a shard on one is not finite."""
    shards: list[torch.Tensor] = [
        parameter.grad.to_local()  # type: ignore[attr-defined]
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return not true_on_all_ranks(bool(all_finite(*shards)), inside)


def _replicated_units(model: nn.Module) -> list[ReplicatedUnit]:
    """The units that FSDP2 made of the model; ValueError if not all gradients would be averaged by them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    units = [
        _replicated_unit(*next(iter(unit.modules.items())), group, names)
        for unit in sharded_units(model)
        for group in unit.groups
    ]
    sharded = {name for unit in units for name in (*unit.shards, *unit.frozen)}
    if not units:
        raise ValueError(
            'the model has no unit that is trained: call fully_shard(block, mesh=mesh["shard"]) for its blocks and for '
            "itself first, then replicate(model, mesh)"
        )
    if not any(unit.shards for unit in units):
        raise ValueError(
            f"none of the {len(sharded)} parameters of the model is trained, so that nothing would be sent between "
            "nodes: call replicate() when requires_grad is True for those that will be"
        )
    if alone := [name for name in names.values() if name not in sharded]:
        raise ValueError(
            f"{alone[0]} is in no unit of fully_shard(), and would not be averaged between nodes: call "
            'fully_shard(model, mesh=mesh["shard"]) for the whole model, too'
        )
    return units


def _replicated_unit(path: str, module: FSDPModule, group: Any, names: Mapping[nn.Parameter, str]) -> ReplicatedUnit:
    """A unit, its parameters in the order of its buffer; also if all are frozen: they may be trained later."""
    if group._is_hsdp:
        raise ValueError(
            f"{path or 'the model'} was sharded over a mesh of two dimensions, so that FSDP2 averages between "
            'nodes itself, in full: give fully_shard() the inner dimension, mesh=mesh["shard"]'
        )
    if group._all_reduce_hook not in (None, no_average):
        raise ValueError(
            f"{path or 'the model'} has an all-reduce hook already: close() the Replication or the Watch of "
            "this model first, and call ab.watch() after ab.replicate()"
        )
    shards, frozen = {}, {}
    for one in group.fsdp_params:
        name = names[one.sharded_param]
        if one.offload_to_cpu:
            raise ValueError(
                f"{name} is offloaded to the CPU, and its gradient is averaged on the GPU: call fully_shard() without "
                "CPUOffloadPolicy"
            )
        if one.sharded_param.is_meta:
            raise ValueError(
                f"{name} is on the meta device, and has no values that nodes could share: call "
                "model.to_empty(device=...) and initialise it first, then replicate(model, mesh)"
            )
        if one.sharded_param.requires_grad:
            shards[name] = _shard_in_buffer(name, one)
        else:
            frozen[name] = torch.empty(1).expand(one.padded_sharded_param_size)
    return ReplicatedUnit(
        f"the unit {path}" if path else "the root unit", module, group, _requires_grad(group), shards, frozen
    )


def _requires_grad(group: Any) -> list[bool]:
    """Of each parameter of a group of FSDP2's, whether it is trained now."""
    return [one.sharded_param.requires_grad for one in group.fsdp_params]


def _shard_in_buffer(name: str, one: Any) -> torch.Tensor:
    """A tensor of the size, dtype and dimensions that this parameter's shard has in a unit's buffer; without memory."""
    parameter = one.sharded_param
    if parameter.grad_dtype != parameter.dtype:
        raise ValueError(
            f"{name} is {parameter.dtype} and its grad_dtype is {parameter.grad_dtype}: FSDP2 may sort its buffers by "
            "that, and replicate() would not know which gradient is where: leave grad_dtype as it was"
        )
    return torch.empty(1, dtype=gradient_dtype(one), device=parameter.device).expand(one.padded_sharded_param_size)


def _node_groups(mesh: DeviceMesh, units: Sequence[ReplicatedUnit]) -> tuple[Group, Group]:
    """The ranks that have this rank's shard, one in each node, and the ranks of this node."""
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimension{'s' * (mesh.ndim > 1)}: expected two, nodes and the ranks in a node, as "
            'init_device_mesh(device, (nodes, ranks), mesh_dim_names=("replicate", "shard")) makes them'
        )
    nodes, inside = mesh.get_group(0), mesh.get_group(1)
    for unit in units:
        found = dist.get_process_group_ranks(unit.record.mesh_info.shard_process_group)
        if found != dist.get_process_group_ranks(inside):
            raise ValueError(
                f"{unit.label} is sharded among ranks {found}, and the second dimension of mesh has ranks "
                f"{dist.get_process_group_ranks(inside)}: give replicate() the mesh whose second dimension "
                "fully_shard() was given"
            )
    return nodes, inside
