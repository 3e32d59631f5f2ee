"""The tuner: profiles, measures, plans, tries, keeps the fastest layout, and watches for drift, within a budget.

Every rank follows the same schedule, counted in averaged backward passes, which happen equally often on each rank.
The tuner lets ranks communicate only when it is made and at the end of such a backward: in a forward, other ranks may
not take part (once, before the first planned bucket, ranks also compare the checkpoints that they loaded). Everything
that depends on a measurement is decided by rank 0 and sent to the others before any rank acts on it.
"""

import logging
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import ClassVar

import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.comm.agree import agree_on, from_rank_0, latest_over_ranks, number_of_rank_0, true_on_all_ranks
from anabranch.comm.collectives import Collectives
from anabranch.comm.exchange import Group
from anabranch.errors import CollectiveError
from anabranch.network import Network
from anabranch.observe.environment import network_note
from anabranch.observe.measure import WARM_UP, noise_note
from anabranch.observe.recorder import Recorder, order_note
from anabranch.observe.step_context import StepContext
from anabranch.plan import Plan
from anabranch.planners.ladder import FREE
from anabranch.trace import Trace
from anabranch.tuning.background_planner import BackgroundPlanner, Candidates
from anabranch.tuning.budget import SearchBudget
from anabranch.tuning.candidates import candidates
from anabranch.tuning.comparison import drift
from anabranch.tuning.cut_trials import CutTrials
from anabranch.tuning.drift_watch import DriftWatch
from anabranch.tuning.explain import Findings
from anabranch.tuning.gains import error_of_layout, expected_gain, simulated_gain
from anabranch.tuning.graph_cuts import LATE, NOT_COMPILED, Graphs, needed_parts, parts_of
from anabranch.tuning.live_network import LiveNetwork
from anabranch.tuning.live_trials import LiveTrials, Schedule, steps
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.runner import Layout, PlanRunner
from anabranch.tuning.switches import timeline_path, write_timeline
from anabranch.tuning.training_cache import TrainingCache
from anabranch.tuning.trial import Trial, allowed_loss
from anabranch.tuning.warm_up import may_run, warm_up_kinds

log = logging.getLogger("anabranch")

SETTLING = "settling"
GIVEN = "the plan it was given"
FROZEN = "parameters were frozen, unfrozen or replaced after the model was wrapped"
HELD = "hold"
OVER = object()
NEVER = sys.maxsize
CONFIRM_AFTER_CHECKS = 3  # checks of the step time before a plan whose win is doubtful must win again
NOT_FASTER = "no plan was clearly faster"

Agree = Callable[[TuningOptions], TuningOptions]


