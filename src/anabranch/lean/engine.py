"""The engine of Lean: takes gradients from autograd, exchanges buckets and updates parameters, all inside backward.

A hook on each parameter receives its gradient. In a sparse bucket the gradient is added to the residual at once and
freed. In a dense bucket it stays until the bucket is complete, which is then copied to a slot. The lane runs the
exchange and after it the step of the bucket's optimizer; then the slot is freed. Two buckets have one at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group, Scaler
from anabranch.exchange.model_parameters import trained_only
from anabranch.lean.bucket_update import BucketUpdater
from anabranch.lean.buckets import LiveBucket, Slots
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.options import Lean
from anabranch.lean.torch_patches import check_followed
from anabranch.lean.trained_model import TrainedModel, compare_frozen, trained_parameters
from anabranch.observe.step_timer import StepObserver
from anabranch.values.plan import Plan


def in_backward() -> bool:
    """Whether this is called inside a backward pass; a forward there is a recomputation of activations."""
    return bool(torch._C._current_graph_task_id() >= 0)


@dataclass
class PassState:
    """What wrapper and engine both know about the backward pass that runs, or comes next.

    averaging   whether it is averaged; under no_sync() gradients stay in ``parameter.grad``
    scaler      the loss scaler that the model follows
    """

    averaging: bool = True
    scaler: Scaler | None = None


class Engine(StepObserver):
    """Runs one plan at a time on one model; ``tuning.runner.Layout`` is the contract.

    default_plan   the buckets that run while there is no other plan
    find_unused    a gradient that is missing on this rank counts as zeros, and a parameter without a gradient on any
                   rank is not updated; if False, a missing gradient is an error

    ``averaged_backward_running``: a backward pass that will be averaged has begun.
    """

    default_label = "Lean's own buckets, of DDP's sizes"

    def __init__(
        self,
        module: nn.Module,
        lean: Lean,
        collectives: Collectives,
        updates: BucketUpdater,
        default_plan: Plan,
        current_pass: PassState,
        find_unused: bool,
    ) -> None:
        self.default_plan = default_plan
        self.residuals = collectives.residuals
        self.updates = updates
        self.steps_done = 0
        self._model = TrainedModel(module)
        self.parameters = self._model.parameters  # those that are updated in backward
        self.optimizers = BucketOptimizers(lean.optimizer, self.parameters)
        self._device = next(iter(self.parameters.values())).device
        self._pass = current_pass
        self._find_unused = find_unused
        self._on_averaged: Callable[[], None] | None = None
        self._handles: list[Any] = []
        self._drop_buckets()

    def _drop_buckets(self) -> None:
        """Drop the buckets of the plan in force, with their hooks, and all that is known of a backward pass."""
        while self._handles:
            self._handles.pop().remove()
        self._slots = Slots(self._device)
        self.buckets: list[LiveBucket] = []  # of the plan in force
        self._launcher: BucketLauncher | None = None
        self._launched = 0  # number of buckets launched in this backward pass
        # From the first gradient to the first bucket; dropped here with its message, before its group is destroyed.
        self._check_frozen: Callable[[], None] | None = None
        self._any_gradient_arrived = False  # in this backward pass
        # If False, a backward pass belongs to no forward of this model, and its gradients are left to the caller.
        self._averaged_forward_ended = False
        self.averaged_backward_running = False
        self.updates.forget_buckets()
        self.optimizers.forget_buckets()

    # Called by the runner of plans.

    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self._model.module)

    def report_averaged(self, callback: Callable[[], None]) -> None:
        self._on_averaged = callback

    def can_rebuild(self) -> bool:
        return True  # buckets are built of the parameters at wrapping; ``before_forward`` has checked them

    def may_change(self, averaged: bool) -> bool:  # noqa: ARG002 - buckets can be built before any forward
        return True

    def before_forward(self) -> None:
        """Raise if the last backward pass did not finish: other ranks may be at another bucket."""
        if not in_backward():
            if self._any_gradient_arrived:
                raise RuntimeError(
                    f"a backward pass was broken off by an exception after {self._launched} of {len(self.buckets)} "
                    "buckets, whose parameters are updated: close() this DataParallel, wrap again, and load a "
                    "checkpoint"
                )
            self.averaged_backward_running = False
        self._model.check()

    def use(self, launcher: BucketLauncher | None) -> None:
        assert launcher is not None  # there is a default plan
        self._drop_buckets()
        self._launcher = launcher
        try:
            with trained_only(self._model.module, self.parameters.values()):  # torch allows no hooks on what is frozen
                self.buckets = [
                    LiveBucket(bucket, own, self.optimizers.for_bucket(own))
                    for bucket in launcher.plan.buckets
                    if (own := [self.parameters[name] for name in bucket.names])
                ]
                for bucket in self.buckets:
                    for name, parameter in bucket.named:
                        hook = partial(self._on_gradient, bucket, name)
                        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        except BaseException:
            self._drop_buckets()
            raise

    def close(self) -> None:
        """Remove the hooks and free all memory; an output that the user keeps refers to this object."""
        self._drop_buckets()
        self.optimizers.close()

    # From the end of forward to the update of every bucket.

    def on_forward_end(self, averaged: bool) -> Callable[[], None]:
        if averaged:
            self._averaged_forward_ended = True
        return partial(self._backward_begins, averaged, self.steps_done)

    def _backward_begins(self, averaged: bool, steps_done: int) -> None:
        """Queue ``_finish`` for the end of this backward pass; ``steps_done`` is the number of steps at its forward.

        It is queued here and not at the first gradient, which may arrive inside a nested backward pass of reentrant
        checkpointing: a callback queued there would run at the end of the nested pass. A backward pass through several
        forwards is averaged if any of them was.
        """
        self._pass.averaging = averaged or (self._pass.averaging and self.averaged_backward_running)
        if not averaged or self._launcher is None:
            return
        check_followed(self._pass.scaler)
        if steps_done != self.steps_done:
            raise RuntimeError(
                f"backward through a forward that is {self.steps_done - steps_done} steps old: under Lean backward "
                "updates the parameters, so that forward used older values; add the losses and call backward() "
                "once, or use no_sync() for all forwards but the last"
            )
        self.averaged_backward_running = True
        Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _on_gradient(self, bucket: LiveBucket, name: str, parameter: torch.Tensor) -> None:
        """Receive a gradient that autograd has accumulated, and launch the buckets that are complete."""
        if not (self._averaged_forward_ended and self._pass.averaging):
            return
        if not self._any_gradient_arrived:
            self._first_gradient()
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {name} is {parameter.grad.layout}, and Lean adds gradients up in place: expected a "
                "dense gradient; create an embedding with sparse=False"
            )
        if name in bucket.arrived:
            raise RuntimeError(
                f"the gradient of {name} came twice in one backward pass: reentrant checkpointing inside a shared part "
                "of the model cannot be run under Lean; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.arrived.add(name)
        bucket.add_to_residual(name, cast(nn.Parameter, parameter))
        while self._launched < len(self.buckets) and self.buckets[self._launched].complete:
            self._launch()

    def _first_gradient(self) -> None:
        """Prepare all buckets when the first gradient of a backward pass arrives."""
        if not self.averaged_backward_running:
            check_followed(self._pass.scaler)
            Variable._execution_engine.queue_callback(self._finish)
        self._any_gradient_arrived = True
        self._check_frozen = compare_frozen(self.parameters, self._control)
        for bucket in self.buckets:
            bucket.begin_backward(self.residuals.of(bucket.planned))

    def _launch(self) -> None:
        """Launch the next bucket on its lane."""
        assert self._launcher is not None
        if self._check_frozen is not None:
            self._check_frozen()
            self._check_frozen = None
        bucket = self.buckets[self._launched]
        bucket.find_missing()
        if bucket.missing and not self._find_unused:
            raise RuntimeError(
                f"{bucket.missing[0]} got no gradient in this backward pass: expected one for every parameter that is "
                "not frozen, since each backward pass is a step. Add the losses, freeze it before wrapping, or pass "
                "find_unused_parameters=True to DataParallel: then a parameter that no rank has used is not updated"
            )
        self._launched += 1
        self.updates.launch_pending(keep=1)  # the slot that is freed next is that of the bucket before the last one
        residual = bucket.residual
        unpacks = residual is not None and residual.packed is not None
        kept = residual is None and self.updates.holds_updates
        slot = self._slots.acquire(bucket.numel, bucket.dtype, unpacks, kept)
        bucket.fill(slot)
        update = partial(self.updates.update, bucket, slot.tensor, self._used_here(bucket))
        slot.last_use = self._launcher.launch(self._launched - 1, slot.tensor, update)

    def _used_here(self, bucket: LiveBucket) -> torch.Tensor | None:
        """A number for each parameter of a bucket, 0 if this rank did not use it; None if no rank asks.

        A single rank knows already. Filled on the device: a copy from the host would make the host wait.
        """
        if not self._find_unused or not (bucket.missing or dist.get_world_size(self._control) > 1):
            return None
        used = torch.ones(len(bucket.parameters), device=self._device)
        for name in bucket.missing:
            used[bucket.planned.names.index(name)] = 0.0
        return used

    @torch.no_grad()
    def _finish(self) -> None:
        """Launch the remaining buckets at the end of backward, with zeros for missing gradients, and wait for all."""
        self.averaged_backward_running = False
        if not self._any_gradient_arrived:  # autograd.grad(), which updates nothing, or another output of this step
            return
        while self._launched < len(self.buckets):
            self._launch()
        self._slots.wait()
        self.updates.finish_step()
        self._slots.free()
        self._launched = 0
        self._any_gradient_arrived = False
        self._averaged_forward_ended = False
        self.steps_done += 1
        if self._on_averaged is not None:
            self._on_averaged()

    @property
    def _control(self) -> Group:
        """The group for small messages in host memory."""
        assert self._launcher is not None
        return self._launcher.lanes.control
