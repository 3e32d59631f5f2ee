"""The step timer: the only code that hooks a model's output and gradients to time its steps; others subscribe.

A model has one timer, its tuner's. While activations are profiled it has a second one, because activations/ works
without a tuner.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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

    forward: object  # the start of forward
    backward: object | None = None  # the first gradient of the output: forward and loss are over
    computed: object | None = None  # backward is over
    averaged: object | None = None  # communication is over, too: backward() returns
    buckets: list[tuple[int, object, object]] = field(default_factory=list)
    ready: dict[str, object] = field(default_factory=dict)


class StepObserver:
    """Callbacks for the steps of a model. Override those you need."""

    def on_forward_end(self, averaged: bool) -> Callable[[], None] | None:  # noqa: ARG002
        """Called when a forward that will be differentiated has ended; ``averaged``: its gradients will be averaged.

        May return a callback. It is called for each output tensor of this forward that gets a gradient.
        """
        return None

    def on_step_end(self, step: StepMarks) -> None:
        """Called when the gradients of this step are averaged, on every rank; its marks may not have settled."""

    def close(self) -> None:
        """Called when there will be no more steps."""


class StepTimer:
    """Marks each averaged step. When its gradients are averaged, calls the observers and then ``after_step``.

    Every rank calls them at the same point of its step, so they may communicate. A hook on the output fires when
    backward begins. Callbacks queued in the autograd engine run when it ends: first the timer's, then DDP's own, which
    waits for communication, then a second one of the timer. A backward pass that does not change ``progress()`` is not
    a step: autograd.grad() does not reach the reducer, and of several forwards with one backward only one counts. Ranks
    may differ in both.
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
        self.output_is_opaque = False  # no tensor with a gradient was found in the last output
        self._steps: deque[StepMarks] = deque(maxlen=keep)
        self._bucket_timings = 0  # how many contexts of bucket_timing() are open

    # Called by the wrapper that runs the model.

    def forward_begins(self) -> None:
        """Call this before a forward whose gradients will be averaged."""
        self._current = self._last = StepMarks(self.clock.mark())

    def forward_ended(self, output: object, averaged: bool = True) -> None:
        """Call this with the output of a forward that will be differentiated."""
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
        self.output_is_opaque = not tensors
        if step is not None and not tensors:
            step.backward = self.clock.mark()  # the output hides its tensors: this is the best estimate

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """A context in which every differentiated forward of ``module`` is timed, for a module without a wrapper."""

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

    # Called by observers.

    @contextmanager
    def bucket_timing(self) -> Iterator[None]:
        """A context in which the launch and the end of each bucket are marked."""
        self._bucket_timings += 1
        try:
            yield
        finally:
            self._bucket_timings -= 1

    @contextmanager
    def gradient_timing(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """A context in which a mark is taken when this rank has computed each of these gradients."""
        with ExitStack() as hooks:
            for name, parameter in parameters.items():
                if parameter.requires_grad:  # it may have been frozen since the model was wrapped
                    handle = parameter.register_post_accumulate_grad_hook(self._gradient_marker(name))
                    hooks.callback(handle.remove)
            yield

    def mark_bucket(self, index: int) -> Callable[[list[dist.Work]], None] | None:
        """Mark the launch of a bucket. The returned function marks its end; None if buckets are not timed now."""
        step = self._current
        if step is None or not self._bucket_timings:
            return None
        launched = self.clock.mark()
        return lambda works: step.buckets.append((index, launched, self.clock.mark_end(launched, works)))

    def last_steps(self, count: int) -> list[StepMarks]:
        """The last ``count`` steps, or as many as there are."""
        return list(self._steps)[-count:] if count else []

    def forget_steps(self) -> None:
        """Drop the steps so far: they were run under other conditions than the next ones."""
        self._steps.clear()

    def close(self) -> None:
        """Close the observers: there will be no more steps. An observer may call it while a step ends."""
        self._after_step = None
        observers = self.observers
        self.observers = []
        for observer in observers:
            observer.close()

    # Called by autograd.

    def _backward_begins(self, step: StepMarks) -> None:
        if step.backward is None:
            step.backward = self.clock.mark()
            Variable._execution_engine.queue_callback(lambda: self._backward_ended(step))

    def _gradient_marker(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:  # noqa: ARG001
            step = self._last
            if step is None or name in step.ready:
                return
            # No hook on an opaque output has queued this callback. Under a tuner such steps are not counted at all: its
            # schedule would advance only while gradients are timed.
            if self.output_is_opaque and self._progress is None and not step.ready:
                Variable._execution_engine.queue_callback(lambda: self._backward_ended(step))
            step.ready[name] = self.clock.mark()

        return ready

    def _backward_ended(self, step: StepMarks) -> None:
        step.computed = self.clock.mark()
        Variable._execution_engine.queue_callback(lambda: self._gradients_averaged(step))

    def _gradients_averaged(self, step: StepMarks) -> None:
        progress = self._progress() if self._progress is not None else object()
        if progress == self._progress_before:
            step.backward = None
            return
        self._progress_before = progress
        step.averaged = self.clock.mark()
        self._steps.append(step)
        if self._current is step:
            self._current = None
        for observer in list(self.observers):  # before after_step() may change the plan
            if observer in self.observers:  # it may have been closed by another
                observer.on_step_end(step)
        if self._after_step is not None:
            self._after_step()


def tensors_in(output: object) -> list[torch.Tensor]:
    """The tensors in a model's output: in lists, tuples, dicts and dataclasses, at any depth."""
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
