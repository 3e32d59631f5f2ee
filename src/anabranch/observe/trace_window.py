"""A window of steps of all ranks, written by rank 0 as one trace file in rank 0's time."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.comm.agree import Group, check_same, from_rank_0
from anabranch.errors import FileError
from anabranch.files import write_text
from anabranch.observe.clock_sync import ClockAlignment, HostAnchor, Offset, clock_offsets
from anabranch.observe.measured_timeline import bucket_times
from anabranch.observe.perfetto import perfetto_document
from anabranch.observe.step_context import CurrentStep
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer
from anabranch.plan import Plan

log = logging.getLogger("anabranch")

MAX_STEPS = 100  # marks are kept in memory until the window ends


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
        check_same("the window given to trace_steps()", [f"steps {first!r} to {last!r}"], control)
        _check_range(first, last, next_step)  # after check_same(), so that all ranks raise or none does
        exists = Path(path).exists() and not force
        problem = f"{path}: is already there; choose another name, or replace it with force=True" if exists else ""
        if problem_of_rank_0 := from_rank_0(problem.encode(), control).decode():
            raise FileError(problem_of_rank_0)  # on every rank
        self._first = first
        self._last = last
        self._path = Path(path)
        self._force = force
        self._timer = timer
        self._current_step = current_step
        self._parameters = parameters
        self._control = control
        self._steps: list[_WindowStep] = []
        self._timing = ExitStack()
        self._offsets_before: list[Offset] = []
        self._anchor: HostAnchor | None = None
        timer.observers.append(self)
        if first == next_step:
            self._begin()

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        current = self._current_step()
        if self._first <= current.number <= self._last:
            marks = replace(step, buckets=list(step.buckets))  # a trial empties the list when it ends
            self._steps.append(_WindowStep(current.number, marks, current.plan))
        if current.number == self._first - 1:
            self._begin()
        if current.number == self._last:
            self._finish()

    def close(self) -> None:
        """Drop the window: the other ranks may not close now, so nothing can be gathered."""
        self._release()
        log.warning("anabranch: closed before step %d: no trace was written to %s", self._last, self._path)

    def _begin(self) -> None:
        self._offsets_before = clock_offsets(self._control)
        self._anchor = HostAnchor.measure(self._timer.clock)
        self._timing.enter_context(self._timer.bucket_timing())
        self._timing.enter_context(self._timer.gradient_timing(self._parameters))

    def _release(self) -> None:
        self._timing.close()
        self._steps = []

    def _finish(self) -> None:
        """Gather the steps of all ranks, and write them on rank 0."""
        control, anchor = self._control, self._anchor
        assert anchor is not None
        self._timer.observers.remove(self)
        self._timer.clock.settle()
        recording = {"anchor_error_s": anchor.error_s, "steps": [self._document(step, anchor) for step in self._steps]}
        self._release()
        offsets_after = clock_offsets(control)
        payloads = to_rank_0(json.dumps(recording).encode(), control)
        if dist.get_rank(control) != 0:
            return
        recordings = [json.loads(payload) for payload in payloads]
        alignments = [
            ClockAlignment(before, after) for before, after in zip(self._offsets_before, offsets_after, strict=True)
        ]
        device = next(iter(self._parameters.values())).device
        facts = {"device": device.type, "first_step": self._first, "last_step": self._last}
        try:
            text = json.dumps(perfetto_document(recordings, alignments, facts), allow_nan=False) + "\n"
            write_text(text, self._path, self._force)
        except Exception as error:  # training continues, on this rank as on the others
            log.error("anabranch: the trace of steps %d to %d is lost: %s", self._first, self._last, error)

    def _document(self, step: _WindowStep, anchor: HostAnchor) -> dict[str, Any]:
        """A step as JSON values, in the time of this rank's host clock."""
        marks, plan, clock = step.marks, step.plan, self._timer.clock

        def at(mark: object) -> float:
            return anchor.host_s + clock.elapsed_s(anchor.mark, mark)

        return {
            "step": step.number,
            "plan": plan.fingerprint[:12] if plan is not None else None,
            "edges_s": [at(mark) for mark in (marks.forward, marks.backward, marks.computed, marks.averaged)],
            "ready_s": {name: at(mark) for name, mark in marks.ready.items()},
            "buckets": list(self._buckets(plan, marks, anchor)) if plan is not None else [],
        }

    def _buckets(self, plan: Plan, marks: StepMarks, anchor: HostAnchor) -> Iterator[dict[str, Any]]:
        parameters = self._parameters
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


def to_rank_0(payload: bytes, group: Group) -> list[bytes]:
    """Every rank's payload, in rank order, on rank 0; an empty list on the others. Rank 0 receives one at a time."""
    if dist.get_rank(group) != 0:
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.send(torch.tensor([len(payload)], dtype=torch.int64), group_dst=0, group=group)
        dist.send(content, group_dst=0, group=group)
        return []
    parts = [payload]
    for other in range(1, dist.get_world_size(group)):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group_src=other, group=group)
        content = torch.zeros(int(size.item()), dtype=torch.uint8)
        dist.recv(content, group_src=other, group=group)
        parts.append(content.numpy().tobytes())
    return parts


def _check_range(first: int, last: int, next_step: int) -> None:
    if not isinstance(first, int) or not isinstance(last, int) or first < next_step:
        raise ValueError(f"trace_steps from {first!r} to {last!r}: expected numbers from {next_step} on, the next step")
    if not first <= last < first + MAX_STEPS:
        raise ValueError(
            f"trace_steps from {first} to {last}: expected a last step from {first} to {first + MAX_STEPS - 1}, since "
            f"steps are kept in memory until the window ends; ask for several windows of at most {MAX_STEPS} steps"
        )
