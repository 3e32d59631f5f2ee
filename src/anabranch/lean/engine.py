"""Takes gradients from autograd, exchanges complete buckets, and updates their parameters, all inside backward.

A hook on each parameter takes its gradient. If the bucket travels sparsely, the gradient is added to the residual at
once and is freed. Else it stays until its bucket is complete, which then moves to a slot. The lane runs the exchange
and behind it the step of the bucket's optimizer; then the slot goes to the next bucket.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable

from anabranch.comm.collectives import Collectives
from anabranch.comm.launcher import BucketLauncher
from anabranch.lean.buckets import LiveBucket, UpdatingExchange
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.residuals import ResidualStore
from anabranch.lean.slots import SlotRing
from anabranch.lean.update import BucketUpdater


def in_backward() -> bool:
    """Whether a backward pass is running, so that a forward now is a recomputation that it has called."""
    return bool(torch._C._current_graph_task_id() >= 0)


class Engine:
    """Runs one plan on one model: hooks on its parameters, two slots, and an optimizer per bucket.

    launcher      starts the exchange of a bucket on its lane
    exchange      what the launcher runs; it is given the buckets
    averaging     whether this backward pass is to be averaged: under no_sync() gradients stay where autograd puts them
    find_unused   parameters without a gradient on this rank count as zeros, and those without one on any rank are left
                  alone; else a missing gradient is an error

    ``awaited``: a backward pass that is to be averaged has begun.
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
        find_unused: bool = False,
    ) -> None:
        self.steps_done = 0
        self.awaited = False
        self._launcher = launcher
        self._collectives = collectives
        self._updates = updates
        self._residuals = residuals
        self._averaging = averaging
        self._find_unused = find_unused
        optimizers.forget_buckets()
        self._buckets = [
            LiveBucket(bucket, own, optimizers.for_bucket(own), collectives.on_side_stream(bucket.collective))
            for bucket in launcher.plan.buckets
            if (own := [parameters[name] for name in bucket.names])
        ]
        exchange.buckets = {bucket.planned.names: bucket for bucket in self._buckets}
        self._slots = SlotRing([bucket.nbytes for bucket in self._buckets], next(iter(parameters.values())).device)
        residuals.allocate([bucket.nbytes for bucket in self._buckets if bucket.sparse])
        self._launched = 0  # buckets, in this backward pass
        self._begun = False  # a gradient of this backward pass has come
        self._expected = False  # a forward has made what will be averaged; other backward passes are the caller's own
        self._handles: list[Any] = [
            parameters[name].register_post_accumulate_grad_hook(partial(self._take, bucket, name))
            for bucket in self._buckets
            for name in bucket.planned.names
        ]

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self) -> None:
        """Raise if a backward pass was broken off: other ranks may be at another bucket."""
        if in_backward():
            return
        if self._begun:
            raise RuntimeError(
                f"a backward pass was broken off by an exception after {self._launched} of {len(self._buckets)} "
                "buckets, whose parameters are updated: close() this DataParallel, wrap again, and load a checkpoint"
            )
        self.awaited = False

    def on_forward_end(self) -> Callable[[], None]:
        """A forward whose gradients will be averaged has ended; what is returned is called when its backward begins."""
        self._expected = True
        return partial(self._backward_begins, self.steps_done)

    def applied(self, names: Collection[str]) -> list[str]:
        """Those of these parameters that the last backward pass has updated."""
        updated = [bucket for bucket in self._buckets if self._updates.was_applied(bucket.optimizer)]
        return [name for bucket in updated for name in bucket.planned.names if name in names]

    def _backward_begins(self, steps_done: int) -> None:
        """Have this backward pass end with ``_finish``; ``steps_done`` were done at its forward.

        It is queued here and not at the first gradient, which may come inside a part that reentrant checkpointing
        differentiates by itself: a callback queued there runs when that part is over.
        """
        if self._averaging():
            if steps_done != self.steps_done:
                raise RuntimeError(
                    f"backward through a forward that is {self.steps_done - steps_done} steps old: under Lean backward "
                    "updates the parameters, which that forward had used as they were; add losses up and call "
                    "backward() once, or use no_sync() for all forwards but the last"
                )
            self.awaited = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _take(self, bucket: LiveBucket, name: str, parameter: torch.Tensor) -> None:
        """A gradient was accumulated."""
        if not (self._expected and self._averaging()):
            return
        if not self._begun:
            self._begin()
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {name} is {parameter.grad.layout}, and Lean adds gradients up in place: expected a "
                "dense one, such as of an embedding with sparse=False"
            )
        if name in bucket.come:
            raise RuntimeError(
                f"the gradient of {name} came twice in one backward pass: reentrant checkpointing inside a shared part "
                "of the model cannot be run under Lean; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.come.add(name)
        bucket.add(name, cast(nn.Parameter, parameter))
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch()

    def _begin(self) -> None:
        """The first gradient of a backward pass."""
        self._begun = True
        if not self.awaited:
            Variable._execution_engine.queue_callback(self._finish)
        for bucket in self._buckets:
            bucket.expect()
            bucket.state = self._collectives.residual_state(bucket.planned)
            bucket.waiting = None if bucket.state is None else self._residuals.resident(bucket.state)

    def _launch(self) -> None:
        """Launch the next bucket on its lane."""
        bucket = self._buckets[self._launched]
        bucket.look_for_missing()
        if bucket.missing and not self._find_unused:
            raise RuntimeError(
                f"{bucket.missing[0]} got no gradient in this backward pass: expected one for every parameter that is "
                "not frozen, since each backward pass is a step. Add up losses, freeze it before wrapping, or pass "
                "find_unused_parameters=True to DataParallel: then what no rank has used is left alone"
            )
        self._launched += 1
        self._updates.launch_pending(keep=1)  # the slot that comes next is the one before the last
        slot = self._slots.acquire(bucket.numel, bucket.dtype)
        if bucket.state is None:
            bucket.move_to(slot.tensor)
        else:
            bucket.waiting = self._residuals.fetch(bucket.state)
            for name, parameter in zip(bucket.planned.names, bucket.parameters, strict=True):
                bucket.add(name, parameter)
        future = self._launcher.launch(self._launched - 1, slot.tensor)
        self._slots.release_after(slot, future)
        if bucket.state is not None:
            self._residuals.release_after(bucket.state, future)
        following = self._buckets[self._launched].state if self._launched < len(self._buckets) else None
        if following is not None:
            self._residuals.prefetch(following)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: launch the remaining buckets, with zeros for missing gradients, and wait for all."""
        self.awaited = False
        if not self._begun:  # autograd.grad(), which updates nothing; or another output of the same step
            return
        while self._launched < len(self._buckets):
            self._launch()
        self._slots.wait()
        self._updates.launch_pending()
        for bucket in self._buckets:
            bucket.come.clear()
        self._launched, self._begun, self._expected = 0, False, False
        self.steps_done += 1
