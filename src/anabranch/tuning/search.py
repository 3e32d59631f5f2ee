"""Search: profiles a live model, measures the network, plans, and tries plans in turns with the layout in force.

It does what ``decisions`` says; the tuner says when to search, and what becomes of the result. Methods that return a
``Schedule`` run for some steps, the same on all ranks; rank 0 decides from its own measurements.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeVar

import torch.distributed as dist

from anabranch.exchange.agreement import agree_on, latest_over_ranks, number_of_rank_0, true_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.observe.measure import WARM_UP, noise_note
from anabranch.observe.recorder import Recorder, order_note
from anabranch.planning.simulator import undelayed
from anabranch.tuning.calibration import CalibratedNetwork
from anabranch.tuning.candidates import BackgroundPlanner, Candidates, candidates, warm_up_kinds
from anabranch.tuning.cut_search import LATE, CutSearch, Graphs, Version, keep_cuts
from anabranch.tuning.decisions import (
    VERDICTS,
    BlockOfSteps,
    Candidate,
    Tried,
    Verb,
    in_words,
    is_worth,
    judge,
    most_gain,
    next_action,
    terms,
)
from anabranch.tuning.options import TuningOptions, TuningPolicy
from anabranch.tuning.runner import PlanRunner
from anabranch.tuning.trial import StepTimes, Trial
from anabranch.values.kinds.names import DENSE
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

log = logging.getLogger("anabranch")

T = TypeVar("T")
Schedule = Generator[None, None, T]  # one yield per averaged step

FROZEN = "parameters were frozen, unfrozen or replaced after the model was wrapped"
NOT_RECORDED = "no step could be recorded (is the whole model called again in backward, by checkpointing?)"
MIN_FIRST_SEARCH_S = 0.3  # a search that measures the network cannot cost much less, however short steps are
HELD_EARLY = "Compiled: searching was ended before graphs were compiled for the plan, so they stay cut finely."


@dataclass(slots=True)
class SearchBudget:
    """The account of one tuner. Every rank keeps one, and rank 0's decides.

    A search costs the pauses in which ranks measure or agree, changes of buckets, and what its steps take longer than
    those of the layout in force.
    """

    policy: TuningPolicy
    spent_s: float = 0.0
    trained_s: float = 0.0  # wall-clock time since the first step
    step_s: float = 0.0  # of the layout that was profiled first
    set_up_s: float = 0.0  # part of ``spent_s`` that is not held against the search: any use has to pay it once

    def charge(self, seconds: float) -> None:
        """Count a cost; a negative one counts as none, so that a fast trial does not pay for a slow one."""
        self.spent_s += max(0.0, seconds)

    @property
    def searching_s(self) -> float:
        """What searching has cost, set-up apart."""
        return self.spent_s - self.set_up_s

    @property
    def allowed_s(self) -> float:
        """What all searching may have cost until now: a share of training so far, or a first search if that is more."""
        first_s = max(self.policy.first_search_steps * self.step_s, MIN_FIRST_SEARCH_S)
        return max(first_s, self.policy.search_share * self.trained_s) + self.set_up_s

    @property
    def left_s(self) -> float:
        """What searching may still cost now."""
        return self.allowed_s - self.spent_s

    def summary(self) -> str:
        """A sentence for ``explain()``."""
        share = self.spent_s / self.trained_s if self.trained_s > 0 else 0.0
        return (
            f"Searching has cost {self.spent_s:.2f} s, {share:.1%} of training so far; allowed are "
            f"{self.allowed_s:.2f} s."
        )


@dataclass(eq=False)
class Search:
    """Searches for the fastest layout of one model.

    stage       what is done now, for explain()
    held        whether this rank was told to search no more
    trace       the last recorded one; None before a step was profiled
    trials      of the last search; the first is the layout that was in force when it began
    failure     why planning failed, if it did
    cut_lines   what cuts cost, for explain()
    """

    runner: PlanRunner
    collectives: Collectives
    options: TuningOptions
    graphs: Graphs
    model_name: str
    stage: str = "settling"
    held: bool = False
    trace: Trace | None = None
    trials: Sequence[Trial] = ()
    failure: str = ""
    cut_lines: Sequence[str] = ()
    _best: Trial | None = None  # the layout in force while others are tried
    _beaten: Trial | None = None  # the one before it
    _began_at: int = 0  # step

    def __post_init__(self) -> None:
        self.policy = self.options.policy
        self.budget = SearchBudget(self.policy)
        self.network = CalibratedNetwork(self.options.network, self.runner.lanes)

    # Decisions of rank 0.

    def as_rank_0(self, number: int) -> int:
        """Rank 0's number, from 0 to 255, on every rank. Collective."""
        return number_of_rank_0(number, self.runner.control)()

    @property
    def _is_over(self) -> bool:
        """Whether no more plans shall be tried: this rank was told to hold, or the search has taken long enough."""
        return self.held or self.runner.timer.steps_done - self._began_at >= self.policy.max_search_steps

    def goes_on(self, gain: float = inf) -> bool:
        """Whether rank 0 has time and budget left for a gain as large as this one. Collective."""
        return bool(self.as_rank_0(is_worth(gain, self.budget.left_s, self._is_over, self.policy)))

    # Observe: profile the layout in force, and know the network.

    def _timed(self, label: str, plan: Plan | None, count: int | None = None) -> Schedule[Trial]:
        """Time some steps of the layout in force, the buckets of the last one, too."""
        count = self.policy.trial_steps if count is None else count
        yield from steps(count - 1)
        with self.runner.timer.bucket_timing():
            yield
        self.runner.timer.clock.settle()
        return Trial.of(label, plan, self.runner.timer.last_steps(count), self.runner.timer.clock)

    def begin(self) -> None:
        """Begin a search: the steps of the one before do not count any more (``max_search_steps``)."""
        self._began_at = self.runner.timer.steps_done

    def begin_with(self, label: str, plan: Plan | None, count: int | None = None) -> Schedule[Trial]:
        """Begin a search: time the layout in force, whose step time plans must beat."""
        self.begin()
        self._best = yield from self._timed(label, plan, count)
        self.trials = [self._best]
        return self._best

    def profiled(self, label: str, plan: Plan | None) -> Schedule[Trial]:
        """Begin a search: time the layout in force as ``begin_with`` does, and record its trace."""
        self.failure = ""
        if self.runner.launcher is not None:
            self.runner.launcher.errors.postpone()
        with Recorder(self.runner.timer, self.runner.parameters) as recorder:
            trial = yield from self.begin_with(label, plan, self.options.profile_steps)
        self.budget.step_s = self.budget.step_s or trial.step_s
        # What is frozen has no gradient in the trace, and may be frozen on one rank alone.
        for holds, failure in (self.runner.trains_the_same(), FROZEN), (recorder.steps > 0, NOT_RECORDED):
            if not true_on_all_ranks(holds, self.runner.control):
                self.failure = failure
                return trial
        trace = recorder.trace({"model": self.model_name})
        self._warn(order_note(trace))
        trace = latest_over_ranks(trace, self.runner.control)
        if plan is not None and self.network.known is not None:
            trace = undelayed(trace, plan, self.network.known)
        self.trace = agree_on(Trace, trace, self.runner.control)
        if self.trace.tensors[0].ready_s > self.policy.late_gradients * self.trace.backward_s:
            self._warn(f"{LATE}: nothing of their communication can be hidden")
            self.graphs.note_late(LATE)
        return trial

    def why_not(self) -> str:
        """Why a search is not worth while, once the layout in force was profiled; empty if it is."""
        if self.failure:
            return self.failure
        share = most_gain(self.best)
        if self.goes_on(share):
            return ""
        if self.as_rank_0(self._is_over):
            return f"the search was ended, or had taken its {self.policy.max_search_steps} steps (max_search_steps)"
        return f"only {share:.1%} of a step waits for communication"

    def measure(self) -> None:
        """Measure the network, unless the user gave one. Collective."""
        if self.network.agree_on_given():
            return
        self.stage = "measuring the network"
        kinds = [DENSE, *self.options.kinds]
        if self.collectives.residuals.warmup_steps > self.runner.timer.steps_done:
            kinds += self._kinds_for_warm_up()
        probes = {kind: self.collectives.family(kind).probe(kind) for kind in dict.fromkeys(kinds)}
        lanes = self.runner.lanes
        lanes.grow(min(self.options.lanes or 2, lanes.max_lanes))
        if self.collectives.nodes is not None:
            lanes.use_nodes(self.collectives.nodes, [0])
        network = self.network.measure(self.runner.device, probes, self._known_trace.nbytes, self.budget.left_s)
        self.budget.set_up_s += float(network.meta.get(WARM_UP) or 0.0)
        self._warn(noise_note(network))

    def renew_network(self) -> None:
        """Calibrate the network, or measure it again, where it predicts the layout in force worse than before."""
        if self.network.known is None:  # the first search was not worth while
            self.measure()
            return
        for renew in (partial(self._calibrate, several_lanes=False), self.measure):
            if self.as_rank_0(self.network.outdated(self._known_trace, self.best, self.policy.max_drift)):
                renew()

    def _calibrate(self, several_lanes: bool) -> bool:
        """Calibrate the network, and how long computing takes, by the trials so far; whether the network changed."""
        self.trace = self.network.trace_under(self._known_trace, self.best, self.trials[0])
        return self.network.calibrate(self.trace, self.trials, several_lanes)

    # Propose and try.

    def warm_up(self) -> Schedule[None]:
        """While an exchange with residuals must wait, search among those without, so that these steps are fast, too."""
        if self.runner.timer.steps_done >= self.collectives.residuals.warmup_steps:
            return
        kinds = [kind for kind in self._kinds_for_warm_up() if kind in self._known_network.curves]
        yield from self.run(replace(self.options, kinds=tuple(kinds)))
        self.stage = f"running {self.best.label} while training warms up"
        waited = self.collectives.residuals.warmup_steps - self.runner.timer.steps_done
        yield from steps(waited)
        self._began_at += waited  # steps of training, not of the search

    def run(self, options: TuningOptions, found: Sequence[Candidate] = ()) -> Schedule[None]:
        """Plan, try and calibrate as long as rank 0 finds it worth while; the fastest layout is in force then.

        ``found``: candidates that are known already.
        """
        done, changed = Verb.START, False
        while True:
            trace, network = self._known_trace, self._known_network
            failed, left_s = bool(self.failure), self.budget.left_s
            tried = Tried(trace, network, self.best, self.trials, found, done, changed, failed, left_s, self._is_over)
            action = self.as_rank_0(next_action(tried, self.policy))
            if action == Verb.STOP:
                return
            if action >= Verb.TRY:
                number = action - Verb.TRY
                (label, plan), found = found[number], found[number + 1 :]
                yield from self._try(label, plan, tried)
                continue
            done, found = Verb(action), []
            if done in (Verb.CALIBRATE_COSTS, Verb.CALIBRATE_CONTENTION):
                changed = self._calibrate(several_lanes=done == Verb.CALIBRATE_CONTENTION)
            else:
                found = yield from self._plan(replace(options, lanes=1) if done == Verb.PLAN_ON_ONE_LANE else options)

    def _plan(self, options: TuningOptions) -> Schedule[Candidates]:
        """Have rank 0 plan while training continues; returns its candidates, on every rank."""
        self.stage = "planning"
        make = partial(candidates, options, self._known_trace, self._known_network)
        planner = BackgroundPlanner(make, self.runner.control)
        yield
        while not planner.done():
            yield
        found, self.failure = planner.outcome()
        if self.failure:
            self._warn(f"planning failed, {self.default_label} stay: {self.failure}")
        return [(label, plan) for label, plan in found if plan.lanes <= self.runner.lanes.max_lanes]

    def _try(self, label: str, plan: Plan | None, tried: Tried) -> Schedule[None]:
        """Compare a layout with the best so far; the faster one is the best, and in force."""
        before, (_, simulated, more_faithful, min_gain) = self.best, terms(tried, plan, self.policy)
        self.stage = f"trying {label}"
        best, challenger, faster = yield from self._challenge(
            before, label, plan, min_gain=min_gain, in_doubt=more_faithful
        )
        if more_faithful or (1 - challenger.step_s / best.step_s) / 2 < simulated < inf:
            challenger = replace(challenger, doubtful=False)  # it had been predicted, or noise does no harm
        self._beaten = best if faster else self._beaten
        self.trials = [*(best if trial.plan == before.plan else trial for trial in self.trials), challenger]
        self._best = challenger if faster else best

    def win_again(self, kept: Trial) -> Schedule[None]:
        """Have a plan win once more against the layout that it beat; the faster one is the best, and in force."""
        self.stage = f"trying {kept.label} once more, since noise could have won"
        beaten = self._beaten
        assert beaten is not None  # by the doubtful win
        self.runner.use_plan(beaten.plan)
        yield from steps(self.policy.settle_steps)
        other = yield from self._timed(beaten.label, beaten.plan)
        self.budget.charge(len(other.steps) * (other.step_s - kept.step_s))
        other, again, faster = yield from self._challenge(other, kept.label, kept.plan, to_the_end=True)
        tried = {trial.plan: trial for trial in self.trials} | {other.plan: other, again.plan: again}
        best = self._best = replace(again if faster else other, doubtful=False)
        self.trials = [best if trial.plan == best.plan else trial for trial in tried.values()]

    def _challenge(
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
        ``also(ours)``: what changes with the plan, to ours or back.
        """

        def change(ours: bool) -> None:
            if plan != best.plan:
                self.runner.use_plan(plan if ours else best.plan)
            also(ours)

        policy = self.policy if min_gain is None else replace(self.policy, min_gain=min_gain)
        layouts = (best.label, best.plan), (label, plan)
        theirs, tried, challenger_runs = best, Trial(label, plan, ()), False
        pairs: list[tuple[BlockOfSteps, BlockOfSteps]] = []
        while True:
            # The layout that runs goes on, then the other one: A B B A A B … has the fewest changes.
            first = yield from self._timed(*layouts[challenger_runs])
            theirs = theirs if challenger_runs else first
            challenger_runs = not challenger_runs
            change(challenger_runs)
            second = yield from self._timed_after_change(*layouts[challenger_runs], reference=theirs)
            theirs, ours = (first, second) if challenger_runs else (second, first)
            best, tried = best.with_more(theirs), tried.with_more(ours)
            pairs.append((theirs.steps_s, ours.steps_s))
            end_now = self._is_over or (self.budget.left_s <= 0 and not to_the_end)
            found = judge(pairs, policy, end_now, in_doubt)
            found = found._replace(verdict=VERDICTS[self.as_rank_0(VERDICTS.index(found.verdict))])
            if found.verdict != "undecided":
                break
        faster = found.verdict == "faster"
        if faster != challenger_runs:
            change(faster)
            yield from steps(self.policy.settle_steps)
        return best, replace(tried, result=in_words(found, pairs), doubtful=found.doubtful), faster

    def _timed_after_change(self, label: str, plan: Plan | None, reference: Trial) -> Schedule[Trial]:
        """Time a layout that was changed to; what it took longer than the layout in force is charged to the budget."""
        yield from steps(self.policy.settle_steps)
        trial = yield from self._timed(label, plan)
        since_change = self.runner.timer.last_steps(len(trial.steps) + self.policy.settle_steps)
        whole_s = [StepTimes.of(step, self.runner.timer.clock).whole_s for step in since_change]
        self.budget.charge(sum(whole_s) - len(whole_s) * reference.step_s)
        return trial

    # Graphs of a compiled model.

    def cut_graphs(self) -> Schedule[None]:
        """Have graphs compiled once more, cut where the best layout needs it, and keep what is fastest."""
        graphs, can_change = self.graphs, self.graphs.can_change
        if not self.as_rank_0(can_change and not self.held):
            keep_cuts(graphs, self.best.plan, self._known_trace, self.network.known, self.policy)
            if can_change and graphs.parts is None:  # the plan needs fewer cuts
                self.cut_lines = [HELD_EARLY]
            return
        if self.as_rank_0(self.best.doubtful and self.best.plan is not None):  # before graphs are compiled
            yield from self.win_again(self.best)
        self.stage = f"compiling for {self.best.label}"
        cuts = CutSearch(graphs, self.policy, self.best, self.trials, self._known_trace, self.network.known)
        for versions, own_choice in cuts.offers():
            if chosen := self.as_rank_0(own_choice):
                yield from self._try_version(cuts, versions[chosen - 1])
        cuts.end()
        self.cut_lines, self.trials, self._best = cuts.lines, cuts.trials, cuts.best
        if self.network.known is not None:  # predictions know computing with the cuts in force
            self.trace = self.network.trace_under(self._known_trace, self._best, self.trials[0])

    def _try_version(self, cuts: CutSearch, version: Version) -> Schedule[None]:
        """Compile a version, whose first step no trial counts, and keep it if it is faster than the best."""
        graphs, best, before = self.graphs, cuts.best, self.graphs.parts
        graphs.cut_for(version.parts)
        yield from steps(self.policy.warmup_steps)
        graphs.cut_for(before)
        yield from steps(self.policy.settle_steps)
        again, tried, faster = yield from self._challenge(
            replace(best, steps=(), detailed=()),
            version.label,
            version.plan,
            min_gain=cuts.min_gain(version),
            in_doubt=version.plan == best.plan,
            also=lambda ours: graphs.cut_for(version.parts if ours else before),
        )
        cuts.note(version, before, again, tried, faster)

    # What is known.

    @property
    def default_label(self) -> str:
        return self.runner.layout.default_label

    @property
    def best(self) -> Trial:
        """The fastest layout so far, which is in force."""
        assert self._best is not None  # once a layout has been timed
        return self._best

    @property
    def _known_trace(self) -> Trace:
        assert self.trace is not None  # once a step has been profiled
        return self.trace

    @property
    def _known_network(self) -> Network:
        assert self.network.known is not None  # once it was measured
        return self.network.known

    def _kinds_for_warm_up(self) -> list[str]:
        return warm_up_kinds(self.options.kinds, self.collectives, self.runner.parameters)

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0; not by ``warnings``, which under -W error would stop this rank alone."""
        if text and dist.get_rank(self.runner.control) == 0:
            log.warning("anabranch: %s", text)


def steps(count: int) -> Schedule[None]:
    """Wait ``count`` steps, such as those that a change of layout disturbs."""
    yield from [None] * count
