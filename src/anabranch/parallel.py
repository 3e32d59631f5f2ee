"""DataParallel: a DistributedDataParallel that records, measures, plans, agrees, runs, explains and re-plans."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anabranch.ddp.compiled.graphs import CompiledGraphs
from anabranch.ddp.layout import DdpLayout
from anabranch.ddp.reducer import ExtensibleDDP, reduced_parameters, unwrap
from anabranch.ddp.wrap_checks import check_outermost, check_unwrapped, dtensor_reason, python_reducer_reason
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import (
    Compress,
    Settings,
    collectives_for,
    described,
    keeps_residuals,
    name_of,
    settings_of,
)
from anabranch.exchange.groups import USE_A_TORCH_GROUP, is_in_python, no_clone_reason
from anabranch.exchange.model_parameters import model_parts
from anabranch.exchange.nodes import GivenNodes
from anabranch.exchange.residuals.momentum import check_shareable, share_momentum
from anabranch.tuning.options import DEFAULT_POLICY, Planner, TuningOptions, TuningPolicy
from anabranch.tuning.tuned_model import CLOSED, Tuned
from anabranch.values.network import Network
from anabranch.values.plan import Plan

if TYPE_CHECKING:
    from anabranch.lean.options import Lean

log = logging.getLogger("anabranch")

# Options of DDP under which its reducer does not run ordinary buckets.
UNPLANNABLE_OPTIONS = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")


class DataParallel(Tuned, ExtensibleDDP):
    """Drop-in for ``DistributedDataParallel``: takes all its arguments, and is one.

    The first steps run DDP's own buckets and are recorded. Then the network is measured (two seconds at most), rank 0
    plans, every rank builds the same buckets, and the plan is kept if live steps, in turns, show that it is faster than
    DDP. If not, DDP's own buckets stay. When the step time drifts, rank 0 searches again, within a budget.

    planner: a name from ``anabranch.planning`` or a function (trace, network) -> Plan.
    plan: run this plan, or the plan in this file, whatever its step time. network: use this instead of measuring.
    lanes: the maximum number of simultaneous messages; None tries two if the measurement predicts a gain.
    nodes: "auto" finds out which ranks share a machine, and tries exchanges that sum inside it before they use its
    network card; a number: of ranks per node, in order; False: every rank exchanges with all others.
    compress: "bf16" and "int8" round what is sent, and add in float32; "int4" also keeps its rounding errors for the
    next step; Quantised(...) says how they round; OkTopk(...) sends the largest values and keeps the rest as residual;
    each is used only if it is faster. "auto", Auto(...) or a list of kinds: per bucket the most faithful kind that
    costs no time, down to int4 unless told otherwise.
    profile_steps: steps to record before planning; 0 never plans. policy: when plans are tried, kept and dropped.
    cache: the folder in which choices are kept for the next start of the same training; None or True for
    ``$ANABRANCH_CACHE`` or the user's cache folder, False for no cache. Rank 0's files count.
    memory: Lean(...) returns a ``LeanDataParallel`` instead, which is no DistributedDataParallel.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, memory: "Lean | None" = None, **options: Any) -> Any:
        """A DataParallel; with ``memory``, a short cut to ``LeanDataParallel``."""
        if memory is None:
            return super().__new__(cls)
        from anabranch.lean.parallel import LeanDataParallel  # only models under Lean load it

        return LeanDataParallel(module, *args, memory=memory, **options)  # type: ignore[arg-type]

    _alone = False  # one rank: gradients are already their own average
    _layout: DdpLayout | None = None

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        planner: str | Planner = "optimal",
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | None = None,
        lanes: int | None = None,
        nodes: GivenNodes = "auto",
        compress: Compress = None,
        profile_steps: int = 6,
        policy: TuningPolicy = DEFAULT_POLICY,
        cache: str | os.PathLike[str] | bool | None = None,
        memory: "Lean | None" = None,  # noqa: ARG002 - always None here: otherwise __new__ returns another class
        **options: Any,
    ) -> None:
        check_unwrapped(module, Tuned)
        compress = settings_of(compress)
        tuning = TuningOptions(planner, plan, network, lanes, profile_steps, cache=cache, policy=policy, nodes=nodes)
        given = _arguments_of_ddp(self, module, *args, **options)
        group = _group_of(given)
        reason = no_clone_reason(group) if group is not None else "there is no process group"  # DDP's own error
        reason = dtensor_reason(module, given["device_mesh"]) or python_reducer_reason() or reason
        needs_plan = tuning.plan is not None or keeps_residuals(compress)
        if group is not None and reason and needs_plan:
            instead = USE_A_TORCH_GROUP if no_clone_reason(group) else "Leave that argument out: DDP's own buckets run"
            what = "a plan" if tuning.plan is not None else f"compress={name_of(compress)}"
            raise ValueError(f"DataParallel with {what} cannot run here: {reason}. {instead}")
        settings = [described(compress), f"{policy}"]
        parts = _parts_of(module, given)

        def agree(options: TuningOptions) -> TuningOptions:  # must not refer to ``given``, which has this wrapper
            assert group is not None  # otherwise DDP's constructor has raised its own error
            return options.agreed(parts(), group, *settings, by_name=needs_plan)

        if not reason and given["init_sync"]:  # without it, ranks may construct at their own time
            tuning = agree(tuning)
            compress = None if tuning.turned_off else compress
        super().__init__(module, *args, **options)
        self._no_plan_reason = self._find_no_plan_reason(given, tuning, reason, keeps_residuals(compress))
        alone = _is_alone(self.process_group)
        runs_as_ddp = self.static_graph or _unplannable(given)  # the first step of a static graph must synchronise
        if alone and not runs_as_ddp:
            self.require_backward_grad_sync = False  # as under no_sync()
            self._alone = not self.device_ids  # with device_ids DDP's forward must move the inputs
        if not self._no_plan_reason:
            # Arguments of DDP that are numbers; groups and devices are in the key of a cached plan by other lines.
            # They need not be the same on all ranks (output_device), so they are not among the agreed settings.
            of_ddp = [f"DDP {name} {value}" for name, value in given.items() if isinstance(value, bool | int | float)]
            agree_later = None if given["init_sync"] else agree
            collectives, parameters = self._make_collectives(compress), reduced_parameters(self)
            self._graph_cutter = CompiledGraphs(parameters)
            key = [*settings, *of_ddp]
            self._start_tuning(tuning, collectives, parameters, lambda: DdpLayout(self), key, agree_later)
            return
        if alone:
            self._collectives = self._make_collectives(compress)
            replace(tuning, kinds=self._collectives.kinds).check_plan_fits(reduced_parameters(self), self._collectives)

    def _find_no_plan_reason(
        self, given: Mapping[str, Any], tuning: TuningOptions, reason: str, compressed: bool
    ) -> str:
        """Why there is nothing to plan here; empty if there is, or if a checkpoint may hold residuals to send."""
        if _is_alone(self.process_group):
            return "there is one rank, so nothing to send"
        if reason := reason or tuning.no_plan_reason:
            return reason
        if tuning.profile_steps == 0 and tuning.plan is None and not compressed:
            return "profile_steps is 0"
        if self.device_type == "cuda" and "nccl" not in dist.get_backend_config(self.process_group):
            return "its gradients are on a GPU and its process group has no NCCL"
        if self._has_sparse_gradients:
            return "an embedding has sparse gradients, which DDP sends by themselves"
        if used := _unplannable(given):
            return f"DDP's option {used[0]} changes how it communicates"
        return ""

    def _make_collectives(self, compress: Settings) -> Collectives:
        if keeps_residuals(compress) and self.find_unused_parameters and not self._no_plan_reason:
            raise ValueError(
                f"compress={name_of(compress)} with find_unused_parameters=True: DDP drops the averages of parameters "
                "that no rank used, and with them residuals that were sent: set find_unused_parameters=False (in "
                "Transformers' TrainingArguments ddp_find_unused_parameters=False), or leave compress out"
            )
        owner = weakref.ref(self)  # weak, so that a model that is not used any more is freed
        return collectives_for(
            compress,
            reduced_parameters(self),
            self.process_group,
            lambda: (ddp := owner()) is not None and (ddp._alone or ddp.require_backward_grad_sync),
            frozen={name: p for name, p in self.module.named_parameters() if not p.requires_grad},
        )

    def explain(self) -> str:
        """The plan, its predicted and measured gain, and the exposed time; or why there is no plan."""
        join = "\nInside join() nothing is planned, since ranks that have run out of inputs could not take part."
        return super().explain() + (join if self._inside_join else "")

    def share_momentum(self, optimizer: Optimizer) -> None:
        """With ``OkTopk(momentum=...)``: let an Adam, AdamW or SGD of torch have its own momentum, as it has for DDP.

        It then applies what arrives as velocities without momentum, and takes its own of all other gradients: of
        vectors, and of all while training warms up or DDP's own buckets run. Call it once, after both were made; a copy
        of the optimizer needs another call.
        """
        check_shareable(optimizer)
        collectives, owner = self._collectives, weakref.ref(self)
        if collectives is not None and any(map(collectives.residuals.sends_velocities, collectives.kinds)):
            share_momentum(optimizer, lambda: _velocities(owner()))

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._tuner is not None:
            self._release()
            self._graph_cutter.close()
        self._mark_closed()
        self._layout = None
        self._alone = False
        unwrap(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; with one rank, nothing else."""
        if self._alone:
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    # DDP's extension points.

    @_disable_dynamo
    def _before_forward(self, *inputs: Any, **kwargs: Any) -> None:
        if self._no_plan_reason == CLOSED:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        check_outermost(self)
        if self._tuner is not None and self._layout is not None:
            self._graph_cutter.install(self.module)
            if torch.is_grad_enabled():
                self._follow_scale()
            if torch.is_grad_enabled() and not self._inside_join:
                self._tuner.before_forward(self.require_backward_grad_sync, inputs, kwargs)
            self._layout.buffers.drain()  # after the step's first mark, so that this wait is measured

    @_disable_dynamo
    def _after_forward(self, output: Any) -> None:
        averaged = torch.is_grad_enabled() and self.require_backward_grad_sync and not self._inside_join
        if self._tuner is not None and self._layout is not None and averaged:
            if not self._layout.expect_reduction() and (converted := self._layout.converted()):
                log.warning("anabranch: %s", converted)
                self._stop_planning(converted)
                return
            self._tuner.runner.timer.forward_ended(output)

    def _before_comm_hook(self, name: str) -> None:
        if self._tuner is not None and self._layout is not None:
            self._layout.buffers.discard()
            self._layout.use(None)
            self._stop_planning(f"the comm hook {name} was registered")
        if dist.get_world_size(self.process_group) == 1:
            self.require_backward_grad_sync = True  # so that the hook runs
        self._alone = False

    def _stop_planning(self, reason: str) -> None:
        """Be a DDP with the buckets in force from now on."""
        assert self._tuner is not None
        self._tuner.search.stage = f"no longer planning: {reason}"
        self._release()
        self._tuner = None
        self._collectives = None
        self._layout = None
        self._graph_cutter = None
        self._no_plan_reason = reason

    def _install_buffers(self) -> bool:
        return self._layout is not None and self._layout.buffers.install()

    def _discard_buffers(self) -> None:
        if self._layout is not None:
            self._layout.buffers.discard()

    def _use_divisor(self, divisor: Callable[[], int] | None) -> bool:
        launcher = self._tuner.runner.launcher if self._tuner is not None else None
        if launcher is not None:
            launcher.divisor = divisor
        return launcher is not None

    def __getstate__(self) -> dict[str, Any]:
        attributes: dict[str, Any] = super().__getstate__()
        for name in ("_tuner", "_release", "_collectives", "_layout", "_scaler", "_graph_cutter"):
            attributes.pop(name, None)
        if self._tuner is not None:
            self._drop_comm_hooks(attributes)  # the plan's hook, which the copy does not have
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tuner = None
        self._no_plan_reason = "it is a copy"
        self._alone = False  # the copy may be in a process group of several ranks
        self.require_backward_grad_sync = True


def _velocities(model: DataParallel | None) -> list[nn.Parameter]:
    """The parameters whose gradients of the last step are averages of velocities."""
    tuner = model._tuner if model is not None else None
    if tuner is None or (plan := tuner.runner.plan_in_force) is None:
        return []
    sends_velocities = tuner.collectives.residuals.sends_velocities
    names = [name for bucket in plan.buckets if sends_velocities(bucket.collective) for name in bucket.names]
    return [tuner.runner.parameters[name] for name in names]


def _is_alone(group: dist.ProcessGroup) -> bool:
    """Whether there is one rank, for good: ranks may join a group in Python later (torchft)."""
    return group.size() == 1 and not is_in_python(group)


def _unplannable(given: Mapping[str, Any]) -> list[str]:
    return [name for name in UNPLANNABLE_OPTIONS if given.get(name) is not None]


def _arguments_of_ddp(*args: Any, **options: Any) -> Mapping[str, Any]:
    """The arguments of DDP's constructor by name, with its defaults."""
    try:
        bound = signature(DistributedDataParallel.__init__).bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"DataParallel() {error}: expected arguments of its own or of DDP") from None
    bound.apply_defaults()
    return bound.arguments


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """The process group that DDP uses with these arguments; None if there is none, which is DDP's own error."""
    mesh = arguments["device_mesh"]
    group = mesh.get_group(mesh_dim=0) if mesh is not None else arguments["process_group"] or dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


def _parts_of(module: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], dict[str, str]]:
    """Returns the parts of the module that DDP synchronises with these arguments (``model_parts``)."""
    sends_buffers = arguments["broadcast_buffers"] is not False or arguments.get("forward_sync_buffers") is not None
    return partial(model_parts, module, frozen=arguments["init_sync"], buffers=sends_buffers)
