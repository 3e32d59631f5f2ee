"""A window of steps, seen on every rank and written by rank 0 as one trace in rank 0's time."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.comm.agree import Group, check_same, from_rank_0
from anabranch.errors import FileError
from anabranch.files import write_text
from anabranch.observe.clock_sync import Alignment, Anchor, Offset, offsets
from anabranch.observe.perfetto import merged
from anabranch.observe.step_timer import StepMarks
from anabranch.plan import Plan
from anabranch.tuning.trial import bucket_times

if TYPE_CHECKING:
    from anabranch.tuning.tuner import Tuner

log = logging.getLogger("anabranch")

MOST_STEPS = 100  # marks are held until the window ends, and nobody looks at more


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step of the window, and what ran in it."""

    number: int
    marks: StepMarks
    plan: Plan | None


class TraceWindow:
    """Watches the steps ``first`` … ``last`` of a tuner. Making it, beginning and ending are collective.

    Beginning and ending wait for the device; steps in between do not.
    """

    def __init__(self, tuner: "Tuner", first: int, last: int, path: str | os.PathLike[str], force: bool) -> None:
        check_same("the window given to trace_steps()", [f"steps {first!r} to {last!r}"], tuner.control)
        _check(first, last, tuner.steps_done + 1)  # so that it is refused on all ranks or on none
        taken = Path(path).exists() and not force
        problem = f"{path}: is already there; choose another name, or replace it with force=True" if taken else ""
        if refused := from_rank_0(problem.encode(), tuner.control).decode():
            raise FileError(refused)  # on every rank, by what rank 0 found
        self._tuner, self._watch = tuner, tuner.live.watch
        self._first, self._last, self._path, self._force = first, last, Path(path), force
        self._steps: list[_Seen] = []
        self._handles: list[Any] = []
        self._before: list[Offset] = []
        self._anchor: Anchor | None = None
        self._watch.observers.append(self)
        if first == tuner.steps_done + 1:
            self._begin()

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        """See ``Observer``."""
        number, hook = self._tuner.steps_done + 1, self._tuner.live.hook
        if self._first <= number <= self._last:
            # A trial empties the list of buckets when it ends.
            seen = replace(step, buckets=list(step.buckets))
            self._steps.append(_Seen(number, seen, hook.plan if hook is not None else None))
        if number == self._first - 1:
            self._begin()
        if number == self._last:
            self._finish()

    def close(self) -> None:
        """See ``Observer``. Ranks may not all come here, so nothing can be gathered."""
        self._let_go()
        words = "anabranch: closed before step %d: no trace was written to %s"
        log.warning(words, self._last, self._path)

    def _begin(self) -> None:
        live, watch = self._tuner.live, self._watch
        self._before = offsets(self._tuner.control)
        self._anchor = Anchor.drop(watch.clock)
        watch.lookers += 1
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._marker(name))
            for name, parameter in live.parameters.items()
        ]

    def _marker(self, name: str) -> Callable[[torch.Tensor], None]:
        watch = self._watch

        def ready(parameter: torch.Tensor) -> None:  # noqa: ARG001
            if watch.current is not None and name not in watch.current.ready:
                watch.current.ready[name] = watch.clock.mark()

        return ready

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._watch.lookers = max(0, self._watch.lookers - 1)
        self._handles, self._steps = [], []

    def _finish(self) -> None:
        """Gather what ranks saw, and write it on rank 0."""
        control, watch, anchor = self._tuner.control, self._watch, self._anchor
        assert anchor is not None
        watch.observers.remove(self)
        watch.clock.settle()
        mine = {"anchor_error_s": anchor.error_s, "steps": [self._told(seen, anchor) for seen in self._steps]}
        self._let_go()
        after = offsets(control)
        parcels = to_rank_0(json.dumps(mine).encode(), control)
        if dist.get_rank(control) != 0:
            return
        told = [json.loads(parcel) for parcel in parcels]
        alignments = [Alignment(one, two) for one, two in zip(self._before, after, strict=True)]
        facts = {"device": self._tuner.live.device.type, "first_step": self._first, "last_step": self._last}
        try:
            write_text(json.dumps(merged(told, alignments, facts), allow_nan=False) + "\n", self._path, self._force)
        except Exception as error:  # training goes on, on this rank as on the others
            log.error("anabranch: the trace of steps %d to %d is lost: %s", self._first, self._last, error)

    def _told(self, seen: _Seen, anchor: Anchor) -> dict[str, Any]:
        """A step in plain values, by this rank's host clock."""
        marks, clock = seen.marks, self._watch.clock

        def at(mark: object) -> float:
            return anchor.host_s + clock.between(anchor.mark, mark)

        return {
            "step": seen.number,
            "plan": seen.plan.fingerprint[:12] if seen.plan is not None else None,
            "edges_s": [at(mark) for mark in (marks.forward, marks.backward, marks.computed, marks.averaged)],
            "ready_s": {name: at(mark) for name, mark in marks.ready.items()},
            "buckets": list(self._buckets(seen.plan, marks, anchor)) if seen.plan is not None else [],
        }

    def _buckets(self, plan: Plan, marks: StepMarks, anchor: Anchor) -> Iterator[dict[str, Any]]:
        parameters = self._tuner.live.parameters
        for times in bucket_times(marks, plan, self._watch.clock, anchor.mark):
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
    """Every rank's payload, in rank order, on rank 0 alone, which has room for one after another; else nothing."""
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
