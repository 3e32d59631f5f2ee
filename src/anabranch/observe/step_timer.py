"""The step timer: the only code that hooks a model's output and gradients to time its steps; others subscribe.

A model has one timer, its tuner's. While activations are profiled it has a second one, because activations/ works
without a tuner.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from anabranch.observe.clock import Clock
from anabranch.values.plan import Plan, bucket_label
from anabranch.values.timeline import COMPUTE, Span, Timeline, inside_track, lane_track

KEPT_STEPS = 64
STAGES = ("scatter", "", "gather")  # of a two-level exchange; the one between nodes is what other exchanges are


@dataclass(slots=True)
class StepMarks:
    """Instants of one step, as marks of the timer's clock.

    buckets   (index in the plan, launch, ends of its stages) of each bucket, where buckets are timed
    ready     when each gradient was ready, by name and in order, where gradients are timed
    """

    forward: object  # the start of forward
    backward: object | None = None  # the first gradient of the output: forward and loss are over
    computed: object | None = None  # backward is over
    averaged: object | None = None  # communication is over, too: backward() returns
    buckets: list[tuple[int, object, list[object]]] = field(default_factory=list)
    ready: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step that is running, or that ends now.

    number            the first step of a training is 1; with a loaded ``comm_state_dict`` counting continues
    plan              the plan that this step runs; None under DDP's own buckets
    stage             what the tuner is doing, in words
    predicted_s       the simulator's prediction for this plan; None before there is a trace and a network
    communication_s   communication time in a trial of this plan; None if there was none
    """

    number: int
    plan: Plan | None
    stage: str
    predicted_s: float | None
    communication_s: float | None


