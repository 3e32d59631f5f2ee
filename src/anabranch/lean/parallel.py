"""LeanDataParallel: a wrapper without DDP's reducer, which keeps every gradient in memory."""

import json
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch import planning as planners
from anabranch.ddp.compiled.graphs import CompiledGraphs
from anabranch.ddp.reducer import compiled_as_ddp
from anabranch.ddp.wrap_checks import check_outermost, check_unwrapped, dtensor_reason
from anabranch.exchange.agreement import all_or_none, check_same, from_rank_0
from anabranch.exchange.compression import (
    Compress,
    Settings,
    collectives_for,
    described,
    keeps_residuals,
    may_be_sparse,
    name_of,
    settings_of,
)
from anabranch.exchange.groups import USE_A_TORCH_GROUP, default_group, no_clone_reason
from anabranch.exchange.interface import Scaler
from anabranch.exchange.model_parameters import ignored_names, model_parts
from anabranch.exchange.nodes import FoundNodes, GivenNodes
from anabranch.lean.activations.profiler import PROFILED_STEPS, ChoiceMessage, ManagedActivations
from anabranch.lean.activations.solver import BlockCosts
from anabranch.lean.bucket_update import BucketUpdater
from anabranch.lean.engine import Engine, PassState, in_backward
from anabranch.lean.memory_budget import (
    FixedMemory,
    ResidualStorage,
    check_fits,
    choose_within,
    described_choice,
    exchanges_of,
    gradients_of,
    memory_nbytes_per_s,
)
from anabranch.lean.optimizer_memory import memory_of, nbytes_of
from anabranch.lean.options import Lean, check_lean
from anabranch.lean.torch_patches import watch
from anabranch.lean.trained_model import trained_parameters
from anabranch.planning.by_size import DDP_CAP_NBYTES
from anabranch.planning.footprint import BLAS_WORKSPACE_NBYTES, Setting, allocated_nbytes
from anabranch.tuning.options import DEFAULT_POLICY, Planner, TuningOptions, TuningPolicy
from anabranch.tuning.tuned_model import Tuned
from anabranch.tuning.tuner import Tuner
from anabranch.values.kinds.formats import STORED
from anabranch.values.kinds.options import OkTopk
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import TensorSpec, Trace

BROADCAST_NBYTES = 250 << 20  # bytes per message of the initial broadcast, as in DDP
COPIED = "it is a copy"
NOT_COPIED = ("process_group", "_pass", "_scaler", "_tuner", "_collectives", "_layout", "_graph_cutter",
              "_release", "_undo_activations")  # fmt: skip


