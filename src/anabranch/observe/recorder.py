"""Records a Trace of a live model: when each gradient is ready. Does not wait for the device while the model runs."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Self

import numpy as np
import torch
from torch import nn

from anabranch.observe.clock import clock_for
from anabranch.observe.environment import machine_facts
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer
from anabranch.values.checks import Scalar
from anabranch.values.trace import TensorSpec, Trace


def record(
    model: nn.Module,
    step: Callable[[], object],
    steps: int = 20,
    warmup: int = 5,
    meta: Mapping[str, Scalar] | None = None,
) -> Trace:
    """The trace of ``model`` over ``steps`` calls of ``step``, after ``warmup`` calls that are not counted.

    ``step`` runs one forward and one backward of ``model``. Anything else it does (optimizer, data) is not recorded.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup {warmup}: expected at least 1 and 0")
    for _ in range(warmup):
        step()
    parameters = dict(model.named_parameters())
    timer = StepTimer(clock_for(next(iter(parameters.values()), torch.empty(0)).device))
    with Recorder(timer, parameters) as recorder, timer.attached(model):
        for _ in range(steps):
            step()
    trace = recorder.trace(meta)
    if note := order_note(trace):
        warnings.warn(note, stacklevel=2)
    return trace


def order_note(trace: Trace) -> str:
    """A sentence if gradients came in another order from step to step; else empty."""
    if (name := trace.meta.get("order_changed_at")) is None:
        return ""
    return (
        f"gradients became ready in another order from step to step, first at {name}: "
        "a plan made from this trace may wait for gradients that come late"
    )


class Recorder(StepObserver):
    """A context in which the steps of ``timer`` are recorded, with a mark for each gradient.

    Forward lasts from the module's call to the first gradient of its output, so it includes the loss. A step without
    backward is not counted. A gradient is ready when this rank has computed it, before it is averaged.
    """

    def __init__(self, timer: StepTimer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if not self._parameters:
            raise ValueError("no parameter requires a gradient: nothing to record")
        self._timer = timer
        self._clock = timer.clock
        self._device = next(iter(self._parameters.values())).device
        self._steps: list[StepMarks] = []
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(self._timer.gradient_timing(self._parameters))
        self._timer.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
        if self in self._timer.observers:  # a closed timer has no observers
            self._timer.observers.remove(self)

    def on_step_end(self, step: StepMarks) -> None:
        self._steps.append(step)

    @property
    def steps(self) -> int:
        """How many steps have been recorded."""
        return len(self._complete())

    def trace(self, meta: Mapping[str, Scalar] | None = None) -> Trace:
        """The median step, with the interquartile range of each time; waits for the device once.

        A gradient that some step did not produce counts as ready when that step's backward ended.
        """
        self._clock.settle()
        steps = self._complete()
        if not steps:
            raise ValueError(
                "no step was recorded: run forward and backward of this very model in every step, while it is recorded"
            )
        ready = np.array([self._ready_s(step) for step in steps])
        forward = [self._clock.elapsed_s(step.forward, step.backward) for step in steps]
        # The order on the host breaks ties: a weight and its bias are often ready at the same time.
        names = [*steps[-1].ready, *(name for name in self._parameters if name not in steps[-1].ready)]
        columns = {name: index for index, name in enumerate(self._parameters)}
        median = np.median(ready, axis=0).tolist()
        spread = np.subtract(*np.percentile(ready, [75, 25], axis=0)).tolist()
        tensors = []
        for name in sorted(names, key=lambda name: median[columns[name]]):
            parameter, column = self._parameters[name], columns[name]
            numel, itemsize, dtype = parameter.numel(), parameter.element_size(), str(parameter.dtype)[len("torch.") :]
            tensors.append(TensorSpec(name, numel, itemsize, median[column], dtype, spread[column]))
        facts = {**machine_facts(self._device), **_order_facts(steps), "steps": len(steps), **(meta or {})}
        facts["forward_spread_s"] = float(np.subtract(*np.percentile(forward, [75, 25])))
        return Trace(tuple(tensors), float(np.median(forward)), facts)

    def _complete(self) -> list[StepMarks]:
        return [step for step in self._steps if step.ready and step.backward is not None]

    def _ready_s(self, step: StepMarks) -> list[float]:
        seconds = {name: max(0.0, self._clock.elapsed_s(step.backward, mark)) for name, mark in step.ready.items()}
        last_s = max(seconds.values())
        return [seconds.get(name, last_s) for name in self._parameters]


def _order_facts(steps: list[StepMarks]) -> dict[str, Scalar]:
    """A fact for the trace if some steps produced gradients in another order, or not all of them."""
    first = list(steps[0].ready)
    for step in steps[1:]:
        order = list(step.ready)
        if order != first:
            name = next((a for a, b in zip(first, order, strict=False) if a != b), (first + order)[-1])
            return {"order_changed_at": name}
    return {}
