"""Timelines of measured steps, from the marks of the step timer."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from anabranch.observe.clock import Clock
from anabranch.observe.step_timer import StepMarks
from anabranch.values.plan import Plan, bucket_label
from anabranch.values.timeline import COMPUTE, Span, Timeline


class BucketTimes(NamedTuple):
    """When bucket ``number`` of a plan was launched, began (its lane was free) and ended, in one step."""

    number: int
    launched_s: float
    begin_s: float
    end_s: float


def bucket_times(step: StepMarks, plan: Plan, clock: Clock, origin: object) -> Iterator[BucketTimes]:
    """The times of buckets whose ends were observed, in launch order; seconds count from the mark ``origin``."""
    free_s = dict.fromkeys(range(plan.lanes), -inf)
    for index, launched, end in sorted(step.buckets, key=lambda item: item[0]):
        lane = plan.buckets[index].lane
        observed_s = clock.elapsed_to_end_s(origin, end)
        if observed_s is None:  # then the launch may have no time yet, either
            continue
        launched_s = clock.elapsed_s(origin, launched)
        end_s = max(launched_s, observed_s)
        yield BucketTimes(index, launched_s, min(max(launched_s, free_s[lane]), end_s), end_s)
        free_s[lane] = end_s


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
            spans.append(Span(f"lane {bucket.lane}", label, times.begin_s, times.end_s))
    return Timeline(tuple(spans), {"source": "measured"})