class Tuner:
    """Tunes one DataParallel, which calls ``before_forward`` and ``after_forward``.

    group        sends gradients
    model_name   is written into traces
    cache        where earlier trainings have kept their choices; None for no cache
    agree_later  compares models and options between ranks, at the end of the first step; None: they have been compared
    graphs       the graphs that torch.compile makes of the model
    """

    _noise_was_logged: ClassVar[bool] = False  # once per process is enough

    def __init__(
        self,
        layout: Layout,
        group: Group,
        collectives: Collectives,
        options: TuningOptions,
        policy: TuningPolicy,
        model_name: str,
        cache: TrainingCache | None = None,
        agree_later: Agree | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.collectives = collectives
        self.runner = PlanRunner(layout, group, collectives, self._step_ended)
        self.trace: Trace | None = None
        self.trials: list[Trial] = []  # of the last search; the first is the layout that was in force when it began
        self.kept: Trial | None = None  # the result of the last search
        self.failure = ""  # why planning failed, if it did
        self.stage = SETTLING
        self.replan_requested = False
        self.hold_requested = False
        self._options = options
        self._policy = policy
        self._model_name = model_name
        self._cache = cache
        self._agree_later = agree_later
        self._graphs = graphs if graphs is not None else NOT_COMPILED
        self._timer = self.runner.timer
        self._budget = SearchBudget(policy)
        self._live_network = LiveNetwork(self.runner, collectives, options.network)
        self._live = LiveTrials(self.runner, policy, self._budget, self._as_rank_0, lambda: self.hold_requested)
        self._cuts = CutTrials(self._graphs, self._live, policy, self._as_rank_0)
        self._best: Trial | None = None  # the layout in force while others are tried
        self._beaten: Trial | None = None  # the one before it
        self._default_step_s: float | None = None  # the last measured step of the layout's own buckets
        self._patience = 1  # number of the first drift check that may start another search
        self._search_cost_s = 0.0  # of the last search
        self._first_step_at_s: float | None = None
        self._timeline_path = timeline_path(group.rank())
        try:
            self._schedule = self._tuning()
            self._advance()
        except BaseException:
            self.runner.close()
            raise

    # Called by DataParallel.

    def before_forward(self, averaged: bool) -> None:
        """Call this before a forward that will be differentiated; ``averaged``: its gradients will be averaged."""
        began_s = perf_counter()
        changes = self.runner.changes_next
        if self._first_step_at_s is None:
            self._first_step_at_s = began_s
        self.runner.before_forward(averaged)
        if changes:
            self._budget.charge(perf_counter() - began_s)

    def after_forward(self, output: object, averaged: bool = True) -> None:
        """Call this with the output of such a forward."""
        self._timer.forward_ended(output, averaged)

    def hold(self) -> None:
        """Keep the best layout seen so far and never plan again, from rank 0's next decision on; only its call counts.

        The call itself does not communicate and changes nothing, so ranks that do not call it go on with the others.
        """
        self.hold_requested = True

    def close(self) -> None:
        """Release hooks, threads and groups."""
        with suppress(ValueError):  # another thread is in a step, when the program ends without waiting for it
            self._schedule.close()
        self._timer.close()
        self.runner.close()
        if self.kept is None:
            write_timeline(self._best.timeline if self._best is not None else None, self._timeline_path)

    # Read by observers and explain().

    @property
    def steps_done(self) -> int:
        """The averaged steps of this training, those before a checkpoint that was loaded included."""
        return self._timer.steps_done

    @property
    def network(self) -> Network | None:
        """The network as measured or given; None before it is known."""
        return self._live_network.network

    @property
    def control(self) -> Group:
        """A group of the same ranks for small messages in host memory, used by nothing else."""
        return self.runner.lanes.control

    def current_step(self) -> StepContext:
        """The step that is running, or that ends now."""
        plan = self.runner.plan_in_force
        tried = self.kept if self.kept is not None and plan is not None and self.kept.plan == plan else None
        timeline = tried.timeline if tried is not None else None
        predicted_s = self._live_network.predicted_s(self.trace, plan)
        communication_s = timeline.communication_s if timeline is not None else None
        return StepContext(self.steps_done + 1, plan, self.stage, predicted_s, communication_s)

    def findings(self) -> Findings:
        """The results so far."""
        on_cpu = self.runner.device.type == "cpu"
        return Findings(
            stage=self.stage,
            trace=self.trace,
            network=self.network,
            trials=self.trials,
            kept=self.kept if self.kept is not None and self.kept.plan == self.runner.plan else None,
            plan=self.runner.plan,
            network_note=network_note() if on_cpu else None,  # only Gloo is emulated
            exchange_lines=self.collectives.summary(),
            errors=self.collectives.relative_errors(),
            cost=self._budget.summary() if self.trials else "",
            graph_lines=[*self._graphs.lines(), *self._cuts.lines],
        )

    @property
    def _trace(self) -> Trace:
        assert self.trace is not None  # once a step has been profiled
        return self.trace

    @property
    def _default_label(self) -> str:
        return self.runner.layout.default_label

    @_disable_dynamo
    def _step_ended(self) -> None:
        began_s, stage = perf_counter(), self.stage
        self._graphs.step_ended()
        self.runner.check_loaded()
        self.collectives.on_step_end()
        if self.runner.stale:
            self._schedule.close()
            self.stage = f"no longer planning: {FROZEN}"
        try:
            self._advance()
        except Exception as error:
            self.stage = f"stopped planning: {type(error).__name__}: {error}"
            if type(error) is RuntimeError:  # of Gloo, which does not say whose message it was
                raise CollectiveError(
                    f"ranks could not agree on a plan ({stage}): {error}. Another rank has died, stalled or left this "
                    "step: look for the first error among all ranks"
                ) from error
            raise
        ended_s = perf_counter()
        self._budget.charge(ended_s - began_s)
        self._budget.trained_s = ended_s - (self._first_step_at_s or began_s)

    def _advance(self) -> None:
        if next(self._schedule, OVER) is OVER:
            self._graphs.settle()
            self._call_after(NEVER)

    def _call_after(self, count: int) -> None:
        """Call ``_step_ended`` again after so many steps, and time those before coarsely, where nothing needs more."""
        if not self.collectives.keep_memory:
            self._timer.call_after(count)

    def _watched(self, count: int) -> Schedule[None]:
        """Wait for so many steps, of which only the whole time counts."""
        last = self.steps_done + count
        self._call_after(count)
        while self.steps_done < last:
            yield

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0; not by ``warnings``, which under -W error would stop this rank alone."""
        if text and dist.get_rank(self.control) == 0:
            log.warning("anabranch: %s", text)

    # Decisions of rank 0.

    def _as_rank_0(self, number: int) -> int:
        """Rank 0's number, from 0 to 255, on every rank. Collective."""
        return number_of_rank_0(number, self.control)()

    def _goes_on(self, gain: float = math.inf) -> bool:
        """Whether the search goes on, given the gain to expect: rank 0 finds it large enough, and was not told to hold.

        Where the budget is used up, only an obvious gain is: its trial pays for itself at once.
        """
        policy = self._policy
        least = policy.min_predicted_gain if self._budget.left_s > 0 else policy.obvious_gain
        return bool(self._as_rank_0(gain > least and not self.hold_requested))

    # The schedule of tuning.

    def _tuning(self) -> Schedule[None]:
        agreed_later = self._agree_later is not None
        if self._agree_later is not None:
            yield
            self._options = self._agree_later(self._options)
            self._agree_later = None
            self._options.check_plan_fits(self.runner.parameters, self.collectives)
        if self._options.no_plan_reason:
            self.stage = f"not planning: {self._options.no_plan_reason}"
            return
        if self._options.plan is not None:
            yield from self._run_given_plan()
            return
        if self._options.profile_steps == 0:
            self.stage = f"running {self._default_label}: profile_steps is 0"
            return
        self._begin_with_newest(may_communicate=not agreed_later)
        yield  # the first input shows the batch size, which is a part of the cache's key
        if not (yield from self._run_cached_choice()):
            yield from steps(self._policy.warmup_steps - 1)
            yield from self._first_search()
        while self.kept is not None:
            yield from self._confirm(self.kept)
            why = yield from self._until_drift()
            if not why:
                self.stage = f"running {self.kept.label}, held"
                return
            if not true_on_all_ranks(self.runner.trains_the_same(), self.control):
                break
            yield from self._search_again(self.kept, why)
        self.stage = f"no longer planning: {self.failure or FROZEN}"

    def _run_given_plan(self) -> Schedule[None]:
        """Run the user's plan, whatever its step time."""
        assert isinstance(self._options.plan, Plan)  # with_plan_loaded() has replaced a path
        plan = agree_on(Plan, self._options.plan, self.control)
        self._live_network.agree_on_given()
        self.stage = "running the plan it was given"
        self.runner.use_plan(plan)
        self._graphs.cut_for(parts_of(plan))
        yield from steps(self._policy.warmup_steps)
        if self._options.profile_steps:
            self._keep((yield from self._profiled(GIVEN, plan)))
        while not self.hold_requested:
            yield from self._watched(self._policy.drift_check_steps)
        self.stage = f"running {GIVEN}, held"

    def _begin_with_newest(self, may_communicate: bool) -> None:
        """Run what an earlier training chose from the first step on, in the hope that its batch was the same."""
        if self._cache is None or not may_communicate:
            return
        if cached := self._cache.read_newest(self.control, self.runner.lanes.max_lanes):
            self._graphs.cut_for(cached.parts)  # at once, and once
            if cached.plan is not None and self._may_run(cached.plan):
                self.runner.use_plan(cached.plan)

    def _run_cached_choice(self) -> Schedule[bool]:
        """Run what an earlier training chose, and time some steps of it; whether they took as long as then."""
        cached = self._cache.read(self.control, self.runner.lanes.max_lanes) if self._cache is not None else None
        if cached is None:
            self._change_to(None)  # the newest choice was for another batch
            self._graphs.cut_for(None)
            return False
        self._graphs.cut_for(cached.parts)
        self.trace, self._default_step_s = cached.trace, cached.default_step_s
        self._live_network.network = cached.network
        label, origin = cached.label, f", as cached on {cached.date}"
        self.stage = f"checking {label}{origin}"
        if not self._may_run(cached.plan):
            self._change_to(None)
            yield from steps(self._policy.warmup_steps - 1)
            self._best = yield from self._live.timed(self._default_label, None)
            self.trials = [self._best]
            yield from self._search_warm_up()
        self._change_to(cached.plan)
        yield from steps(self._policy.warmup_steps)
        self._best = yield from self._live.timed(label, cached.plan, self._options.profile_steps)
        self._budget.step_s = cached.default_step_s
        usual = (cached.step_s - cached.spread_s / 2, cached.step_s, cached.step_s + cached.spread_s / 2)
        moved = drift([usual], [self._best.steps_s], self._policy)
        if self._as_rank_0(moved is None):
            self.trials = [self._best]
            self._graphs.settle()
            self._conclude("it was fastest", origin)
            return True
        was_s, is_s = cached.step_s, self._best.step_s
        log.info("anabranch: %s%s: %.2f ms a step, not %.2f: searching", label, origin, is_s * 1e3, was_s * 1e3)
        self._graphs.cut_for(None)
        yield from self._live.change_to(None)
        return False

    def _change_to(self, plan: Plan | None) -> None:
        """Run this plan, or the layout's own buckets, unless the next step does so anyway."""
        if self.runner.plan != plan:
            self.runner.use_plan(plan)

    def _may_run(self, plan: Plan | None) -> bool:
        return may_run(plan, self.steps_done, self.collectives)

    def _first_search(self) -> Schedule[None]:
        self.stage = "profiling"
        self._best = yield from self._profiled(self._default_label, None)
        if self.failure:
            return
        if not (why_not := self._why_not_search(self._best)):
            self._measure()
            yield from self._search_warm_up()
            yield from self._search(self._options)
        yield from self._cut_graphs(self._best)
        self._conclude(why_not or NOT_FASTER)
        self._search_cost_s = self._budget.spent_s - self._budget.set_up_s

    def _cut_graphs(self, best: Trial) -> Schedule[None]:
        """Have graphs compiled once more, cut where the best layout needs it, and keep what is fastest."""
        if not self._as_rank_0(self._graphs.can_change and not self.hold_requested):
            if not self._graphs.would_change(parts := needed_parts(self._trace, best.plan, self.network)):
                self._graphs.cut_for(parts)  # for graphs that torch makes later
            self._graphs.settle()
            return
        if self._as_rank_0(best.doubtful and best.plan is not None):  # before graphs are compiled for it alone
            best = yield from self._win_again(best)
        self.stage = f"compiling for {best.label}"
        yield from self._cuts.settle(best, self.trials, self._trace, self.network)
        self.trials, self._best = self._cuts.trials, self._cuts.best

    def _why_not_search(self, running: Trial) -> str:
        """Why a search is not worth while; empty if it is."""
        if self.failure:
            return self.failure
        # No plan can gain more than the time that the layout's own buckets leave exposed.
        share = running.exposed_s / running.step_s if running.plan is None else math.inf
        return "" if self._goes_on(share) else f"only {share:.1%} of a step waits for communication"

    def _search_warm_up(self) -> Schedule[None]:
        """While an exchange with residuals must wait, search among those without, so that these steps are fast, too."""
        assert self.network is not None and self._best is not None
        if self.steps_done >= self.collectives.warmup_steps:
            return
        kinds = [kind for kind in self._warm_up_kinds() if kind in self.network.curves]
        yield from self._search(replace(self._options, kinds=tuple(kinds)))
        self.stage = f"running {self._best.label} while training warms up"
        yield from steps(self.collectives.warmup_steps - self.steps_done)

    def _confirm(self, kept: Trial) -> Schedule[None]:
        """Have a plan whose win is doubtful win once more, later, against the layout that it beat."""
        if not self._as_rank_0(kept.doubtful and kept.plan is not None):
            return
        yield from self._watched(CONFIRM_AFTER_CHECKS * self._policy.drift_check_steps)
        if not self._goes_on():
            return
        yield from self._win_again(kept)
        self._conclude(f"{kept.label} did not win again")

    def _win_again(self, kept: Trial) -> Schedule[Trial]:
        """Have a plan win once more against the layout that it beat; returns the faster one, which is in force."""
        self.stage = f"trying {kept.label} once more, since noise could have won"
        beaten = self._beaten
        assert beaten is not None  # by the doubtful win
        yield from self._live.change_to(beaten.plan)
        other = yield from self._live.timed(beaten.label, beaten.plan)
        self._budget.charge(len(other.steps) * (other.step_s - kept.step_s))
        other, again, faster = yield from self._live.challenge(other, kept.label, kept.plan, to_the_end=True)
        tried = {trial.plan: trial for trial in self.trials} | {other.plan: other, again.plan: again}
        best = self._best = replace(again if faster else other, doubtful=False)
        self.trials = [best if trial.plan == best.plan else trial for trial in tried.values()]
        return best

    def _search_again(self, kept: Trial, why: str) -> Schedule[None]:
        """Profile in the layout in force, and try what the new trace calls for."""
        spent_s = self._budget.spent_s - self._budget.set_up_s
        self.stage = f"profiling again: {why}"
        self.failure = ""
        self._best = yield from self._profiled(kept.label, kept.plan)
        why_not = self._why_not_search(self._best)
        if not why_not:
            for renew in (partial(self._calibrate, several_lanes=False), self._measure):
                if self._as_rank_0(self._live_network.outdated(self._trace, self._best, self._policy.max_drift)):
                    renew()
            if self._best.plan is not None:
                yield from self._try(self._default_label, None)
            yield from self._search(self._options)
        self._conclude(why_not or NOT_FASTER)
        # Patience grows with every search: on a noisy machine the next drift is most likely noise, too.
        self._patience *= 2
        self._search_cost_s = self._budget.spent_s - self._budget.set_up_s - spent_s

    def _search(self, options: TuningOptions) -> Schedule[None]:
        """Try candidates on one lane, which shows the cost of messages; then on several, which shows their contention;
        then once more with both known."""
        yield from self._try_candidates(replace(options, lanes=1))
        self._calibrate(several_lanes=False)
        yield from self._try_candidates(options)
        if self._calibrate(several_lanes=True):
            yield from self._try_candidates(options)

    def _try_candidates(self, options: TuningOptions) -> Schedule[None]:
        """Try the candidates that have not been tried and are predicted to gain, the most promising first."""
        if self.failure or not self._goes_on():
            return
        self.stage = "planning"
        for label, plan in (yield from self._plan(options)):
            yield from self._try(label, plan)

    def _try(self, label: str, plan: Plan | None) -> Schedule[None]:
        """Compare a layout with the best so far, unless it was tried already or no gain is predicted."""
        assert self._best is not None
        assert self.network is not None
        expected = expected_gain(self._trace, plan, self._best, self.network, self._policy)
        simulated = simulated_gain(self._trace, plan, self._best.plan, self.network)
        more_faithful = error_of_layout(self._trace, plan) < error_of_layout(self._trace, self._best.plan)
        if more_faithful and expected >= -FREE:
            expected += FREE + self._policy.min_predicted_gain
        if any(trial.plan == plan for trial in self.trials) or not self._goes_on(expected):
            return
        self.stage = f"trying {label}"
        before = self._best
        min_gain = allowed_loss(before, self.trials) if more_faithful else self._policy.min_gain
        best, tried, faster = yield from self._live.challenge(before, label, plan, min_gain=min_gain)
        if more_faithful or (1 - tried.step_s / best.step_s) / 2 < simulated < math.inf:
            tried = replace(tried, doubtful=False)  # what was measured had been predicted, or noise does no harm
        self._beaten = best if faster else self._beaten
        self.trials = [*(best if trial.plan == before.plan else trial for trial in self.trials), tried]
        self._best = tried if faster else best

    def _profiled(self, label: str, plan: Plan | None) -> Schedule[Trial]:
        """Record the trace under the layout in force; its step time is the one that plans must beat."""
        self.collectives.postpone_samples()
        with Recorder(self._timer, self.runner.parameters) as recorder:
            trial = yield from self._live.timed(label, plan, self._options.profile_steps)
        self.trials = [trial]
        self._budget.step_s = self._budget.step_s or trial.step_s
        if not true_on_all_ranks(self.runner.trains_the_same(), self.control):
            self.failure = FROZEN  # what is frozen has no gradient in the trace, and may be frozen on one rank alone
            return trial
        if not true_on_all_ranks(recorder.steps > 0, self.control):
            self.failure = "no step could be recorded (is the whole model called again in backward, by checkpointing?)"
            return trial
        trace = recorder.trace({"model": self._model_name})
        self._warn(order_note(trace))
        self.trace = agree_on(Trace, latest_over_ranks(trace, self.control), self.control)
        if self.trace.tensors[0].ready_s > self._policy.late_gradients * self.trace.backward_s:
            self._warn(f"{LATE}: nothing of their communication can be hidden")
            self._graphs.note_late(LATE)
        return trial

    def _measure(self) -> None:
        """Measure the network, unless the user gave one."""
        if self._live_network.agree_on_given():
            return
        self.stage = "measuring the network"
        kinds = ["dense", *self._options.kinds]
        if self.collectives.warmup_steps > self.steps_done:
            kinds += self._warm_up_kinds()
        kinds = list(dict.fromkeys(kinds))
        lanes = min(self._options.lanes or 2, self.runner.lanes.max_lanes)
        self._live_network.measure(self._trace.nbytes, kinds, lanes, self._budget.left_s)
        set_up_s = self.network.meta.get(WARM_UP) if self.network is not None else None
        self._budget.set_up_s += set_up_s if isinstance(set_up_s, float) else 0.0
        if self.network is not None and not Tuner._noise_was_logged and (note := noise_note(self.network)):
            Tuner._noise_was_logged = True
            self._warn(note)

    def _warm_up_kinds(self) -> list[str]:
        return warm_up_kinds(self._options.kinds, self.collectives, self.runner.parameters)

    def _plan(self, options: TuningOptions) -> Schedule[Candidates]:
        """Have rank 0 plan while training continues; returns its candidates, on every rank."""
        assert self.network is not None
        make = partial(candidates, options, self._trace, self.network, self._policy)
        planner = BackgroundPlanner(make, self.control)
        yield
        while not planner.done():
            yield
        found, self.failure = planner.outcome()
        if self.failure:
            self._warn(f"planning failed, {self._default_label} stay: {self.failure}")
        return [(label, plan) for label, plan in found if plan.lanes <= self.runner.lanes.max_lanes]

    def _calibrate(self, several_lanes: bool) -> bool:
        return self._live_network.calibrate(self._trace, self.trials, several_lanes)

    def _keep(self, trial: Trial) -> None:
        self.kept = trial
        write_timeline(trial.timeline, self._timeline_path)

    def _conclude(self, reason: str, origin: str = "") -> None:
        """Keep the best layout, which is in force; also for the next start of this training, if this one found it."""
        best = self._best
        assert best is not None
        self._keep(best)
        own_s = [trial.step_s for trial in self.trials if trial.plan is None]
        self._default_step_s = min(own_s, default=self._default_step_s)
        settled = not origin and not self.failure and not best.doubtful
        if self._cache is not None and settled and self._default_step_s is not None:
            parts, default_s = self._graphs.parts, self._default_step_s
            self._cache.write(best.label, best.plan, best.steps_s, default_s, self.network, self.trace, parts)
        self._live_network.note_error(self.trace, best)
        reason = f"planning failed ({self.failure})" if self.failure else reason
        self.failure = ""
        what = f"{self._default_label}: {reason}" if best.plan is None else best.label
        self.stage = f"running {what}{origin}"
        if dist.get_rank(self.control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in self.trials)
            log.info("anabranch: %s (%s). %s", self.stage, tried, self._budget.summary())

    def _until_drift(self) -> Schedule[str]:
        """Wait until rank 0 calls for another search, and return why; an empty text if it was told to hold.

        What rank 0 finds in one check is sent until the next one, so that nobody waits for it.
        """
        watch = DriftWatch(self._timer, self._policy)
        why, found = "", None
        while True:
            yield from self._watched(self._policy.drift_check_steps)
            if found is not None and found():
                self.replan_requested = False
                why = from_rank_0(why.encode(), self.control).decode()
                return "" if why == HELD else why
            moved = watch.look()
            affordable = watch.windows_seen >= self._patience and self._budget.left_s >= self._search_cost_s
            why = self._why_search(moved if affordable else None)
            found = number_of_rank_0(bool(why), self.control)

    def _why_search(self, moved: tuple[float, float] | None) -> str:
        if self.hold_requested:
            return HELD
        if self.replan_requested:
            return "replan() was called"
        return f"steps take {moved[1] * 1e3:.1f} ms instead of {moved[0] * 1e3:.1f} ms" if moved is not None else ""
