"""Trial: the measured steps of one layout on the live model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from anabranch.observe.clock import Clock
from anabranch.observe.step_timer import StepMarks, timeline_of
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline

# Share of a step by which a more faithful plan may be slower. The planner's own (``ladder.FREE``) is a share of the
# computing time; trials compare whole steps.
PRICE_OF_FIDELITY = 0.01


class StepTimes(NamedTuple):
    """One step: the whole, from the start of forward to averaged gradients, and two of its parts.

    exposed_s   from the end of computing to averaged gradients
    finish_s    from the start of backward to averaged gradients
    """

    whole_s: float
    exposed_s: float
    finish_s: float

    @classmethod
    def of(cls, step: StepMarks, clock: Clock) -> "StepTimes":
        """From the marks of a step, which must be settled."""
        return cls(
            clock.elapsed_s(step.forward, step.averaged),
            max(0.0, clock.elapsed_s(step.computed, step.averaged)),
            clock.elapsed_s(step.backward, step.averaged),
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """Steps of one layout; ``plan`` is None under the layout's own buckets.

    detailed   timelines of those steps whose buckets were timed
    result     how it compared with the layout that was in force, in words; empty if it was not compared
    doubtful   noise could have made it look faster than that
    """

    label: str
    plan: Plan | None
    steps: tuple[StepTimes, ...]
    detailed: tuple[Timeline, ...] = ()
    result: str = ""
    doubtful: bool = False

    @classmethod
    def of(cls, label: str, plan: Plan | None, steps: Sequence[StepMarks], clock: Clock) -> "Trial":
        """From the marks of some steps, which must be settled.

        Without a plan no bucket is timed, and every step is detailed: its exposed time is all that is known.
        """
        timed = [step for step in steps if plan is None or step.buckets]
        detailed = tuple(timeline_of(step, plan, clock) for step in timed)
        for step in steps:
            step.buckets.clear()  # marks hold works, and works keep their tensors alive
        return cls(label, plan, tuple(StepTimes.of(step, clock) for step in steps), detailed)

    def with_more(self, more: "Trial") -> "Trial":
        """This trial with further steps of the same layout."""
        return replace(self, steps=self.steps + more.steps, detailed=self.detailed + more.detailed)

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds of each step."""
        return tuple(step.whole_s for step in self.steps)

    @property
    def step_s(self) -> float:
        """Median step."""
        return median(self.steps_s)

    @property
    def exposed_s(self) -> float:
        """Median exposed time."""
        return median(step.exposed_s for step in self.steps)

    @property
    def computing_s(self) -> float:
        """Median time from the start of forward to the end of computing."""
        return median(step.whole_s - step.exposed_s for step in self.steps)

    @property
    def finish_s(self) -> float:
        """Median time from the start of backward to averaged gradients."""
        return median(step.finish_s for step in self.steps)

    @property
    def timeline(self) -> Timeline | None:
        """The detailed step that is closest to the median step and its exposed time; None if no step is detailed."""

        def distance(step: Timeline) -> float:
            return abs(step.iteration_s - self.step_s) + abs(step.exposed_s - self.exposed_s)

        return min(self.detailed, key=distance, default=None)
