"""The step timer: the one place that hooks a model's output and gradients to see where a step is; others subscribe."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from anabranch.observe.clock import Clock


@dataclass(slots=True)
class StepMarks:
    """Instants of one step, as marks of the timer's clock.

    buckets   (index in the plan, launch, end) of each bucket, where buckets are timed
    ready     when each gradient was ready, by name and in order, where gradients are timed
    """

    forward: object
    backward: object | None = None  # the first gradient of the output: forward and loss are over
    computed: object | None = None  # backward is over
    averaged: object | None = None  # communication is over, too: backward() returns
    buckets: list[tuple[int, object, object]] = field(default_factory=list)
    ready: dict[str, object] = field(default_factory=dict)


class StepObserver:
    """Callbacks for the steps of a model. Override those you need."""

    def on_forward_end(self, averaged: bool) -> Callable[[], None] | None:  # noqa: ARG002
        """A forward that will be differentiated has ended; ``averaged``: its gradients will be averaged.

        What is returned is called for each of its output tensors that gets a gradient.
        """
        return None

    def on_step_end(self, step: StepMarks) -> None:
        """The gradients of this step are averaged; its marks may not have settled. All ranks are there."""

    def close(self) -> None:
        """There will be no more steps."""


class StepTimer:
    """Marks each averaged step, and calls ``after_step`` when its gradients are averaged: all ranks are there then.

    A hook on the output fires when backward begins. Callbacks queued in the autograd engine run when it ends: ours
    first, then DDP's own, which waits for communication, then the one that ours has queued. A backward pass that leaves
    ``progress()`` as it was is no step: autograd.grad() does not reach the reducer, and of several forwards with one
    backward only one counts. Ranks may differ in both.
    """

    def __init__(
        self,
        clock: Clock,
        after_step: Callable[[], None] | None = None,
        progress: Callable[[], object] | None = None,
        keep: int = 64,
    ) -> None:
        self.clock = clock
        self.observers: list[StepObserver] = []
        self._after_step = after_step
        self._progress = progress
        self._progress_before = None if progress is None else progress()
        self._current: StepMarks | None = None  # between a forward and the end of its backward
        self._last: StepMarks | None = None  # of the last forward: gradients may come in several backward passes
        self._last_output_is_opaque = False
        self._steps: deque[StepMarks] = deque(maxlen=keep)
        self._bucket_timings = 0  # how many want buckets timed now

    # What whoever runs the model calls.

    def forward_begins(self) -> None:
        """To be called before a forward whose gradients will be averaged."""
        self._current = self._last = StepMarks(self.clock.mark())

    def forward_ended(self, output: object, averaged: bool = True) -> None:
        """To be called with the output of a forward that will be differentiated."""
        step = self._current if averaged else None
        if step is not None and self._progress is not None:
            self._progress_before = self._progress()
        callbacks = [callback for observer in self.observers if (callback := observer.on_forward_end(averaged))]

        def on_gradient(gradient: torch.Tensor) -> None:  # noqa: ARG001
            if step is not None:
                self._backward_begins(step)
            for callback in callbacks:
                callback()

        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]  # leaves keep their hooks
        if step is not None or callbacks:
            for tensor in tensors:
                tensor.register_hook(on_gradient)
        self._last_output_is_opaque = not tensors
        if step is not None and not tensors:
            step.backward = self.clock.mark()  # an output we cannot look into: the best that is known

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Watch every forward of ``module`` that will be differentiated, where nobody else calls the timer."""

        def before(_module: nn.Module, _args: object) -> None:
            if torch.is_grad_enabled():
                self.forward_begins()

        def after(_module: nn.Module, _args: object, output: object) -> None:
            if torch.is_grad_enabled():
                self.forward_ended(output)

        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # What observers ask for.

    @contextmanager
    def bucket_timing(self) -> Iterator[None]:
        """Mark when each bucket is launched and done, until this is left."""
        self._bucket_timings += 1
        try:
            yield
        finally:
            self._bucket_timings -= 1

    @contextmanager
    def gradient_timing(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Mark when this rank has computed each of these gradients, until this is left."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_marker(name))
            for name, parameter in parameters.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mark_bucket(self, index: int) -> Callable[[list[dist.Work]], None] | None:
        """Mark the launch of a bucket; what is returned marks its end. None while no one has buckets timed."""
        step = self._current
        if step is None or not self._bucket_timings:
            return None
        launched = self.clock.mark()
        return lambda works: step.buckets.append((index, launched, self.clock.mark_end(launched, works)))

    def last_steps(self, count: int) -> list[StepMarks]:
        """The last ``count`` steps, or as many as there are."""
        return list(self._steps)[-count:] if count else []

    def forget_steps(self) -> None:
        """Drop the steps so far: they were run under other conditions than those to come."""
        self._steps.clear()

    def close(self) -> None:
        """Tell observers that there will be no more steps."""
        observers, self.observers = self.observers, []
        for observer in observers:
            observer.close()

    # What autograd calls.

    def _backward_begins(self, step: StepMarks) -> None:
        if step.backward is None:
            step.backward = self.clock.mark()
            Variable._execution_engine.queue_callback(lambda: self._computed(step))

    def _gradient_marker(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:  # noqa: ARG001
            step = self._last
            if step is None or name in step.ready:
                return
            if self._last_output_is_opaque and not step.ready:  # no hook on the output will see this backward end
                Variable._execution_engine.queue_callback(lambda: self._computed(step))
            step.ready[name] = self.clock.mark()

        return ready

    def _computed(self, step: StepMarks) -> None:
        step.computed = self.clock.mark()
        Variable._execution_engine.queue_callback(lambda: self._averaged(step))

    def _averaged(self, step: StepMarks) -> None:
        progress = self._progress() if self._progress is not None else object()
        if progress == self._progress_before:
            step.backward = None
            return
        self._progress_before = progress
        step.averaged = self.clock.mark()
        self._steps.append(step)
        if self._current is step:
            self._current = None
        for observer in list(self.observers):  # before anyone changes what the next step runs
            observer.on_step_end(step)
        if self._after_step is not None:
            self._after_step()


def tensors_in(output: object) -> list[torch.Tensor]:
    """The tensors in whatever a model returned: in lists, tuples, dicts and dataclasses, at any depth."""
    return list(_tensors(output))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, one.name) for one in fields(value)]
    else:
        return
    for part in parts:
        yield from _tensors(part)
