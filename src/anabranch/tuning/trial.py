"""How long a step of one layout takes: as measured on the live model, and as predicted from a trace and a network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from anabranch import planning as planners
from anabranch.observe.clock import Clock
from anabranch.observe.step_timer import StepMarks, timeline_of
from anabranch.planning.simulator import finish_s
from anabranch.values.errors import NetworkError
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

# Share of a step by which a more faithful plan may be slower. The planner's own (``ladder.FREE``) is a share of the
# computing time; trials compare whole steps.
PRICE_OF_FIDELITY = 0.01
OF_RECORDED = "computing_of_recorded"  # a key of a trace's meta
LEAST_SHARE = 0.01  # of recorded computing; less, as a file may say, is not believed
MIN_STRETCH = 0.02  # share of computing by which it must take longer than recorded: less is noise


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


# Predictions.


def prediction_s(trace: Trace | None, plan: Plan | None, network: Network | None) -> float | None:
    """As ``predicted_s``; None if the network has no cost for a kind, or the trace no gradient, that a plan names.

    The trace has no gradient of a parameter that was frozen before it was recorded, under a plan that was given.
    """
    if trace is None or network is None:
        return None
    names = {tensor.name for tensor in trace.tensors}
    if plan is not None and any(name not in names for bucket in plan.buckets for name in bucket.names):
        return None
    try:
        return predicted_s(trace, plan, network)
    except NetworkError:
        return None


def predicted_s(trace: Trace, plan: Plan | None, network: Network) -> float:
    """Predicted time from the start of forward to averaged gradients; without a plan, under DDP's own buckets.

    The trace was recorded under those, so that what their messages delay is in it already.
    """
    if plan is None:
        trace = as_recorded(trace)
        plan, network = planners.by_bytes(trace, network), replace(network, delays={})
    return trace.forward_s + finish_s(trace, plan, network)


def computed_faster(trace: Trace, plan: Plan | None, computing_s: float, before_s: float) -> Trace:
    """``trace`` with computing that takes ``computing_s``, as it did under ``plan``, if that is less than recorded.

    Traces are recorded under DDP's own buckets, or in later searches under the layout in force. Sending less, or less
    at once, leaves more of a GPU to the model. ``before_s`` is what the slowest rank then computed. A trace has the
    latest rank at each gradient, which adds up to more where ranks differ, and no plan has made that difference.
    """
    recorded_s = trace.forward_s + trace.backward_s
    if plan is None or not 0 < computing_s < (1 - MIN_STRETCH) * min(recorded_s, before_s):
        return trace
    share = computing_s / recorded_s
    return replace(trace.scaled(share), meta={**trace.meta, OF_RECORDED: share * share_of_recorded(trace)})


def share_of_recorded(trace: Trace) -> float:
    """How long computing takes in this trace, as a share of what was recorded; 1 if it is as recorded."""
    share = trace.meta.get(OF_RECORDED)
    return share if isinstance(share, float) and LEAST_SHARE < share < 1 else 1.0


def as_recorded(trace: Trace) -> Trace:
    """The trace as it was before ``computed_faster``: what it is under DDP's own buckets."""
    return trace if (share := share_of_recorded(trace)) == 1.0 else trace.scaled(1 / share)
