"""The layout in force on a model under Lean: an engine with the plan's buckets, or with those that DDP would make."""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import nn

from anabranch import planners
from anabranch.comm.collectives import Collectives
from anabranch.ddp.hook import PlanHook
from anabranch.ddp.layout import DdpLayout
from anabranch.lean.engine import Engine
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.residuals import DeviceResiduals, HostResiduals, ResidualStore
from anabranch.lean.update import BucketUpdater
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.trace import TensorSpec, Trace


class LeanLayout(DdpLayout):
    """As ``DdpLayout``, with an engine of our own in the place of DDP's reducer."""

    stock = "Lean's own buckets, of DDP's sizes"

    def __init__(
        self, parallel: Any, control: dist.ProcessGroup, after_step: Callable[[], None], collectives: Collectives
    ) -> None:
        self._engine: Engine | None = None
        self._steps_done = 0  # by engines that are no more
        super().__init__(parallel, control, after_step, collectives)
        memory = parallel.memory
        self.optimizers = BucketOptimizers(memory.optimizer, self.parameters)
        self.updates = BucketUpdater(memory.clip_norm)
        in_host_memory = memory.residuals == "host"
        self.residuals: ResidualStore = HostResiduals(self.device) if in_host_memory else DeviceResiduals()
        averaging = weakref.WeakMethod(parallel.averaging)  # a dropped model must be able to go
        self._averaging = lambda: (now := averaging()) is not None and bool(now())
        self._find_unused = bool(parallel.find_unused_parameters)
        self._stock_plan = as_ddp(self.parameters)
        self._kinds = {name: _kind(parameter) for name, parameter in self.parameters.items()}
        self._glance = ModuleFingerprint(parallel.module)
        self.lanes.grow(1)
        self._lay_out(None)

    def close(self) -> None:
        """See ``DdpLayout``."""
        if self._engine is not None:
            self._engine.close()
        super().close()

    def before_forward(self, averaged: bool) -> None:
        """See ``DdpLayout``."""
        self.lanes.check()  # says more of what broke a backward pass off
        if self._engine is not None:
            self._engine.before_forward()
        if not self._glance.unchanged():
            self._check_trained()
            self._glance = ModuleFingerprint(self.ddp.module)
        super().before_forward(averaged)

    def _check_trained(self) -> None:
        """Refuse a model that is not the one that was wrapped; what was frozen since then is welcome."""
        for name, parameter in self.trained_now().items():
            if (was := self._kinds.get(name, now := _kind(parameter))) != now:
                raise RuntimeError(
                    f"{name} is {now} and was {was} when the model was wrapped: expected the same, since what was laid "
                    "out for it is; convert or move the model before DataParallel, or close() this and wrap it again"
                )
            if self.parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"{name} was unfrozen, added or replaced after the model was wrapped, and no optimizer of Lean's "
                    "has it: close() this DataParallel and wrap the module again"
                )

    @property
    def awaited(self) -> bool:
        """Whether a backward pass that is to be averaged has begun."""
        return self._engine is not None and self._engine.awaited

    def after_forward(self, output: object) -> None:
        """A forward whose gradients will be averaged has returned, behind the watch's own mark."""
        if self._engine is not None:
            self._engine.after_forward(output)

    def want(self, plan: Plan | None) -> None:
        """See ``DdpLayout``."""
        self.residuals.synchronize()  # what the new plan does not send is taken out of the old buckets
        super().want(plan)

    def applied(self, names: Collection[str]) -> Collection[str]:
        """Those of these parameters that the last backward pass has updated."""
        return self._engine.applied(names) if self._engine is not None else ()

    def trained_now(self) -> dict[str, nn.Parameter]:
        """See ``DdpLayout``."""
        return trained(self.ddp.module)

    def _seen(self) -> object:
        return self._steps_done + (self._engine.steps_done if self._engine is not None else 0)

    def _lay_out(self, plan: Plan | None) -> None:
        self.watch.forget()
        wanted = plan if plan is not None else self._stock_plan
        if self._engine is not None:
            if self._engine.hook.plan == wanted:
                return
            self._steps_done += self._engine.steps_done
            self._engine.close()

        def hook(collectives: Collectives) -> PlanHook:
            return PlanHook(wanted, self.lanes, self.watch, lambda _lane: None, collectives, self.agree)

        self.updates.forget_buckets()
        self._engine = None  # the old slots go before the new ones come
        self._engine = Engine(
            hook, self._collectives, self.parameters, self.optimizers, self.updates, self.residuals, self._averaging,
            self._find_unused,
        )  # fmt: skip
        self.hook = self._engine.hook if plan is not None else None


class ModuleFingerprint:
    """What a module is made of: compared before every forward, in half the time of a walk through its names."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [table for part in module.modules() for table in (part._parameters, part._modules)]
        self._parameters = list(module.parameters())
        self._held = [
            held for table in self._tables for held in table.values()
        ]  # an id is whose it is while that lives
        self._was = self._now()

    def unchanged(self) -> bool:
        """Whether it has the same parts and parameters, of the same dtype, device and strides, and as frozen."""
        return self._now() == self._was

    def _now(self) -> tuple[list[int], list[object]]:
        return [id(held) for table in self._tables for held in table.values()], [
            (parameter.dtype, parameter.device, parameter.requires_grad, parameter.stride())
            for parameter in self._parameters
        ]


def _kind(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} on {parameter.device} with strides {parameter.stride()}"


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; shared ones once; not those that DDP would ignore."""
    own_affair = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in own_affair}


def as_ddp(parameters: dict[str, nn.Parameter]) -> Plan:
    """The buckets that DDP would make: by size, from the last parameter to the first, one dtype each."""
    backwards = list(reversed(parameters.items()))
    tensors = [
        TensorSpec(name, p.numel(), p.element_size(), index * 1e-6, str(p.dtype).removeprefix("torch."))
        for index, (name, p) in enumerate(backwards)
    ]
    return planners.by_bytes(Trace(tuple(tensors), 0.0), Network.ring(2, 1e-4, 1e-9))
