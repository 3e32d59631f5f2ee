"""Trial: how one layout did on the live model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from anabranch.observe.clock import Clock
from anabranch.observe.step_timer import StepMarks
from anabranch.plan import Plan, bucket_label
from anabranch.timeline import COMPUTE, Span, Timeline

LOOKED = 3  # steps of a trial whose buckets are looked at


@dataclass(frozen=True, slots=True)
class Trial:
    """Times from the start of forward to averaged gradients, and some steps in detail; no plan: DDP's own buckets."""

    label: str
    plan: Plan | None
    steps_s: tuple[float, ...]
    exposed_s: float  # median time from the end of computing to averaged gradients
    looks: tuple[Timeline, ...]  # from the fastest to the slowest

    @classmethod
    def of(cls, label: str, plan: Plan | None, steps: Sequence[StepMarks], clock: Clock) -> "Trial":
        """From the marks of some steps, which must be settled; the last few of them were looked at in detail."""
        seconds = [clock.between(step.forward, step.averaged) for step in steps]
        looked = sorted(range(len(steps))[-LOOKED:], key=seconds.__getitem__)
        looks = tuple(timeline_of(steps[index], plan, clock) for index in looked)
        for step in steps:
            step.buckets.clear()  # works keep their tensors alive
        exposed_s = median(max(0.0, clock.between(step.computed, step.averaged)) for step in steps)
        return cls(label, plan, tuple(seconds), exposed_s, looks)

    @property
    def step_s(self) -> float:
        """Median step."""
        return median(self.steps_s)

    @property
    def timeline(self) -> Timeline:
        """Of the steps that were looked at, the one most like the median step, with what that exposed."""

        def unlike(look: Timeline) -> float:
            return abs(look.iteration_s - self.step_s) + abs(look.exposed_s - self.exposed_s)

        return min(self.looks, key=unlike)


class BucketTimes(NamedTuple):
    """Of bucket ``number`` of a plan in one step; it begins when it is launched and its lane is free."""

    number: int
    launched_s: float
    begin_s: float
    end_s: float


def bucket_times(step: StepMarks, plan: Plan, clock: Clock, origin: object) -> Iterator[BucketTimes]:
    """The buckets whose ends were seen, in launch order; seconds count from the mark ``origin``."""
    free_s = dict.fromkeys(range(plan.lanes), -inf)
    for index, launched, end in sorted(step.buckets, key=lambda item: item[0]):
        lane = plan.buckets[index].lane
        seen_s = clock.until(origin, end)
        if seen_s is None:  # then the launch may have no time yet, either
            continue
        launched_s = clock.between(origin, launched)
        end_s = max(launched_s, seen_s)
        yield BucketTimes(index, launched_s, min(max(launched_s, free_s[lane]), end_s), end_s)
        free_s[lane] = end_s


def timeline_of(step: StepMarks, plan: Plan | None, clock: Clock) -> Timeline:
    """A measured timeline; without a plan only the time that communication exposed is known, not its buckets."""

    def at(mark: object) -> float:
        return clock.between(step.backward, mark)

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
