"""Times of trials that a test gives, so that no choice depends on how busy the machine is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from anabranch import Plan
from anabranch.observe.clock import Clock
from anabranch.observe.step_timer import StepMarks
from anabranch.tuning import search
from anabranch.tuning.decisions import Comparison, Pairs, judge
from anabranch.tuning.options import TuningPolicy
from anabranch.tuning.trial import StepTimes, Trial
from anabranch.tuning.tuner import Tuner

MEASURED = Trial.of


def give_times(seconds: Callable[[Plan | None], float], exposed: float = 0.5) -> None:
    """In this process, each step of a trial takes as long as ``seconds`` says of its plan; a share of it is exposed."""

    def given(label: str, plan: Plan | None, steps: Sequence[StepMarks], clock: Clock) -> Trial:
        trial, step_s = MEASURED(label, plan, steps, clock), seconds(plan)
        times = StepTimes(step_s, exposed * step_s, (1 + exposed) / 2 * step_s)
        return replace(trial, steps=tuple(times for _ in trial.steps))

    Trial.of = staticmethod(given)  # type: ignore[method-assign]


def give_windows(seconds: Callable[[], float]) -> None:
    """In this process, each step between two checks for drift takes as long as ``seconds`` says."""
    Tuner._last_window = lambda self: (seconds(),) * self._policy.drift_check_steps  # type: ignore[method-assign]


def note_comparisons(note: Callable[[Pairs, TuningPolicy, Comparison], Comparison]) -> None:
    """In this process, ``note`` sees every comparison, and says what its result is."""

    def noted(pairs: Pairs, policy: TuningPolicy, end_now: bool = False, in_doubt: bool = False) -> Comparison:
        return note(pairs, policy, judge(pairs, policy, end_now, in_doubt))

    search.judge = noted  # type: ignore[attr-defined]
