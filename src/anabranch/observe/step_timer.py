"""Watches the steps of a live model: forward, backward, end of communication, and every gradient when asked to."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd import Variable

from anabranch.ddp.reducer import tensors_in
from anabranch.observe.clock import Clock


@dataclass(slots=True)
class StepMarks:
    """Instants of one synchronised step; buckets are (index in the plan, launch, end), ready gradients by name."""

    forward: object
    backward: object | None = None
    computed: object | None = None  # backward is over
    averaged: object | None = None  # so is communication: backward() returns
    buckets: list[tuple[int, object, object]] = field(default_factory=list)
    ready: dict[str, object] = field(default_factory=dict)


class Observer(Protocol):
    """Someone who is shown every step."""

    def on_step_end(self, step: StepMarks) -> None:
        """The gradients of this step are averaged; its marks may not have settled. All ranks are there."""
        ...

    def close(self) -> None:
        """There will be no more steps."""
        ...


class StepTimer:
    """Marks each synchronised step, and calls ``after_step`` when its gradients are averaged: all ranks are there then.

    A hook on the output fires when backward begins; callbacks queued in the autograd engine run when it ends, ours
    first, then DDP's own that waits for communication, then the one that ours has queued. A pass that leaves ``seen``
    as it was is no step: autograd.grad() does not reach the reducer, and of several forwards with one backward only one
    counts. Ranks may differ in both.
    """

    def __init__(
        self, clock: Clock, after_step: Callable[[], None], seen: Callable[[], object] | None = None, keep: int = 64
    ) -> None:
        self.clock = clock
        self._seen, self._seen_before = seen, None if seen is None else seen()
        self.current: StepMarks | None = None  # between forward and the end of its backward
        self.observers: list[Observer] = []
        self.lookers = 0  # observers who want every bucket marked
        self._after_step = after_step
        self._steps: deque[StepMarks] = deque(maxlen=keep)

    def forward_begins(self) -> None:
        """To be called before a forward that will be differentiated and synchronised."""
        self.current = StepMarks(self.clock.mark())

    def forward_ended(self, output: object) -> None:
        """To be called with that forward's output."""
        step = self.current
        if step is None:
            return
        if self._seen is not None:
            self._seen_before = self._seen()

        def backward_begins(gradient: torch.Tensor) -> None:  # noqa: ARG001
            if step.backward is None:
                step.backward = self.clock.mark()
                Variable._execution_engine.queue_callback(lambda: self._computed(step))

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a leaf would keep its hooks for ever
                tensor.register_hook(backward_begins)

    def take(self, count: int) -> list[StepMarks]:
        """The last ``count`` steps, or as many as there are."""
        return list(self._steps)[-count:] if count else []

    def forget(self) -> None:
        """Steps so far were run under other conditions than those to come."""
        self._steps.clear()

    def close(self) -> None:
        """Tell observers that there will be no more steps."""
        observers, self.observers, self.lookers = self.observers, [], 0
        for observer in observers:
            observer.close()

    def _computed(self, step: StepMarks) -> None:
        step.computed = self.clock.mark()
        Variable._execution_engine.queue_callback(lambda: self._averaged(step))

    def _averaged(self, step: StepMarks) -> None:
        seen = self._seen() if self._seen is not None else object()
        if seen == self._seen_before:
            step.backward = None
            return
        self._seen_before = seen
        step.averaged = self.clock.mark()
        self._steps.append(step)
        if self.current is step:
            self.current = None
        for observer in list(self.observers):  # before anyone changes what the next step runs
            observer.on_step_end(step)
        self._after_step()
