"""The bucket layout of a model under Lean: an engine for the buckets of each plan, or for buckets of DDP's sizes."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.contracts import Group
from anabranch.exchange.launcher import BucketLauncher
from anabranch.exchange.parameters import ignored_names, trained_only
from anabranch.lean.buckets import LiveBucket, UpdatingExchange
from anabranch.lean.engine import Engine
from anabranch.lean.frozen import FrozenAgreement
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.options import Lean
from anabranch.lean.residuals import DeviceResiduals, HostResiduals, ResidualStore, RoundedResiduals
from anabranch.lean.update import BucketUpdater
from anabranch.observe.step_timer import StepObserver
from anabranch.planning.memory import ResidualPlacement
from anabranch.values.plan import Plan


class LeanLayout(StepObserver):
    """The bucket layout of one model under Lean; ``tuning.runner.Layout`` is the contract.

    averaging     whether this backward pass is averaged
    control       returns the group for small messages in host memory
    check_pass    as in ``Engine``
    find_unused   as in ``Engine``
    """

    default_label = "Lean's own buckets, of DDP's sizes"

    def __init__(
        self,
        module: nn.Module,
        lean: Lean,
        collectives: Collectives,
        default_plan: Plan,
        averaging: Callable[[], bool],
        control: Callable[[], Group],
        check_pass: Callable[[], None],
        find_unused: bool,
    ) -> None:
        self.default_plan = default_plan
        self._module = module
        self._parameters = trained_parameters(module)
        device = next(iter(self._parameters.values())).device
        self.optimizers = BucketOptimizers(lean.optimizer, self._parameters)
        self.updates = BucketUpdater(lean.clipping, list(self._parameters.values()), lean.clip_value)
        self._device = device
        self.residuals = _store_for(lean.first_residuals, device)
        self.exchange = UpdatingExchange(self.updates, self.residuals, find_unused)
        self._collectives = collectives
        self._averaging = averaging
        self._frozen = FrozenAgreement(self._parameters, control)
        self._check_pass = check_pass
        self._find_unused = find_unused
        self._memory_formats = {name: _memory_format(parameter) for name, parameter in self._parameters.items()}
        self._fingerprint = ModuleFingerprint(module)
        self._engine: Engine | None = None
        self._on_averaged: Callable[[], None] | None = None

    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self._module)

    def report_averaged(self, callback: Callable[[], None]) -> None:
        self._on_averaged = callback

    def can_rebuild(self) -> bool:
        return True  # engines are built of the parameters at wrapping; ``before_forward`` has checked them

    def may_change(self, averaged: bool) -> bool:  # noqa: ARG002 - an engine can start before any forward
        return True

    def before_forward(self) -> None:
        if self._engine is not None:
            self._engine.before_forward()
        if not self._fingerprint.unchanged():
            self._check_trained()
            self._fingerprint = ModuleFingerprint(self._module)

    def before_change(self) -> None:
        self.residuals.synchronize()  # residuals that the new plan sends dense are read from the old buckets

    def use(self, launcher: BucketLauncher | None) -> None:
        if self._engine is not None:
            self._engine.close()
        self.updates.forget_buckets()
        self._engine = None  # frees the old slots before the new ones are allocated
        assert launcher is not None  # there is a default plan
        with trained_only(self._module, self._parameters.values()):  # torch allows no hooks on what is frozen
            self._engine = Engine(
                launcher, self.exchange, self._collectives, self._parameters, self.optimizers, self.updates,
                self.residuals, self._averaging, self._frozen, self._check_pass, self._find_unused,
                self._on_averaged,
            )  # fmt: skip

    def use_residuals(self, how: ResidualPlacement) -> None:
        """Store residuals so from the next step on."""
        assert self._engine is not None
        self.residuals.synchronize()
        self.residuals = self.exchange.residuals = _store_for(how, self._device)
        self._engine.use_residuals(self.residuals)
        self._collectives.residuals.store_as(how, self.residuals.resident)

    def buckets(self) -> Sequence[LiveBucket]:
        """The buckets of the plan in force."""
        return self._engine.buckets if self._engine is not None else ()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._frozen.close()
        self.updates.forget_buckets()
        self.optimizers.close()
        self.residuals = self.exchange.residuals = DeviceResiduals()  # frees the slots of residuals in host memory

    def on_forward_end(self, averaged: bool) -> Callable[[], None] | None:
        return self._engine.on_forward_end() if averaged and self._engine is not None else None

    def parameters(self) -> Collection[nn.Parameter]:
        """The parameters that are updated in backward."""
        return self._parameters.values()

    @property
    def averaged_backward_running(self) -> bool:
        """Whether a backward pass that will be averaged has begun."""
        return self._engine is not None and self._engine.averaged_backward_running

    def applied(self, names: Collection[str]) -> Collection[str]:
        """Those of these parameters that the last backward pass has updated."""
        return self._engine.applied(names) if self._engine is not None else ()

    def _check_trained(self) -> None:
        """Raise if parameters were added, replaced, unfrozen or converted after wrapping; freezing is allowed."""
        for name, parameter in self.trained().items():
            if (was := self._memory_formats.get(name, now := _memory_format(parameter))) != now:
                raise RuntimeError(
                    f"{name} is {now} and was {was} when the model was wrapped: expected the same, since its bucket "
                    "was built for that; convert or move the model before wrapping it, or close() this DataParallel "
                    "and wrap the module again"
                )
            if self._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"{name} was unfrozen, added or replaced after the model was wrapped, and is in no optimizer of "
                    "Lean: close() this DataParallel and wrap the module again"
                )


class ModuleFingerprint:
    """The parts and parameters of a module, compared before every forward; faster than a walk over all names."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [table for part in module.modules() for table in (part._parameters, part._modules)]
        self._parameters = list(module.parameters())
        self._kept_alive = [part for table in self._tables for part in table.values()]  # so that no id is reused
        self._before = self._now()

    def unchanged(self) -> bool:
        """Whether the module has the same parts and parameters, with the same dtype, device, strides and freezing."""
        return self._now() == self._before

    def _now(self) -> tuple[list[int], list[object]]:
        return [id(part) for table in self._tables for part in table.values()], [
            (parameter.dtype, parameter.device, parameter.requires_grad, parameter.stride())
            for parameter in self._parameters
        ]


def _store_for(how: ResidualPlacement, device: torch.device) -> ResidualStore:
    if how == "in place":
        return DeviceResiduals()
    return HostResiduals(device) if how == "host" else RoundedResiduals(device)


def _memory_format(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} on {parameter.device} with strides {parameter.stride()}"


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; shared ones once; without those that DDP ignores."""
    ignored = ignored_names(module)
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}
