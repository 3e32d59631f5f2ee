"""A window of steps of all ranks, written by rank 0 as one trace by rank 0's clock."""

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
from anabranch.observe.clock_sync import Alignment, Anchor, Offset, offsets
from anabranch.observe.measured_timeline import bucket_times
from anabranch.observe.perfetto import merged
from anabranch.observe.step_context import CurrentStep
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer
from anabranch.plan import Plan

log = logging.getLogger("anabranch")

MOST_STEPS = 100  # marks are held in memory until the window ends


@dataclass(frozen=True, slots=True)
class _WindowStep:
    """A step of the window, and the plan that ran in it."""

    number: int
    marks: StepMarks
    plan: Plan | None


class TraceWindow(StepObserver):
    """Records the steps ``first`` … ``last`` of ``timer`` on every rank; rank 0 writes them to ``path``.

    Making it, beginning and ending are collective among the ranks of ``control``. Beginning and ending wait for the
    device; steps in between do not.
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
        _check(first, last, next_step)  # so that it is refused on all ranks or on none
        taken = Path(path).exists() and not force
        problem = f"{path}: is already there; choose another name, or replace it with force=True" if taken else ""
        if refused := from_rank_0(problem.encode(), control).decode():
            raise FileError(refused)  # on every rank, by what rank 0 found
        self._first, self._last = first, last
        self._path, self._force = Path(path), force
        self._timer = timer
        self._current_step = current_step
        self._parameters = parameters
        self._control = control
        self._steps: list[_WindowStep] = []
        self._timing = ExitStack()
        self._before: list[Offset] = []
        self._anchor: Anchor | None = None
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
        """Give up: not all ranks may come here, so nothing can be gathered."""
        self._release()
        words = "anabranch: closed before step %d: no trace was written to %s"
        log.warning(words, self._last, self._path)

    def _begin(self) -> None:
        self._before = offsets(self._control)
        self._anchor = Anchor.drop(self._timer.clock)
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
        mine = {"anchor_error_s": anchor.error_s, "steps": [self._document(step, anchor) for step in self._steps]}
        self._release()
        after = offsets(control)
        parcels = to_rank_0(json.dumps(mine).encode(), control)
        if dist.get_rank(control) != 0:
            return
        documents = [json.loads(parcel) for parcel in parcels]
        alignments = [Alignment(one, two) for one, two in zip(self._before, after, strict=True)]
        device = next(iter(self._parameters.values())).device
        facts = {"device": device.type, "first_step": self._first, "last_step": self._last}
        try:
            text = json.dumps(merged(documents, alignments, facts), allow_nan=False) + "\n"
            write_text(text, self._path, self._force)
        except Exception as error:  # training goes on, on this rank as on the others
            log.error("anabranch: the trace of steps %d to %d is lost: %s", self._first, self._last, error)

    def _document(self, step: _WindowStep, anchor: Anchor) -> dict[str, Any]:
        """A step in plain values, by this rank's host clock."""
        marks, plan, clock = step.marks, step.plan, self._timer.clock

        def at(mark: object) -> float:
            return anchor.host_s + clock.between(anchor.mark, mark)

        return {
            "step": step.number,
            "plan": plan.fingerprint[:12] if plan is not None else None,
            "edges_s": [at(mark) for mark in (marks.forward, marks.backward, marks.computed, marks.averaged)],
            "ready_s": {name: at(mark) for name, mark in marks.ready.items()},
            "buckets": list(self._buckets(plan, marks, anchor)) if plan is not None else [],
        }

    def _buckets(self, plan: Plan, marks: StepMarks, anchor: Anchor) -> Iterator[dict[str, Any]]:
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


def _check(first: int, last: int, coming: int) -> None:
    if not isinstance(first, int) or not isinstance(last, int) or first < coming:
        raise ValueError(f"trace_steps from {first!r} to {last!r}: expected numbers from {coming} on, the next step")
    if not first <= last < first + MOST_STEPS:
        raise ValueError(
            f"trace_steps from {first} to {last}: expected a last step from {first} to {first + MOST_STEPS - 1}, since "
            f"all is held until the window ends; ask for several windows of at most {MOST_STEPS} steps"
        )