class LeanDataParallel(Tuned, nn.Module):
    """Data-parallel training that frees each gradient after its bucket's exchange.

    Every bucket is updated inside backward, by an optimizer of its own. ``optimizer`` represents all of them, for
    learning-rate schedulers and checkpoints; its ``step()`` only runs a closure, if it is given one. This class is no
    DistributedDataParallel.

    memory: the settings of Lean, with the optimizer. The other arguments are those of ``DataParallel``, and
    ``process_group``, ``broadcast_buffers`` and ``find_unused_parameters`` of DistributedDataParallel.
    """

    _layout: Engine
    _graph_cutter = CompiledGraphs({})  # of a copy, which plans nothing
    bucket_bytes_cap = DDP_CAP_NBYTES  # by which torch cuts graphs where we cannot
    require_backward_grad_sync = True  # as in DDP, also for programs that set it instead of using no_sync()

    def __init__(
        self,
        module: nn.Module,
        *unnamed: Any,
        memory: Lean,
        compress: Compress = None,
        planner: str | Planner = "optimal",
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | None = None,
        lanes: int | None = None,
        nodes: GivenNodes = "auto",
        profile_steps: int = 6,
        policy: TuningPolicy = DEFAULT_POLICY,
        cache: str | os.PathLike[str] | bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        check_unwrapped(module, Tuned)
        dtensor_reason(module)
        compress = settings_of(compress)
        _check_arguments(unnamed, others, compress, memory)
        tuning = TuningOptions(planner, plan, network, lanes, profile_steps, cache=cache, policy=policy, nodes=nodes)
        group = process_group or default_group()
        if reason := no_clone_reason(group):
            raise ValueError(f"DataParallel with memory=Lean(...) cannot run here: {reason}. {USE_A_TORCH_GROUP}")
        of_ddp = f"find_unused_parameters {find_unused_parameters}, broadcast_buffers {broadcast_buffers}"
        settings = [described(compress), f"{policy}", memory.described(), of_ddp]
        tuning = tuning.agreed(model_parts(module), group, *settings, by_name=True)
        compress = None if tuning.turned_off else compress
        if reason := _flat_reason(compress, find_unused_parameters, memory):
            tuning = replace(tuning, found_nodes=FoundNodes(None, reason))
        self.module = module
        self.memory = memory
        self._compress = compress
        self.process_group = group
        self._broadcast_buffers = broadcast_buffers
        self._buffers_changed = False  # since the last broadcast
        alone = group.size() == 1
        self.find_unused_parameters = find_unused_parameters or alone  # a single rank needs no message for it
        parameters = _trainable_parameters(module)
        self._broadcast_from_rank_0([*module.named_parameters(), *module.named_buffers()])
        if alone and plan is None:
            tuning = replace(tuning, profile_steps=0)
        self._pass = PassState()
        self._profiled: tuple[Sequence[BlockCosts], Sequence[ResidualStorage]] | None = None
        self._activations = ManagedActivations(module, memory.activations_mode)
        self._undo_activations = weakref.finalize(self, self._activations.undo)
        self._undo_activations.atexit = False  # the module is not used after the interpreter has ended
        try:
            self._start_engine(tuning, compress, parameters, settings)
            check_same("Lean's optimizer", self._layout.optimizers.described(), self._running_tuner().runner.control)
        except BaseException:
            self.close()
            self._undo_activations()
            raise

    def _start_engine(
        self,
        tuning: TuningOptions,
        compress: Settings,
        parameters: dict[str, nn.Parameter],
        settings: list[str],
    ) -> None:
        memory, current_pass = self.memory, self._pass
        updates = BucketUpdater(memory.clip_norm, list(parameters.values()), memory.clip_value)
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        collectives = collectives_for(
            compress, parameters, self.process_group, lambda: current_pass.averaging, updates.applied, frozen,
            form=STORED.get(memory.first_residuals),
        )  # fmt: skip
        plan, find_unused = ddp_sized_plan(parameters), self.find_unused_parameters

        def make_layout() -> Engine:
            with all_or_none("making Lean's optimizer", self.process_group):
                # Set here: close() must find it if making another rank's optimizer fails.
                self._layout = Engine(self.module, memory, collectives, updates, plan, current_pass, find_unused)
            return self._layout

        self._graph_cutter = CompiledGraphs(parameters)
        tuner = self._start_tuning(tuning, collectives, parameters, make_layout, settings)
        tuner.runner.timer.observers.append(self._layout)
        watch(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """All buckets' optimizers as one, for schedulers and checkpoints."""
        return self.layout.optimizers.user_optimizer

    @property
    def skipped(self) -> int:
        """Updates of buckets that were skipped because a gradient was not finite on some rank."""
        return self.layout.updates.skipped()

    def explain(self) -> str:
        """The plan, its predicted and measured gain, and the exposed time; or why there is no plan."""
        if self._tuner is None:
            return f"No plan: {self._no_plan_reason}. It cannot train: wrap the module again."
        chosen = self._activations.agreed
        return "\n".join([super().explain(), *([described_choice(chosen)] if chosen else [])])

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm over all average gradients of the last step, before clipping, on the device; does not wait for it.

        None without ``Lean(clip_norm=...)``, and before the first step.
        """
        return self.layout.updates.grad_norm

    def _grad_norm_source(self) -> Callable[[], torch.Tensor | None]:
        updates = self.layout.updates
        return lambda: updates.grad_norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Return ``grad_norm`` of the last step, which was clipped in backward; 0 before the first.

        Raises RuntimeError unless ``Lean`` has clipped so. An infinite ``max_norm`` only asks for the norm.
        """
        limit = self.memory.clip_norm
        if limit is None or norm_type != 2.0 or float(max_norm) not in (limit, inf):
            raise RuntimeError(
                f"clip_grad_norm_() of max_norm {max_norm} and norm_type {norm_type} under Lean, with clip_norm "
                f"{limit} and norm_type 2: every bucket was updated in backward, so give "
                f"Lean(clip_norm={float(max_norm)}), which clips there"
            )
        return torch.zeros(()) if self.grad_norm is None else self.grad_norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Do nothing, since backward has clipped; RuntimeError unless ``Lean`` has clipped at this value."""
        if self.memory.clip_value != float(clip_value):
            raise RuntimeError(
                f"clip_grad_value_() of clip_value {clip_value} under Lean, with clip_value {self.memory.clip_value}: "
                f"every bucket was updated in backward, so give Lean(clip_value={float(clip_value)}), which clips there"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards only accumulate gradients, in ``parameter.grad``, until the next averaged step."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @_disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; its gradients will be averaged, and its parameters updated, in backward."""
        will_average = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._before_forward(will_average, inputs, kwargs)
        with compiled_as_ddp(self) if self._graph_cutter.cuts_graphs else nullcontext():
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._after_forward(output, will_average)
        return output

    def follow(self, scaler: Scaler) -> None:
        """Scale updates and residuals with this GradScaler. Call it once, on every rank.

        Then call only ``scaler.scale(loss).backward()``. Before the next forward the scaler updates its scale, which
        falls if an update was skipped, and rises after its interval of steps without a skip. Do not call
        ``scaler.step()`` and ``scaler.update()``: they need gradients that exist after backward.
        """
        self._counts_seen = self._step_counts()
        self._pass.scaler = scaler
        super().follow(scaler)

    def _follow_scale(self) -> None:
        scaler = self._scaler
        if isinstance(scaler, torch.amp.GradScaler) and self._counts_seen != (now := self._step_counts()):
            skipped_before, skipped_now = self._counts_seen[1], now[1]
            self._counts_seen = now
            # A gradient that tells the scaler what a step of an optimizer would have told it.
            told = nn.Parameter(torch.zeros((), device=next(iter(self.layout.parameters.values())).device))
            told.grad = torch.full_like(told, 0.0 if skipped_before == skipped_now else inf)
            scaler.unscale_(torch.optim.SGD([told]))
            scaler.update()
        if scaler is not None:
            self.layout.updates.loss_scale = float(scaler.get_scale())
        super()._follow_scale()

    def _step_counts(self) -> tuple[int, int]:
        """The number of steps so far, and of skipped updates."""
        return (self._tuner.steps_done if self._tuner is not None else 0), self.skipped

    @_disable_dynamo
    def _before_forward(self, will_average: bool, *inputs: object) -> None:
        if self._no_plan_reason == COPIED and not torch.is_grad_enabled():
            return
        tuner = self._running_tuner()
        check_outermost(self)
        self._graph_cutter.install(self.module)
        if torch.is_grad_enabled():
            if not in_backward():
                self._pass.averaging = self.require_backward_grad_sync
                self._follow_scale()  # all gradients that accumulate until the next step have one scale
            tuner.before_forward(self.require_backward_grad_sync, *inputs)
        if will_average and tuner.steps_done >= PROFILED_STEPS:  # the same forward on all ranks: steps count alike
            self._choose()
        if self._broadcast_buffers and (will_average or self._buffers_changed):
            self._broadcast_from_rank_0(self.module.named_buffers())
        self._buffers_changed = will_average  # this forward updates running statistics on each rank

    @_disable_dynamo
    def _after_forward(self, output: Any, averaged: bool) -> None:
        self._running_tuner().runner.timer.forward_ended(output, averaged)

    def _fixed_memory(self) -> FixedMemory:
        """What this rank holds besides activations, now that the optimizer has its state."""
        tensors = {tensor.data_ptr(): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        runner = self._running_tuner().runner
        parameters = runner.parameters  # as wrapped: one that is frozen now may be unfrozen later
        plan = runner.plan_in_force
        gradients = gradients_of(self.module, parameters, may_be_sparse)
        setting = Setting(
            ranks=self.process_group.size(),
            buckets=None if plan is None else [bucket.names for bucket in plan.buckets],
            clips=self.layout.updates.holds_updates,
            blas_workspace_nbytes=BLAS_WORKSPACE_NBYTES if next(iter(parameters.values())).is_cuda else 0,
        )
        weights_nbytes = sum(allocated_nbytes(nbytes_of(tensor)) for tensor in tensors.values())
        return FixedMemory(weights_nbytes, memory_of(self.optimizer), gradients, exchanges_of(self._compress, setting))

    def _choose(self) -> None:
        """Choose which activations are recomputed and, within a budget, how residuals are stored; after profiling."""
        if not self._activations.agreed:
            self._activations.choose(self._own_choice, self._agreed_choice)
            if agreed := self._activations.agreed:
                self.layout.residuals.store_as(agreed["residuals"])

    def _own_choice(self, blocks: Sequence[BlockCosts]) -> ChoiceMessage:
        """What this rank would choose; BudgetError if nothing fits."""
        budget_nbytes = self.memory.within_nbytes
        assert budget_nbytes is not None  # else nothing is profiled
        device = next(iter(self.layout.parameters.values())).device
        self._profiled = blocks, self._fixed_memory().storages(blocks, memory_nbytes_per_s(device))
        return choose_within(*self._profiled, budget_nbytes)._asdict()

    def _agreed_choice(self, own: ChoiceMessage) -> ChoiceMessage:
        """Rank 0's choice: a block that communicates must be recomputed on all ranks or on none."""
        agreed: ChoiceMessage = json.loads(from_rank_0(json.dumps(own).encode(), self.process_group))
        if "actions" in agreed:
            with all_or_none("checking what rank 0 has chosen within the budget", self.process_group):
                if self._profiled is not None:
                    check_fits(agreed, *self._profiled)
        return agreed

    def trained_parameters(self) -> Collection[nn.Parameter]:
        """The parameters that are updated in backward; none after close() and in a copy."""
        return self._layout.parameters.values() if self._tuner is not None else ()

    @property
    def layout(self) -> Engine:
        """The bucket layout; raises RuntimeError after close() and in a copy."""
        self._running_tuner()
        return self._layout

    def _running_tuner(self) -> Tuner:
        if self._tuner is None and self._no_plan_reason == COPIED:
            raise RuntimeError(
                "this is a copy of a DataParallel under Lean: it can compute under torch.no_grad(), but it cannot "
                "train; to train it, wrap its module: DataParallel(copy.module, memory=...), on all ranks"
            )
        if self._tuner is None:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        return self._tuner

    @torch.no_grad()
    def _broadcast_from_rank_0(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send these tensors from rank 0 to all ranks, without those that DDP ignores."""
        ignored = ignored_names(self.module)
        tensors = [tensor for name, tensor in named if name not in ignored]
        if tensors and self.process_group.size() > 1:
            dist._broadcast_coalesced(self.process_group, tensors, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._tuner is not None:
            self._release()
            self._graph_cutter.close()
            self._undo_activations()
        layout = self.__dict__.pop("_layout", None)  # also after a constructor that failed before there was a tuner
        if layout is not None:
            layout.close()
        self._mark_closed()

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy: everything except tuner, layout and groups. The copied module is as before wrapping."""
        if self._tuner is not None and self.memory.activations_mode == "auto":
            raise RuntimeError(
                "a DataParallel under Lean with a budget cannot be copied, since its module is profiled: copy the "
                "module before it is wrapped, and load this one's state_dict()"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}
        if isinstance(self.memory.optimizer, torch.optim.Optimizer):  # of this model's parameters, with all its state
            state["memory"] = replace(self.memory, optimizer=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._no_plan_reason = COPIED
        self._pass = PassState()
        self.require_backward_grad_sync = True
        self._activations.undo()  # of the copy


def _check_arguments(unnamed: tuple[Any, ...], others: dict[str, Any], compress: Settings, memory: Lean) -> None:
    """Raise ValueError for arguments that a DataParallel under Lean does not take."""
    if unnamed or others:
        raise ValueError(
            f"DataParallel under Lean was given {', '.join(others) or 'device_ids'}: of the arguments of "
            "DistributedDataParallel it takes only process_group, broadcast_buffers and find_unused_parameters, by "
            "name; leave the others out, and move inputs to the model's device"
        )
    check_lean(memory)
    if isinstance(compress, OkTopk) and compress.momentum:
        raise ValueError(
            f"OkTopk momentum is {compress.momentum}, and under Lean gradients are added to the residual as they "
            "arrive: expected 0; use the momentum of the optimizer"
        )


def _flat_reason(compress: Settings, find_unused: bool, memory: Lean) -> str:
    """Why no exchange may have two levels under Lean; empty if some may."""
    if keeps_residuals(compress):
        return f"under Lean compress={name_of(compress)} adds gradients to whole residuals"
    if find_unused:
        return "under Lean find_unused_parameters=True sends more behind each bucket"
    if memory.within is not None:
        return "under Lean a memory budget does not count what two levels need"
    return ""


def _trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to train; raises ValueError if the engine cannot train this module."""
    parameters = trained_parameters(module)
    if not parameters:
        raise ValueError("no parameter of this module requires a gradient: nothing to train")
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0]} has sparse gradients, and Lean adds gradients up in place: create it with sparse=False"
        )
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ValueError(f"the parameters are on {', '.join(map(str, devices))}: expected all on one CPU or GPU")
    return parameters


def ddp_sized_plan(parameters: dict[str, nn.Parameter]) -> Plan:
    """The buckets that DDP would build: by size, from the last parameter to the first, one dtype each."""
    backwards = list(reversed(parameters.items()))
    tensors = [
        TensorSpec(name, p.numel(), p.element_size(), index * 1e-6, str(p.dtype).removeprefix("torch."))
        for index, (name, p) in enumerate(backwards)
    ]
    return planners.by_bytes(Trace(tuple(tensors), 0.0), Network.ring(2, 1e-4, 1e-9))
