"""The engine of Lean: takes gradients from autograd, exchanges buckets and updates parameters, all inside backward.

A hook on each parameter receives its gradient. In a sparse bucket the gradient is added to the residual at once and
freed. In a dense bucket it stays until the bucket is complete, which is then copied to a slot. The lane runs the
exchange and after it the step of the bucket's optimizer; then the slot is freed. Two buckets have one at a time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.launcher import BucketLauncher
from anabranch.lean.buckets import LiveBucket, UpdatingExchange
from anabranch.lean.frozen import FrozenAgreement
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.residuals import ResidualStore
from anabranch.lean.slots import FreshSlots
from anabranch.lean.update import BucketUpdater


def in_backward() -> bool:
    """Whether this is called inside a backward pass; a forward there is a recomputation of activations."""
    return bool(torch._C._current_graph_task_id() >= 0)


class Engine:
    """Runs one plan on one model: hooks on its parameters, slots, and an optimizer per bucket.

    launcher      starts the exchange of a bucket on its lane
    exchange      what the launcher runs around an exchange
    averaging     whether this backward pass is averaged; under no_sync() gradients stay in ``parameter.grad``
    frozen        compares between ranks which parameters are frozen
    check_pass    called when an averaged backward pass begins; raises if it must not update anything
    find_unused   a gradient that is missing on this rank counts as zeros, and a parameter without a gradient on any
                  rank is not updated; if False, a missing gradient is an error
    on_averaged   called inside backward when all buckets of a step are averaged

    ``averaged_backward_running``: a backward pass that will be averaged has begun.
    """

    def __init__(
        self,
        launcher: BucketLauncher,
        exchange: UpdatingExchange,
        collectives: Collectives,
        parameters: Mapping[str, nn.Parameter],
        optimizers: BucketOptimizers,
        updates: BucketUpdater,
        residuals: ResidualStore,
        averaging: Callable[[], bool],
        frozen: FrozenAgreement,
        check_pass: Callable[[], None],
        find_unused: bool = False,
        on_averaged: Callable[[], None] | None = None,
    ) -> None:
        self.steps_done = 0
        self.averaged_backward_running = False
        self._launcher = launcher
        self._collectives = collectives
        self._updates = updates
        self._residuals = residuals
        self._averaging = averaging
        self._frozen = frozen
        self._check_pass = check_pass
        self._find_unused = find_unused
        self._on_averaged = on_averaged
        optimizers.forget_buckets()
        self._buckets = [
            LiveBucket(bucket, own, optimizers.for_bucket(own))
            for bucket in launcher.plan.buckets
            if (own := [parameters[name] for name in bucket.names])
        ]
        self._exchange = exchange
        kept = [bucket for bucket in self._buckets if collectives.residuals.keeps(bucket.planned.collective)]
        device = next(iter(parameters.values())).device
        self._slots = FreshSlots(device)
        self._dense_slots = FreshSlots(device, at_once=None) if updates.holds_updates else self._slots
        self._residual_nbytes = [bucket.numel * torch.float32.itemsize for bucket in kept]
        residuals.allocate(self._residual_nbytes)
        self._launched = 0  # number of buckets launched in this backward pass
        self._any_gradient_arrived = False  # in this backward pass
        # If False, a backward pass belongs to no forward of this model, and its gradients are left to the caller.
        self._averaged_forward_ended = False
        self._handles: list[Any] = []
        try:
            for bucket in self._buckets:
                for name, parameter in zip(bucket.planned.names, bucket.parameters, strict=True):
                    hook = partial(self._on_gradient, bucket, name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        except BaseException:
            self.close()
            raise

    @property
    def buckets(self) -> Sequence[LiveBucket]:
        """The buckets of the plan."""
        return self._buckets

    def use_residuals(self, residuals: ResidualStore) -> None:
        """Take residuals from this store from the next step on."""
        self._residuals = residuals
        residuals.allocate(self._residual_nbytes)

    def close(self) -> None:
        """Remove the hooks and free all memory. Call it once, since the engine is unusable afterwards."""
        while self._handles:
            self._handles.pop().remove()
        # An output that the user keeps refers to the engine.
        del self._buckets, self._slots, self._dense_slots, self._residuals, self._launcher, self._collectives

    def before_forward(self) -> None:
        """Raise if the last backward pass did not finish: other ranks may be at another bucket."""
        if in_backward():
            return
        if self._any_gradient_arrived:
            raise RuntimeError(
                f"a backward pass was broken off by an exception after {self._launched} of {len(self._buckets)} "
                "buckets, whose parameters are updated: close() this DataParallel, wrap again, and load a checkpoint"
            )
        self.averaged_backward_running = False

    def on_forward_end(self) -> Callable[[], None]:
        """Call this after a forward whose gradients will be averaged; call the result when its backward begins."""
        self._averaged_forward_ended = True
        return partial(self._backward_begins, self.steps_done)

    def applied(self, names: Collection[str]) -> list[str]:
        """Those of these parameters that the last backward pass has updated."""
        updated = [bucket for bucket in self._buckets if self._updates.was_applied(bucket.optimizer)]
        return [name for bucket in updated for name in bucket.planned.names if name in names]

    def _backward_begins(self, steps_done: int) -> None:
        """Queue ``_finish`` for the end of this backward pass; ``steps_done`` is the number of steps at its forward.

        It is queued here and not at the first gradient, which may arrive inside a nested backward pass of reentrant
        checkpointing: a callback queued there would run at the end of the nested pass.
        """
        if self._averaging():
            self._check_pass()
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
        if not (self._averaged_forward_ended and self._averaging()):
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
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch()

    def _first_gradient(self) -> None:
        """Prepare all buckets when the first gradient of a backward pass arrives."""
        if not self.averaged_backward_running:
            self._check_pass()
            Variable._execution_engine.queue_callback(self._finish)
        self._any_gradient_arrived = True
        self._frozen.begin()
        for bucket in self._buckets:
            bucket.begin_backward()
            bucket.state = self._collectives.residuals.of(bucket.planned)
            bucket.residual_views = None if bucket.state is None else self._residuals.resident(bucket.state)
            if bucket.state is not None and bucket.state.held.keys() != bucket.frozen:
                self._residuals.synchronize()
                bucket.state.hold(bucket.frozen)

    def _launch(self) -> None:
        """Launch the next bucket on its lane."""
        if self._launched == 0:
            self._frozen.check()
        bucket = self._buckets[self._launched]
        bucket.find_missing()
        if bucket.missing and not self._find_unused:
            raise RuntimeError(
                f"{bucket.missing[0]} got no gradient in this backward pass: expected one for every parameter that is "
                "not frozen, since each backward pass is a step. Add the losses, freeze it before wrapping, or pass "
                "find_unused_parameters=True to DataParallel: then a parameter that no rank has used is not updated"
            )
        self._launched += 1
        self._updates.launch_pending(keep=1)  # the slot that is freed next is that of the bucket before the last one
        slots = self._dense_slots if bucket.state is None else self._slots
        slot = slots.acquire(bucket.numel, bucket.dtype)
        if bucket.state is None:
            bucket.flatten_into(slot.tensor)
        else:
            bucket.residual_views = self._residuals.fetch(bucket.state)
            for name, parameter in zip(bucket.planned.names, bucket.parameters, strict=True):
                bucket.add_to_residual(name, parameter)
        around = partial(self._exchange.around, bucket, slot.tensor)
        future = self._launcher.launch(self._launched - 1, slot.tensor, around)
        slots.release_after(slot, future)
        if bucket.state is not None:
            self._residuals.release_after(bucket.state, future)
        following = self._buckets[self._launched].state if self._launched < len(self._buckets) else None
        if following is not None:
            self._residuals.prefetch(following)

    @torch.no_grad()
    def _finish(self) -> None:
        """Launch the remaining buckets at the end of backward, with zeros for missing gradients, and wait for all."""
        self.averaged_backward_running = False
        if not self._any_gradient_arrived:  # autograd.grad(), which updates nothing, or another output of this step
            return
        while self._launched < len(self._buckets):
            self._launch()
        self._slots.wait()
        self._dense_slots.wait()
        refusal = self._updates.finish_step()
        self._slots.free()
        self._dense_slots.free()
        self._residuals.end_step()
        for bucket in self._buckets:
            bucket.arrived.clear()
        self._launched = 0
        self._any_gradient_arrived = False
        self._averaged_forward_ended = False
        self.steps_done += 1
        if self._on_averaged is not None:
            self._on_averaged()
        if refusal is not None:
            raise refusal
