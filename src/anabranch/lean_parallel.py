"""LeanDataParallel: a wrapper of our own for less memory, since DDP's reducer keeps every gradient alive."""

import json
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch import planners
from anabranch.activations.policy import PROFILED_STEPS, ChoiceMessage, ManagedActivations
from anabranch.comm.agree import check_same, from_rank_0
from anabranch.comm.collectives import Scaler
from anabranch.comm.model import ignored_names
from anabranch.lean.engine import in_backward
from anabranch.lean.layout import LeanLayout, trained_parameters
from anabranch.lean.options import Lean, check_lean
from anabranch.network import Network
from anabranch.observe.step_timer import StepObserver
from anabranch.plan import Plan
from anabranch.sparse.exchanges import check_compress, collectives_for
from anabranch.sparse.options import OkTopk
from anabranch.trace import TensorSpec, Trace
from anabranch.tuning.options import Planner, TuningOptions
from anabranch.tuning.policy import DEFAULT_POLICY, TuningPolicy
from anabranch.tuning.tuned import Tuned
from anabranch.tuning.tuner import Tuner

BROADCAST_NBYTES = 250 << 20  # in one message, as DDP does
COPIED = "it is a copy"


class LeanDataParallel(Tuned, nn.Module):
    """Data-parallel training in which no gradient outlives its bucket's exchange.

    Every bucket is updated inside backward, by an optimizer of its own. ``optimizer`` stands for all of them, for
    learning-rate schedulers and checkpoints; its ``step()`` has nothing left to do. It is no DistributedDataParallel.

    memory: the settings, with the optimizer. The other arguments are those of ``DataParallel`` and, of
    DistributedDataParallel's, ``process_group``, ``broadcast_buffers`` and ``find_unused_parameters``.
    """

    _layout: LeanLayout
    _synchronised = True  # no no_sync() is open
    _averages = True  # nor was at the forward of this backward pass or, before it, at the last one

    def __init__(
        self,
        module: nn.Module,
        *unnamed: Any,
        memory: Lean,
        compress: str | OkTopk | None = None,
        planner: str | Planner = "optimal",
        plan: Plan | str | os.PathLike[str] | None = None,
        network: Network | None = None,
        lanes: int | None = None,
        profile_steps: int = 10,
        policy: TuningPolicy = DEFAULT_POLICY,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        if unnamed or others:
            raise ValueError(
                f"DataParallel under Lean was given {', '.join(others) or 'device_ids'}: it is no "
                "DistributedDataParallel, and of its arguments takes process_group, broadcast_buffers and "
                "find_unused_parameters, by name; leave the others out, and move inputs to the model's device"
            )
        check_compress(compress)
        check_lean(memory)
        if isinstance(compress, OkTopk) and compress.momentum:
            raise ValueError(
                f"OkTopk momentum is {compress.momentum}, and under Lean gradients are added to the residual as they "
                "come: expected 0; leave momentum to the optimizer"
            )
        tuning = TuningOptions(planner, plan, network, lanes, profile_steps)
        group = process_group or dist.group.WORLD
        of_ddp = f"find_unused_parameters {find_unused_parameters}, broadcast_buffers {broadcast_buffers}"
        tuning.check_agreed(module, group, f"compress {compress}", *memory.described(), of_ddp)
        assert group is not None
        tuning = tuning.with_plan_loaded(group)
        self.module, self.memory, self.process_group = module, memory, group
        self._broadcast_buffers, self._buffers_differ = broadcast_buffers, False
        alone = dist.get_world_size(group) == 1
        self.find_unused_parameters = find_unused_parameters or alone  # which needs nobody else's word
        parameters = _checked(module)
        with torch.no_grad():
            self._from_rank_0([*_shared(module.named_parameters(), module), *_shared(module.named_buffers(), module)])
        if alone and plan is None:
            tuning = replace(tuning, profile_steps=0)
        self._activations = ManagedActivations(module, memory.activations)
        self._undo = weakref.finalize(self, self._activations.undo)
        self._undo.atexit = False  # there is no one left to use the module
        try:
            self._start_engine(tuning, policy, compress, parameters)
            check_same("Lean's optimizer", self._layout.optimizers.described(), group)
        except BaseException:
            self.close()
            self._undo()
            raise

    def _start_engine(
        self,
        tuning: TuningOptions,
        policy: TuningPolicy,
        compress: str | OkTopk | None,
        parameters: dict[str, nn.Parameter],
    ) -> None:
        owner = weakref.ref(self)  # a dropped model must be able to go

        def averaging() -> bool:
            own = owner()
            return own is not None and own._averages

        def applied(names: Collection[str]) -> Collection[str]:
            own = owner()
            return own._layout.applied(names) if own is not None else ()

        collectives = collectives_for(compress, parameters, self.process_group, averaging, applied)
        plan, find_unused = ddp_sized_plan(parameters), self.find_unused_parameters

        def make_layout(control: dist.ProcessGroup) -> LeanLayout:  # noqa: ARG001 - Lean needs no small messages
            self._layout = LeanLayout(self.module, self.memory, collectives, plan, averaging, find_unused)
            return self._layout

        name = type(self.module).__name__
        tuner = self._start_tuning(tuning, policy, collectives, parameters, make_layout, name)
        tuner.runner.timer.observers += [_AveragingFollower(owner), self._layout]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """All buckets' optimizers as one, for schedulers and checkpoints."""
        return self.layout.optimizers.user_optimizer

    @property
    def skipped(self) -> int:
        """Updates of buckets that were skipped because a gradient was not finite on some rank."""
        return self.layout.updates.skipped()

    def explain(self) -> str:
        """The plan, what it was predicted to gain and did gain, what is exposed; or why there is no plan."""
        if self._tuner is None:
            return f"No plan: {self._idle}. It trains nothing: wrap the module again."
        with suppress(RuntimeError):  # a lane has failed, and has said so where it was waited for
            self.layout.residuals.synchronize()
        return super().explain()

    def comm_state_dict(self) -> dict[str, Any]:
        """What this rank must keep in a checkpoint beside the model: its residuals; {} without ``OkTopk``."""
        if self._tuner is not None:
            self.layout.residuals.synchronize()  # it may be on its way to host memory
        return super().comm_state_dict()

    def clip_grad_norm_(self, *_: Any, **__: Any) -> None:
        """Refuse: there are no gradients to clip between two steps."""
        why = "every bucket was updated in backward, before the norm over all gradients was known"
        raise RuntimeError(f"clip_grad_norm_() under Lean: {why}. Use Lean(clip_norm=...), which clips each bucket")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in here only add up, where autograd puts them: they live until the next average."""
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; its gradients will be averaged, and its parameters updated, in backward."""
        will_average = torch.is_grad_enabled() and self._synchronised
        self._before_forward(will_average)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._after_forward(output, will_average)
        return output

    def follow(self, scaler: Scaler) -> None:
        """Let updates and residuals follow this GradScaler; call it on every rank, and once.

        ``scaler.scale(loss).backward()`` is all that is left to do: before the next forward the scale falls if an
        update was skipped, and rises after its interval of steps without, by the scaler's own factors.
        ``scaler.step()`` and ``scaler.update()`` are for gradients that live until then: do not call them.
        """
        self._good_steps, self._seen = 0, self._so_far()
        super().follow(scaler)

    def _follow_scale(self) -> None:
        scaler = self._scaler
        if isinstance(scaler, torch.amp.GradScaler) and self._seen != (now := self._so_far()):
            (_, skipped), self._seen = self._seen, now
            self._good_steps = self._good_steps + 1 if skipped == now[1] else 0
            if self._good_steps == 0:
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            elif self._good_steps == scaler.get_growth_interval():
                self._good_steps = 0
                grown = scaler.get_scale() * scaler.get_growth_factor()
                if grown < torch.finfo(torch.float32).max:  # as torch: it stays where it cannot grow
                    scaler.update(grown)
        if scaler is not None and self.layout.updates.loss_scale != (scale := float(scaler.get_scale())):
            self.layout.updates.loss_scale = scale
            self.layout.residuals.synchronize()
        super()._follow_scale()

    def _so_far(self) -> tuple[int, int]:
        """Steps made, and updates left out."""
        return (self._tuner.steps_done if self._tuner is not None else 0), self.skipped

    @_disable_dynamo
    def _before_forward(self, will_average: bool) -> None:
        if self._idle == COPIED and not torch.is_grad_enabled():
            return
        tuner = self._running_tuner()
        if torch.is_grad_enabled():
            if not in_backward():
                self._averages = self._synchronised
                self._follow_scale()  # in the first forward after a step: all that adds up until the next has one scale
            tuner.before_forward(averaged=self._synchronised)
        if will_average and tuner.steps_done >= PROFILED_STEPS:  # which all ranks have made, whatever else they did
            self._activations.choose(partial(_as_rank_0, self.process_group))
        if self._broadcast_buffers and (will_average or self._buffers_differ):
            with torch.no_grad():
                self._from_rank_0(_shared(self.module.named_buffers(), self.module))
        self._buffers_differ = will_average  # after it, as far as they are statistics

    @_disable_dynamo
    def _after_forward(self, output: Any, averaged: bool) -> None:
        self._running_tuner().after_forward(output, averaged)

    def _backward_begins(self, averaged: bool) -> None:
        """A gradient has reached an output whose forward was, or was not, to be averaged.

        Of several forwards in one backward pass, any that is to be averaged decides.
        """
        if self._tuner is not None:
            self._averages = averaged or (self._averages and self.layout.awaited)

    @property
    def layout(self) -> LeanLayout:
        """What runs the buckets; RuntimeError after close() and in a copy."""
        self._running_tuner()
        return self._layout

    def _running_tuner(self) -> Tuner:
        if self._tuner is None and self._idle == COPIED:
            raise RuntimeError(
                "this is a copy of a DataParallel under Lean: it computes under torch.no_grad() and has no engine to "
                "train with; to train it, wrap the module in it: DataParallel(copy.module, memory=...), on all ranks"
            )
        if self._tuner is None:
            raise RuntimeError("this DataParallel was closed: wrap the module again")
        return self._tuner

    def _from_rank_0(self, tensors: list[torch.Tensor]) -> None:
        if tensors and dist.get_world_size(self.process_group) > 1:
            dist._broadcast_coalesced(self.process_group, tensors, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Release hooks, groups and threads; the module can be wrapped again. The wrapper cannot be used afterwards."""
        if self._tuner is not None:
            self._release()
            self._undo()
        self._mark_closed()

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy: everything but what runs the buckets. The copied module is as before it was wrapped."""
        mode = self.memory.activations.mode
        if self._tuner is not None and mode in ("offload", "auto"):
            raise RuntimeError(
                f"a DataParallel under Lean with Activations mode {mode!r} cannot be copied, since its module is tied "
                "to host memory: copy the module before it is wrapped, and load this one's state_dict()"
            )
        own = ("_tuner", "_collectives", "_layout", "_scaler", "_release", "_undo", "process_group")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._idle, self._synchronised = COPIED, True
        self._activations.undo()  # the copy's


class _AveragingFollower(StepObserver):
    """Tells a LeanDataParallel, before the engine asks, whether the backward pass that begins is to be averaged."""

    def __init__(self, owner: "weakref.ref[LeanDataParallel]") -> None:
        self._owner = owner

    def on_forward_end(self, averaged: bool) -> Callable[[], None]:
        def backward_begins() -> None:
            owner = self._owner()
            if owner is not None:
                owner._backward_begins(averaged)

        return backward_begins


def _as_rank_0(group: dist.ProcessGroup, message: ChoiceMessage) -> ChoiceMessage:
    """Rank 0's choice for activations: ranks must recompute alike where a block communicates."""
    agreed: ChoiceMessage = json.loads(from_rank_0(json.dumps(message).encode(), group))
    return agreed


def _shared(named: Iterable[tuple[str, torch.Tensor]], module: nn.Module) -> list[torch.Tensor]:
    """Those that are the same on all ranks; DDP leaves some to each rank."""
    ignored = ignored_names(module)
    return [tensor for name, tensor in named if name not in ignored]


def _checked(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters it trains; ValueError if the engine cannot train this module."""
    parameters = trained_parameters(module)
    if not parameters:
        raise ValueError("no parameter of this module requires a gradient: nothing to train")
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0]} has sparse gradients, and Lean adds gradients up in place: make it with sparse=False"
        )
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ValueError(f"the parameters are on {', '.join(map(str, devices))}: expected one device that computes")
    return parameters


def ddp_sized_plan(parameters: dict[str, nn.Parameter]) -> Plan:
    """The buckets that DDP would make: by size, from the last parameter to the first, one dtype each."""
    backwards = list(reversed(parameters.items()))
    tensors = [
        TensorSpec(name, p.numel(), p.element_size(), index * 1e-6, str(p.dtype).removeprefix("torch."))
        for index, (name, p) in enumerate(backwards)
    ]
    return planners.by_bytes(Trace(tuple(tensors), 0.0), Network.ring(2, 1e-4, 1e-9))
