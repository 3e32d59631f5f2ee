"""Trial: the measured steps of one layout on the live model."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from anabranch.observe.clock import Clock
from anabranch.observe.measured_timeline import timeline_of
from anabranch.observe.step_timer import StepMarks
from anabranch.plan import Plan
from anabranch.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Trial:
    """Step times of one layout, and some steps in detail; ``plan`` is None under DDP's own buckets.

    steps_s     from the start of forward to averaged gradients, one per step
    exposed_s   median time from the end of computing to averaged gradients
    detailed    timelines of the last steps, from the fastest to the slowest
    """

    label: str
    plan: Plan | None
    steps_s: tuple[float, ...]
    exposed_s: float
    detailed: tuple[Timeline, ...]

    @classmethod
    def of(
        cls, label: str, plan: Plan | None, steps: Sequence[StepMarks], clock: Clock, detailed_steps: int
    ) -> "Trial":
        """From the marks of some steps, which must be settled; buckets were timed in the last ``detailed_steps``."""
        seconds = [clock.elapsed_s(step.forward, step.averaged) for step in steps]
        fastest_first = sorted(range(len(steps))[-detailed_steps:], key=seconds.__getitem__)
        detailed = tuple(timeline_of(steps[index], plan, clock) for index in fastest_first)
        for step in steps:
            step.buckets.clear()  # marks hold works, and works keep their tensors alive
        exposed_s = median(max(0.0, clock.elapsed_s(step.computed, step.averaged)) for step in steps)
        return cls(label, plan, tuple(seconds), exposed_s, detailed)

    @property
    def step_s(self) -> float:
        """Median step."""
        return median(self.steps_s)

    @property
    def timeline(self) -> Timeline:
        """The detailed step that is closest to the median step and its exposed time."""

        def distance(step: Timeline) -> float:
            return abs(step.iteration_s - self.step_s) + abs(step.exposed_s - self.exposed_s)

        return min(self.detailed, key=distance)
