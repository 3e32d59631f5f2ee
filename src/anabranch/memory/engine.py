"""The life of gradients under Lean: from their backward to their exchange, and to the update of their parameters.

Autograd hands over a gradient, and the hook on its parameter takes it. Where its bucket travels sparsely, it is added
to what waits, at once, and is gone. Else it stays until its bucket is complete, which then moves to a slot. The lane
runs the exchange and right behind it the step of the bucket's optimizer; then the slot goes to the next bucket.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.futures import Future

from anabranch.memory.optimizers import BucketOptimizer, BucketOptimizers
from anabranch.memory.residual import Residuals
from anabranch.memory.slots import Slots
from anabranch.memory.update import Updates
from anabranch.plan import Bucket
from anabranch.runtime.collectives import Collectives, Remembered
from anabranch.runtime.dense import Group, Steps, all_finite, hold
from anabranch.runtime.hook import PlanHook
from anabranch.runtime.layout import tensors_in
from anabranch.sparse.leftovers import shaped


@dataclass
class LiveBucket:
    """One bucket of the plan in force, and how far it has come in this backward pass.

    ``state`` is what its exchange remembers, None if it travels dense; ``waiting`` what gradients are added to as they
    come, None if they stay where they are until the bucket is complete. ``finite``: whether all that were added so far
    were, on this rank; those that were not are left out.
    """

    planned: Bucket
    parameters: Sequence[nn.Parameter]
    optimizer: BucketOptimizer
    sparse: bool
    state: Remembered | None = None
    waiting: Mapping[str, torch.Tensor] | None = None
    finite: torch.Tensor | None = None
    come: set[str] = field(default_factory=set)

    @property
    def numel(self) -> int:
        """Elements of all its gradients."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of all its gradients."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """Of all its gradients."""
        return self.numel * self.dtype.itemsize

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to what waits, and take it away; a gradient that is not finite is left out."""
        if self.waiting is None or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad.detach(), None
        finite = all_finite(gradient)
        shaped(self.waiting[name], parameter).add_(gradient.masked_fill_(~finite, 0.0))
        self.finite = finite if self.finite is None else self.finite.logical_and_(finite)

    def move_to(self, slot: torch.Tensor) -> None:
        """Move all gradients to a slot, one after another; those that did not come are zeros."""
        for parameter, piece in zip(self.parameters, slot.split([p.numel() for p in self.parameters]), strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                shaped(piece, parameter).copy_(parameter.grad)
                parameter.grad = None


class SlotBucket(NamedTuple):
    """A slot as the hook of plans wants to see it."""

    slot: torch.Tensor

    def buffer(self) -> torch.Tensor:
        """See ``GradBucket``."""
        return self.slot


class Updating:
    """The collectives of a model, each with the update of its bucket behind it."""

    def __init__(self, collectives: Collectives, updates: Updates, residuals: Residuals) -> None:
        self._collectives, self._updates, self._residuals = collectives, updates, residuals
        self.buckets: Mapping[tuple[str, ...], LiveBucket] = {}

    def aside(self, kind: str) -> bool:
        """See ``Collectives``."""
        return self._collectives.aside(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """See ``Collectives``."""
        live = self.buckets[bucket.names]
        exchange = self._collectives.steps(bucket, buffer, group, divisor)
        if live.state is not None:
            exchange = self._around(exchange, live.state, buffer, live.finite)
            live.finite = None
        return self._updates.after(exchange, buffer, live.optimizer)

    def _around(self, exchange: Steps, state: Remembered, buffer: torch.Tensor, finite: torch.Tensor | None) -> Steps:
        """Gradients have been added to what waits, so there are none in the slot; it tells whether they were finite."""
        buffer.zero_()
        if finite is not None:
            hold(finite)
            buffer[0] = torch.where(finite, 0.0, float("inf"))
        yield from exchange
        self._residuals.put_back(state)


class Engine:
    """Runs one plan on one model: hooks on its parameters, two slots, and an optimizer per bucket.

    ``hook`` launches a bucket on its lane; ``averaging`` says whether this backward pass is to be averaged: under
    no_sync() gradients stay where autograd puts them.
    """

    def __init__(
        self,
        hook: Callable[[Collectives], PlanHook],
        collectives: Collectives,
        parameters: Mapping[str, nn.Parameter],
        optimizers: BucketOptimizers,
        updates: Updates,
        residuals: Residuals,
        averaging: Callable[[], bool],
    ) -> None:
        self.steps_done = 0
        self._collectives, self._updates, self._averaging = collectives, updates, averaging
        self._residuals = residuals
        updating = Updating(collectives, updates, residuals)
        self.hook = hook(cast(Collectives, updating))
        optimizers.forget()
        self._buckets = [
            LiveBucket(bucket, own, optimizers.over(own), collectives.aside(bucket.collective))
            for bucket in self.hook.plan.buckets
            if (own := [parameters[name] for name in bucket.names])
        ]
        updating.buckets = {bucket.planned.names: bucket for bucket in self._buckets}
        self._slots = Slots([bucket.nbytes for bucket in self._buckets], next(iter(parameters.values())).device)
        residuals.lay_out([bucket.nbytes for bucket in self._buckets if bucket.sparse])
        self._launched, self._begun, self._awaited = 0, False, False
        self._handles: list[Any] = [
            parameters[name].register_post_accumulate_grad_hook(partial(self._take, bucket, name))
            for bucket in self._buckets
            for name in bucket.planned.names
        ]

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self) -> None:
        """Refuse to go on where a backward pass was broken off: other ranks may stand at another bucket."""
        if torch._C._current_graph_task_id() >= 0:  # a forward that backward itself has called, to compute it again
            return
        if self._begun:
            raise RuntimeError(
                f"a backward pass was broken off by an exception after {self._launched} of {len(self._buckets)} "
                "buckets, whose parameters are updated: close() this DataParallel, wrap again, and load a checkpoint"
            )
        self._awaited = False

    def after_forward(self, output: object) -> None:
        """Have the backward pass of this output end with ``_finish``.

        The first gradient may come inside a part that reentrant checkpointing differentiates by itself, and a callback
        that is queued there runs when that part is over.
        """
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._await)

    def applied(self, names: Collection[str]) -> list[str]:
        """Those of these parameters that the last backward pass has updated."""
        updated = [bucket for bucket in self._buckets if self._updates.applied(bucket.optimizer)]
        return [name for bucket in updated for name in bucket.planned.names if name in names]

    def _await(self, gradient: torch.Tensor) -> None:  # noqa: ARG002
        if self._averaging():
            self._awaited = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _take(self, bucket: LiveBucket, name: str, parameter: torch.Tensor) -> None:
        """A gradient has come."""
        if not self._averaging():
            return
        if not self._begun:
            self._begin()
        if name in bucket.come:
            raise RuntimeError(
                f"the gradient of {name} came twice in one backward pass: reentrant checkpointing inside a shared part "
                "of the model cannot be run under Lean; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.come.add(name)
        bucket.add(name, cast(nn.Parameter, parameter))
        while self._launched < len(self._buckets) and self._complete(self._buckets[self._launched]):
            self._launch()

    def _begin(self) -> None:
        """The first gradient of a backward pass."""
        self._begun = True
        if not self._awaited:
            Variable._execution_engine.queue_callback(self._finish)
        for bucket in self._buckets:
            bucket.state = self._collectives.remembered(bucket.planned)
            bucket.waiting = None if bucket.state is None else self._residuals.at_hand(bucket.state)

    @staticmethod
    def _complete(bucket: LiveBucket) -> bool:
        return len(bucket.come) == len(bucket.parameters)

    def _launch(self) -> None:
        """Hand the next bucket to its lane."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._updates.settle(keep=1)  # the slot that comes next is the one before the last
        slot = self._slots.take(bucket.numel, bucket.dtype)
        if bucket.state is None:
            bucket.move_to(slot.tensor)
        else:
            bucket.waiting = self._residuals.fetch(bucket.state)
            for name, parameter in zip(bucket.planned.names, bucket.parameters, strict=True):
                bucket.add(name, parameter)
        future: Future[torch.Tensor] = self.hook.run(None, SlotBucket(slot.tensor))  # type: ignore[arg-type]
        self._slots.lend(slot, future)
        if bucket.state is not None:
            self._residuals.lend(bucket.state, future)
        following = self._buckets[self._launched].state if self._launched < len(self._buckets) else None
        if following is not None:
            self._residuals.prefetch(following)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: launch what is left, gradients that did not come being zeros, and wait for all."""
        self._awaited = False
        if not self._begun:  # autograd.grad(), which updates nothing; or another output of the same step
            return
        while self._launched < len(self._buckets):
            self._launch()
        self._slots.settle()
        self._updates.settle()
        for bucket in self._buckets:
            bucket.come.clear()
        self._launched, self._begun = 0, False
        self.steps_done += 1
