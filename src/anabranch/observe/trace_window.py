"""A window of steps of all ranks, written by rank 0 as one Chrome trace for Perfetto, in rank 0's time.

How far the host clocks of ranks are apart is measured before and after the window, with a bound on the error: rank 0
pings each other rank in turn, which answers with its own time. That time was read between the ping and the arrival of
the answer, so half the round trip bounds the error, however long either direction took. The shortest of several round
trips is used. The two measurements also show how clocks drift.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.exchange.agreement import check_same, from_rank_0, to_rank_0
from anabranch.exchange.interface import Group
from anabranch.observe.clock import ClockAlignment, HostAnchor, clock_offsets
from anabranch.observe.step_timer import CurrentStep, StepMarks, StepObserver, StepTimer, bucket_times
from anabranch.values.errors import FileError
from anabranch.values.files import write_text
from anabranch.values.plan import Plan, bucket_label

log = logging.getLogger("anabranch")

MAX_STEPS = 100  # marks are kept in memory until the window ends
COMPUTE, GRADIENTS, FIRST_LANE = 0, 1, 2  # tracks of a process
PARTS = ("forward", "backward", "exposed communication")

TraceEvent = dict[str, Any]
Nanoseconds = Callable[[float], int]  # since the first event: whole ones, so that adjacent slices stay adjacent


@dataclass(eq=False)
class TraceWindow(StepObserver):
    """Records the steps ``first`` … ``last`` of ``timer`` on every rank; rank 0 writes them to ``path``.

    The constructor, the start and the end of the window are collective among the ranks of ``control``, which sends host
    memory. Start and end wait for the device; the steps in between do not. A wrong window, or a file that exists and
    may not be replaced, is refused on all ranks before any step.
    """

    first: int
    last: int
    path: str | os.PathLike[str]
    force: bool
    timer: StepTimer
    current_step: CurrentStep
    parameters: Mapping[str, nn.Parameter]
    control: Group

    def __post_init__(self) -> None:
        first, last, path, control = self.first, self.last, self.path, self.control
        next_step = self.current_step().number
        given = f"steps {first!r} to {last!r}, and {next_step} comes next"
        check_same("the window given to trace_steps()", [given], control)
        _check_range(first, last, next_step)  # after check_same(), so that all ranks raise or none does
        exists = Path(path).exists() and not self.force
        problem = f"{path}: is already there; choose another name, or replace it with force=True" if exists else ""
        if problem_of_rank_0 := from_rank_0(problem.encode(), control).decode():
            raise FileError(problem_of_rank_0)  # on every rank
        self._steps: list[tuple[int, StepMarks, Plan | None]] = []  # number, and the plan that ran in it
        self._timing = ExitStack()
        self.timer.observers.append(self)
        if first == next_step:
            self._begin()

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        current = self.current_step()
        if self.first <= current.number <= self.last:
            # Copies: a trial empties the list when it ends, and a later backward pass may add gradients.
            marks = replace(step, buckets=list(step.buckets), ready=dict(step.ready))
            self._steps.append((current.number, marks, current.plan))
        if current.number == self.first - 1:
            self._begin()
        if current.number == self.last:
            self._finish()

    def close(self) -> None:
        """Drop the window."""
        self._release()
        # The other ranks may not close now, so nothing can be gathered.
        log.warning("anabranch: closed before step %d: no trace was written to %s", self.last, self.path)

    def _begin(self) -> None:
        """Compare the clocks of all ranks, and tie that of the steps to the host's; waits for the device."""
        self._offsets_before = clock_offsets(self.control)
        self._anchor = HostAnchor.measure(self.timer.clock)
        self._timing.enter_context(self.timer.bucket_timing())
        self._timing.enter_context(self.timer.gradient_timing(self.parameters))

    def _release(self) -> None:
        self._timing.close()
        self._steps = []

    def _finish(self) -> None:
        """Gather the steps of all ranks, and write them on rank 0."""
        self.timer.observers.remove(self)
        self.timer.clock.settle()
        recording = {"anchor_error_s": self._anchor.error_s, "steps": [self._document(*step) for step in self._steps]}
        self._release()
        offsets_after = clock_offsets(self.control)
        payloads = to_rank_0(json.dumps(recording).encode(), self.control)
        if dist.get_rank(self.control) != 0:
            return
        recordings = [json.loads(payload) for payload in payloads]
        alignments = list(map(ClockAlignment, self._offsets_before, offsets_after))
        device = next(iter(self.parameters.values())).device
        window = {"device": device.type, "first_step": self.first, "last_step": self.last}
        try:
            text = json.dumps(perfetto_document(recordings, alignments, window), allow_nan=False) + "\n"
            write_text(text, self.path, self.force)
        except Exception as error:  # training continues, on this rank as on the others
            log.error("anabranch: the trace of steps %d to %d is lost: %s", self.first, self.last, error)

    def _at(self, mark: object) -> float:
        """When a mark was taken, in seconds of this rank's host."""
        return self._anchor.host_s + self.timer.clock.elapsed_s(self._anchor.mark, mark)

    def _document(self, number: int, marks: StepMarks, plan: Plan | None) -> dict[str, Any]:
        """A step as JSON values, in the time of this rank's host clock."""
        at = self._at
        return {
            "step": number,
            "plan": plan.fingerprint[:12] if plan is not None else None,
            "edges_s": [at(mark) for mark in (marks.forward, marks.backward, marks.computed, marks.averaged)],
            "ready_s": {name: at(mark) for name, mark in marks.ready.items()},
            "buckets": list(self._buckets(plan, marks)) if plan is not None else [],
        }

    def _buckets(self, plan: Plan, marks: StepMarks) -> Iterator[dict[str, Any]]:
        parameters, anchor = self.parameters, self._anchor
        for times in bucket_times(marks, plan, self.timer.clock, anchor.mark):
            bucket = plan.buckets[times.number]
            yield {
                "index": times.number,
                "lane": bucket.lane,
                "collective": bucket.collective,
                "stage": times.stage,
                "names": bucket.names,
                "nbytes": sum(parameters[name].numel() * parameters[name].element_size() for name in bucket.names),
                "launched_s": anchor.host_s + times.launched_s,
                "begin_s": anchor.host_s + times.begin_s,
                "end_s": anchor.host_s + times.end_s,
            }