CurrentStep = Callable[[], StepContext]


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

    The owner of the gradients calls ``gradients_averaged`` once per step, in backward; the step ends with that pass.
    This happens equally often on every rank, so observers may communicate. Hooks on the output only take times: a
    rank's loss may use other outputs than another's, or none. A module that is ``attached`` has no such owner: there
    each backward pass through its output ends a step.

    ``steps_done`` counts averaged steps.
    """

    def __init__(self, clock: Clock, after_step: Callable[[], None] | None = None) -> None:
        self.clock = clock
        self.observers: list[StepObserver] = []
        self.steps_done = 0
        self._after_step = after_step
        self._attached = False
        self._current: StepMarks | None = None  # between a forward and the end of its backward
        self._last: StepMarks | None = None  # of the last forward: gradients may come in several backward passes
        self._averaged = False  # gradients were averaged in the backward pass that is running
        # Weak: a backward pass that fails drops its callbacks, and must not be waited for.
        self._pass_end: weakref.ref[_PassEnd] | None = None
        self._steps: deque[StepMarks] = deque(maxlen=KEPT_STEPS)
        self._bucket_timings = 0  # how many contexts of bucket_timing() are open
        self._silent_steps = 0  # how many of the next steps are ended without after_step()

    # Called by the wrapper that runs the model.

    def forward_begins(self) -> None:
        """Call this before a forward whose gradients will be averaged."""
        self._current = self._last = StepMarks(self.clock.mark())

    def forward_ended(self, output: object, averaged: bool = True) -> None:
        """Call this with the output of a forward that will be differentiated."""
        if self._is_coarse:
            return
        step = self._current if averaged else None
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
        if step is not None and not tensors:
            step.backward = self.clock.mark()  # the output hides its tensors: this is the best estimate

    def gradients_averaged(self) -> None:
        """Call this in backward when the gradients of a step are averaged: the step ends with that backward pass."""
        running = self._running_pass()
        if running is None:  # this step is timed coarsely, or its loss uses no output that has a hook
            step = self._last or StepMarks(self.clock.mark())
            if self._is_coarse:
                self._end(step)
                return
            self._queue_end(step)
        self._averaged = True

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """A context in which every differentiated forward of ``module`` is timed, for a module without a wrapper."""

        @_disable_dynamo
        def before(_module: nn.Module, _args: object) -> None:
            if torch.is_grad_enabled():
                self.forward_begins()

        @_disable_dynamo
        def after(_module: nn.Module, _args: object, output: object) -> None:
            if torch.is_grad_enabled():
                self.forward_ended(output)

        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        self._attached = True
        try:
            yield
        finally:
            self._attached = False
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

    def call_after(self, steps: int) -> None:
        """Call ``after_step`` once, at the end of the last of the next ``steps`` steps.

        The others are timed coarsely, their begin and end only, unless there are observers: where a step takes a few
        milliseconds, all marks together take a percent of it.
        """
        self._silent_steps = steps - 1

    def mark_bucket(self, index: int) -> Callable[[list[dist.Work], bool], None] | None:
        """Mark the launch of a bucket. The returned function marks the end of each stage, given its works and whether
        it is the last one; None if buckets are not timed now.
        """
        step = self._current
        if step is None or not self._bucket_timings:
            return None
        launched, ends = self.clock.mark(), list[object]()

        def stage_over(works: list[dist.Work], is_last: bool) -> None:
            if not works and not ends:  # an empty bucket, of which nothing is sent
                return
            ends.append(self.clock.mark_end(launched, works) if works else ends[-1])  # a share may be empty
            if is_last:
                step.buckets.append((index, launched, ends))

        return stage_over

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
        running = self._running_pass()
        if step.averaged is None and (running is None or running.graph_task != torch._C._current_graph_task_id()):
            step.backward = self.clock.mark()
            self._queue_end(step)

    def _gradient_marker(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:  # noqa: ARG001
            step = self._last
            if step is None or name in step.ready:
                return
            if self._attached and self._running_pass() is None:  # the output hides its tensors
                self._queue_end(step)
            mark = step.ready[name] = self.clock.mark()
            if step.backward is None:
                step.backward = mark

        return ready

    def _running_pass(self) -> "_PassEnd | None":
        return self._pass_end() if self._pass_end is not None else None

    def _queue_end(self, step: StepMarks) -> None:
        end = _PassEnd(self, step)
        self._pass_end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def _pass_ended(self, step: StepMarks) -> None:
        self._pass_end = None
        if not (self._averaged or self._attached):
            return  # autograd.grad(), or other parts of the loss will follow
        self._averaged = False
        if step.backward is None:
            step.backward = step.computed
        self._end(step)

    @property
    def _is_coarse(self) -> bool:
        return self._silent_steps > 0 and not self.observers

    def _end(self, step: StepMarks) -> None:
        step.averaged = self.clock.mark()
        self._steps.append(step)
        if self._current is step:
            self._current = None
        for observer in list(self.observers):  # before after_step() may change the plan
            if observer in self.observers:  # it may have been closed by another
                observer.on_step_end(step)
        self.steps_done += 1
        if self._silent_steps > 0:
            self._silent_steps -= 1
        elif self._after_step is not None:
            self._after_step()


class _PassEnd:
    """Called at the end of a backward pass, and again after DDP's own callback, which waits for communication.

    And once more, after the callback that this one queues: it calls ``gradients_averaged``.
    """

    __slots__ = ("__weakref__", "_calls", "_step", "_timer", "graph_task")

    def __init__(self, timer: StepTimer, step: StepMarks) -> None:
        self.graph_task = torch._C._current_graph_task_id()
        self._timer = timer
        self._step = step
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 1 and self._step.averaged is None:
            self._step.computed = self._timer.clock.mark()
        if self._calls == 3:
            self._timer._pass_ended(self._step)
        else:
            Variable._execution_engine.queue_callback(self)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in a model's output: in lists, tuples, dicts and dataclasses, at any depth."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, one.name) for one in fields(output)]
    return [tensor for part in parts for tensor in tensors_in(part)]


class BucketTimes(NamedTuple):
    """When a stage of bucket ``number`` of a plan could begin, began (its turn had come) and ended, in one step.

    stage   "scatter" or "gather" for those inside nodes; else empty, and ``launched_s`` is when the bucket was launched
            or, in a two-level exchange, scattered
    """

    number: int
    stage: str
    launched_s: float
    begin_s: float
    end_s: float


def bucket_times(step: StepMarks, plan: Plan, clock: Clock, origin: object) -> Iterator[BucketTimes]:
    """The times of buckets whose ends were observed, in launch order; seconds count from the mark ``origin``."""
    free_s: dict[tuple[int, str], float] = {}
    for index, launched, ends in sorted(step.buckets, key=lambda item: item[0]):
        lane = plan.buckets[index].lane
        observed_s = [clock.elapsed_to_end_s(origin, end) for end in ends]
        if None in observed_s:  # then the launch may have no time yet, either
            continue
        launched_s = clock.elapsed_s(origin, launched)
        for stage, observed in zip(STAGES if len(ends) > 1 else ("",), observed_s, strict=True):
            assert observed is not None  # none is
            end_s = max(launched_s, observed)
            begin_s = min(max(launched_s, free_s.get((lane, stage), -inf)), end_s)
            yield BucketTimes(index, stage, launched_s, begin_s, end_s)
            launched_s = free_s[lane, stage] = end_s


def timeline_of(step: StepMarks, plan: Plan | None, clock: Clock) -> Timeline:
    """The timeline of a measured step. Without a plan only the exposed communication is known, not its buckets."""

    def at(mark: object) -> float:
        return clock.elapsed_s(step.backward, mark)

    computed_s = max(0.0, at(step.computed))
    spans = [Span(COMPUTE, "forward", min(0.0, at(step.forward)), 0.0), Span(COMPUTE, "backward", 0.0, computed_s)]
    if plan is None:
        spans.append(Span("lane 0", "exposed communication", computed_s, max(computed_s, at(step.averaged))))
    else:
        for times in bucket_times(step, plan, clock, step.backward):
            bucket = plan.buckets[times.number]
            label = bucket_label(times.number, bucket.collective, bucket.names)
            if times.stage:
                spans.append(Span(inside_track(bucket.lane), f"{label}, {times.stage}", times.begin_s, times.end_s))
            else:
                spans.append(Span(lane_track(bucket.lane), label, times.begin_s, times.end_s))
    return Timeline(tuple(spans), {"source": "measured"})
