"""A window of steps of all ranks, written by rank 0 as one trace file in rank 0's time."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo

from anabranch.exchange.contracts import Group
from anabranch.observe.measured_timeline import bucket_times
from anabranch.observe.step_context import CurrentStep
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer
from anabranch.observe.window_file import WindowFile
from anabranch.values.plan import Plan


@dataclass(frozen=True, slots=True)
class _WindowStep:
    """A step of the window, and the plan that ran in it."""

    number: int
    marks: StepMarks
    plan: Plan | None


class TraceWindow(StepObserver):
    """Records the steps ``first`` … ``last`` of ``timer`` on every rank; rank 0 writes them to ``path``.

    The constructor, the begin and the end of the window are collective among the ranks of ``control``. Begin and end
    wait for the device; the steps in between do not.
    """

    def __init__(
        self,
        first: int,
        last: int,
        path: str | os.PathLike[str],
        force: bool,
        *,
        timer: StepTimer,
        current_step: CurrentStep,
        parameters: Mapping[str, nn.Parameter],
        control: Group,
    ) -> None:
        next_step = current_step().number
        self._file = WindowFile(first, last, path, force, next_step=next_step, control=control)
        self._timer = timer
        self._current_step = current_step
        self._parameters = parameters
        self._steps: list[_WindowStep] = []
        self._timing = ExitStack()
        timer.observers.append(self)
        if first == next_step:
            self._begin()

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        current = self._current_step()
        if self._file.first <= current.number <= self._file.last:
            # Copies: a trial empties the list when it ends, and a later backward pass may add gradients.
            marks = replace(step, buckets=list(step.buckets), ready=dict(step.ready))
            self._steps.append(_WindowStep(current.number, marks, current.plan))
        if current.number == self._file.first - 1:
            self._begin()
        if current.number == self._file.last:
            self._finish()

    def close(self) -> None:
        """Drop the window."""
        self._release()
        self._file.drop()

    def _begin(self) -> None:
        self._file.begin(self._timer.clock)
        self._timing.enter_context(self._timer.bucket_timing())
        self._timing.enter_context(self._timer.gradient_timing(self._parameters))

    def _release(self) -> None:
        self._timing.close()
        self._steps = []

    def _finish(self) -> None:
        """Gather the steps of all ranks, and write them on rank 0."""
        self._timer.observers.remove(self)
        self._timer.clock.settle()
        recording = {"steps": [self._document(step) for step in self._steps]}
        self._release()
        device = next(iter(self._parameters.values())).device
        self._file.write(recording, {"device": device.type})

    def _document(self, step: _WindowStep) -> dict[str, Any]:
        """A step as JSON values, in the time of this rank's host clock."""
        marks, plan, at = step.marks, step.plan, self._file.at
        return {
            "step": step.number,
            "plan": plan.fingerprint[:12] if plan is not None else None,
            "edges_s": [at(mark) for mark in (marks.forward, marks.backward, marks.computed, marks.averaged)],
            "ready_s": {name: at(mark) for name, mark in marks.ready.items()},
            "buckets": list(self._buckets(plan, marks)) if plan is not None else [],
        }

    def _buckets(self, plan: Plan, marks: StepMarks) -> Iterator[dict[str, Any]]:
        parameters, anchor = self._parameters, self._file.anchor
        for times in bucket_times(marks, plan, self._timer.clock, anchor.mark):
            bucket = plan.buckets[times.number]
            yield {
                "index": times.number,
                "lane": bucket.lane,
                "collective": bucket.collective,
                "names": bucket.names,
                "nbytes": sum(parameters[name].numel() * parameters[name].element_size() for name in bucket.names),
                "launched_s": anchor.host_s + times.launched_s,
                "begin_s": anchor.host_s + times.begin_s,
                "end_s": anchor.host_s + times.end_s,
            }