def _check_range(first: int, last: int, next_step: int) -> None:
    if not isinstance(first, int) or not isinstance(last, int) or first < next_step:
        raise ValueError(f"trace_steps from {first!r} to {last!r}: expected numbers from {next_step} on, the next step")
    if not first <= last < first + MAX_STEPS:
        raise ValueError(
            f"trace_steps from {first} to {last}: expected a last step from {first} to {first + MAX_STEPS - 1}, since "
            f"steps are kept in memory until the window ends; ask for several windows of at most {MAX_STEPS} steps"
        )


# The file.


def perfetto_document(
    recordings: Sequence[Mapping[str, Any]], alignments: Sequence[ClockAlignment], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace-event JSON object, in rank 0's time from the first event on, in microseconds.

    ``recordings`` are the steps of each rank by its own clock, as ``TraceWindow`` gathers them. The error bound of a
    rank's clock against rank 0's is in the name of its process and in ``otherData``, with ``facts``.
    """
    errors_s = [0.0]
    for recording, alignment in zip(recordings[1:], alignments[1:], strict=True):
        errors_s.append(alignment.error_s + recording["anchor_error_s"] + recordings[0]["anchor_error_s"])
    origin_s = min(
        alignment.to_rank_0_time(_first_event_s(step))
        for recording, alignment in zip(recordings, alignments, strict=True)
        for step in recording["steps"]
    )
    events: list[TraceEvent] = []
    for rank, (alignment, error_s) in enumerate(zip(alignments, errors_s, strict=True)):
        events += _rank_events(rank, recordings[rank]["steps"], error_s, partial(_nanoseconds, alignment, origin_s))
    other = {
        "made_by": "anabranch",
        **facts,
        "ranks": len(recordings),
        "clock_error_s": {f"rank {rank}": error_s for rank, error_s in enumerate(errors_s)},
        "clocks": "rank 0's; the others' were aligned by round trips before and after the window",
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _nanoseconds(alignment: ClockAlignment, origin_s: float, at_s: float) -> int:
    return max(0, round((alignment.to_rank_0_time(at_s) - origin_s) * 1e9))


def _rank_events(
    rank: int, steps: Sequence[Mapping[str, Any]], error_s: float, ns: Nanoseconds
) -> Iterator[TraceEvent]:
    clock = "reference clock" if rank == 0 else f"clock within ±{error_s * 1e6:.1f} µs of rank 0's"
    yield _meta_event(rank, 0, "process_name", name=f"rank {rank} ({clock})")
    yield _meta_event(rank, 0, "process_sort_index", sort_index=rank)
    lanes = sorted({bucket["lane"] for step in steps for bucket in step["buckets"]})
    tracks = {"compute": COMPUTE, "gradients ready": GRADIENTS, **{f"lane {n}": FIRST_LANE + n for n in lanes}}
    for name, track in tracks.items():
        yield _meta_event(rank, track, "thread_name", name=name)
        yield _meta_event(rank, track, "thread_sort_index", sort_index=track)
    for step in steps:
        yield from _step_events(rank, step, ns)


def _first_event_s(step: Mapping[str, Any]) -> float:
    return float(min([*step["edges_s"], *step["ready_s"].values(), *(b["launched_s"] for b in step["buckets"])]))


def _step_events(rank: int, step: Mapping[str, Any], ns: Nanoseconds) -> Iterator[TraceEvent]:
    number = {"step": step["step"]}
    for name, (start_ns, end_ns) in zip(PARTS, pairwise(map(ns, step["edges_s"])), strict=True):
        if end_ns > start_ns or name != PARTS[-1]:
            yield _slice_event(rank, COMPUTE, name, "compute", start_ns, end_ns, {**number, "plan": step["plan"]})
    for name, ready_s in step["ready_s"].items():
        instant = {"ph": "i", "s": "t", "pid": rank, "tid": GRADIENTS}
        yield {**instant, "name": name, "cat": "gradient", "ts": ns(ready_s) / 1e3, "args": number}
    for bucket in step["buckets"]:
        name = bucket_label(bucket["index"], bucket["collective"], bucket["names"])
        args = {**number, "tensors": bucket["names"], "nbytes": bucket["nbytes"], "collective": bucket["collective"]}
        args["launched_us"] = ns(bucket["launched_s"]) / 1e3
        track = FIRST_LANE + bucket["lane"]
        yield _slice_event(rank, track, name, "communication", ns(bucket["begin_s"]), ns(bucket["end_s"]), args)


def _slice_event(
    rank: int, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> TraceEvent:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": category, "ts": start_ns / 1e3,
        "dur": max(0, end_ns - start_ns) / 1e3, "args": dict(args),
    }  # fmt: skip


def _meta_event(rank: int, track: int, kind: str, **args: object) -> TraceEvent:
    return {"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": kind, "args": args}
