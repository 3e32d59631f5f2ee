"""Trials on the live model: a plan and the layout in force run in turns, a block of steps each.

Every rank runs the same schedule; rank 0 decides from its own times, and tells the others.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from statistics import median
from typing import TypeVar

from anabranch.tuning.budget import SearchBudget
from anabranch.tuning.comparison import Comparison, Verdict, compare
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.runner import PlanRunner
from anabranch.tuning.trial import StepTimes, Trial
from anabranch.values.plan import Plan

T = TypeVar("T")
Schedule = Generator[None, None, T]  # one yield per averaged step

VERDICTS: tuple[Verdict, ...] = ("not faster", "faster", "undecided")  # what rank 0 sends
Pairs = list[tuple[tuple[float, ...], tuple[float, ...]]]  # blocks of the layout in force and of the other, in seconds


class LiveTrials:
    """Runs blocks of steps, and compares two layouts.

    decide        a decision of rank 0, as a small number, on every rank; collective
    in_a_hurry    whether no comparison shall go on that the steps so far can end
    """

    def __init__(
        self,
        runner: PlanRunner,
        policy: TuningPolicy,
        budget: SearchBudget,
        decide: Callable[[int], int],
        in_a_hurry: Callable[[], bool],
    ) -> None:
        self._runner = runner
        self._timer = runner.timer
        self._policy = policy
        self._budget = budget
        self._decide = decide
        self._in_a_hurry = in_a_hurry

    def change_to(self, plan: Plan | None) -> Schedule[None]:
        """Change to another layout from the next step on, and wait until it has settled."""
        self._runner.use_plan(plan)
        yield from steps(self._policy.settle_steps)

    def timed(self, label: str, plan: Plan | None, count: int | None = None) -> Schedule[Trial]:
        """Time some steps of the layout in force, the buckets of the last one, too."""
        count = self._policy.trial_steps if count is None else count
        yield from steps(count - 1)
        with self._timer.bucket_timing():
            yield
        self._timer.clock.settle()
        return Trial.of(label, plan, self._timer.last_steps(count), self._timer.clock)

    def challenge(
        self,
        best: Trial,
        label: str,
        plan: Plan | None,
        to_the_end: bool = False,
        min_gain: float | None = None,
        in_doubt: bool = False,
        also: Callable[[bool], None] = lambda _: None,
    ) -> Schedule[tuple[Trial, Trial, bool]]:
        """Compare a plan with the layout in force, ``best``; the faster one is in force afterwards.

        Returns both trials, with all their steps, and whether the plan was faster. ``to_the_end``: whatever it costs.
        ``min_gain``: in place of the policy's. ``in_doubt``: whether the plan stays where the steps do not tell.
        ``also(ours)``: what changes beside the plan, to ours or back.
        """

        def change(ours: bool) -> None:
            if plan != best.plan:
                self._runner.use_plan(plan if ours else best.plan)
            also(ours)

        policy = self._policy if min_gain is None else replace(self._policy, min_gain=min_gain)
        theirs = yield from self.timed(best.label, best.plan)
        change(True)
        ours = yield from self._after_change(label, plan, theirs)
        best, tried = best.with_more(theirs), ours
        pairs = [(theirs.steps_s, ours.steps_s)]
        challenger_runs = True
        while (found := self._compared(pairs, policy, to_the_end, in_doubt)).verdict == "undecided":
            # The layout that runs goes on, then the other one: A B B A A B … has the fewest changes.
            if challenger_runs:
                ours = yield from self.timed(label, plan)
                change(False)
                theirs = yield from self._after_change(best.label, best.plan, theirs)
            else:
                theirs = yield from self.timed(best.label, best.plan)
                change(True)
                ours = yield from self._after_change(label, plan, theirs)
            challenger_runs = not challenger_runs
            best, tried = best.with_more(theirs), tried.with_more(ours)
            pairs.append((theirs.steps_s, ours.steps_s))
        faster = found.verdict == "faster"
        if faster != challenger_runs:
            change(faster)
            yield from steps(self._policy.settle_steps)
        return best, replace(tried, result=_in_words(found, pairs), doubtful=found.doubtful), faster

    def _after_change(self, label: str, plan: Plan | None, reference: Trial) -> Schedule[Trial]:
        """Time a layout that was changed to; what it took longer than the layout in force is charged to the budget."""
        yield from steps(self._policy.settle_steps)
        trial = yield from self.timed(label, plan)
        since_change = self._timer.last_steps(len(trial.steps) + self._policy.settle_steps)
        whole_s = [StepTimes.of(step, self._timer.clock).whole_s for step in since_change]
        self._budget.charge(sum(whole_s) - len(whole_s) * reference.step_s)
        return trial

    def _compared(self, pairs: Pairs, policy: TuningPolicy, to_the_end: bool, in_doubt: bool) -> Comparison:
        """This rank's comparison of these pairs, with rank 0's verdict."""
        found = compare(pairs, policy)
        verdict = self._verdict(found, policy.min_gain, to_the_end)
        if in_doubt and verdict == "not faster" and found.gain >= policy.min_gain:
            verdict = "faster"
        return found._replace(verdict=VERDICTS[self._decide(VERDICTS.index(verdict))])

    def _verdict(self, found: Comparison, min_gain: float, to_the_end: bool) -> Verdict:
        over = self._in_a_hurry() or (self._budget.left_s <= 0 and not to_the_end)
        if found.verdict == "undecided" and over:
            likely = found.gain > (max(min_gain, found.uncertainty / 2) if min_gain > 0 else min_gain)
            return "faster" if likely else "not faster"
        return found.verdict


def _in_words(found: Comparison, pairs: Pairs) -> str:
    """The result of a comparison that is over."""
    if found.verdict == "faster":  # or more faithful, and not much slower
        ratio = median(s for theirs, _ in pairs for s in theirs) / median(s for _, ours in pairs for s in ours)
        return f"{ratio:.2f}× as fast"
    steps_run = sum(len(ours) for _, ours in pairs)
    return f"{'slower' if found.gain < 0 else 'not clearly faster'}, given up after {steps_run} steps"


def steps(count: int) -> Schedule[None]:
    """Wait for so many steps."""
    yield from [None] * count
