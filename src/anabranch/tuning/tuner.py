"""The tuner: when to search for a layout, what to keep of it, and when to search again, within a budget.

Every rank follows the same schedule, counted in averaged backward passes, which happen equally often on each rank.
The tuner lets ranks communicate only when it is made and at the end of such a backward: in a forward, other ranks may
not take part (once, before the first planned bucket, ranks also compare the checkpoints that they loaded). Everything
that depends on a measurement is decided by rank 0 and sent to the others before any rank acts on it.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.exchange.agree import agree_on, from_rank_0, number_of_rank_0, true_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.contracts import Group
from anabranch.observe.environment import network_note
from anabranch.observe.step_timer import StepContext
from anabranch.tuning.budget import SearchBudget
from anabranch.tuning.comparison import drift
from anabranch.tuning.drift_watch import DriftWatch
from anabranch.tuning.explain import Findings
from anabranch.tuning.graph_cuts import NOT_COMPILED, Graphs, parts_of
from anabranch.tuning.live_trials import Schedule, steps
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.runner import Layout, PlanRunner
from anabranch.tuning.search import FROZEN, Search
from anabranch.tuning.switches import timeline_path, write_timeline
from anabranch.tuning.training_cache import TrainingCache
from anabranch.tuning.trial import Trial
from anabranch.tuning.warm_up import may_run
from anabranch.values.errors import CollectiveError
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

log = logging.getLogger("anabranch")

SETTLING = "settling"
GIVEN = "the plan it was given"
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
        self.kept: Trial | None = None  # the result of the last search
        self.stage = SETTLING
        self.replan_requested = False
        self.hold_requested = False
        self._options = options
        self._policy = policy
        self._cache = cache
        self._agree_later = agree_later
        self._graphs = graphs if graphs is not None else NOT_COMPILED
        self._timer = self.runner.timer
        self._budget = SearchBudget(policy)
        self._search = Search(
            self.runner,
            collectives,
            policy,
            self._budget,
            self._graphs,
            options.network,
            model_name,
            decide=self._as_rank_0,
            held=lambda: self.hold_requested,
            enter=self._enter,
        )
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
            if self._cache is not None and not self._cache.newest_fits:
                self._graphs.cut_for(None)  # before torch compiles; ranks need not agree on cuts
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
            write_timeline(self._search.best.timeline if self._search.trials else None, self._timeline_path)

    # Read by observers and explain().

    @property
    def steps_done(self) -> int:
        """The averaged steps of this training, those before a checkpoint that was loaded included."""
        return self._timer.steps_done

    @property
    def trace(self) -> Trace | None:
        """The last recorded trace; None before there is one."""
        return self._search.trace

    @property
    def network(self) -> Network | None:
        """The network as measured or given; None before it is known."""
        return self._search.network

    @property
    def control(self) -> Group:
        """A group of the same ranks for small messages in host memory, used by nothing else."""
        return self.runner.lanes.control

    def current_step(self) -> StepContext:
        """The step that is running, or that ends now."""
        plan = self.runner.plan_in_force
        tried = self.kept if self.kept is not None and plan is not None and self.kept.plan == plan else None
        timeline = tried.timeline if tried is not None else None
        predicted_s = self._search.live_network.predicted_s(self.trace, plan)
        communication_s = timeline.communication_s if timeline is not None else None
        return StepContext(self.steps_done + 1, plan, self.stage, predicted_s, communication_s)

    def findings(self) -> Findings:
        """The results so far."""
        on_cpu = self.runner.device.type == "cpu"
        return Findings(
            stage=self.stage,
            trace=self.trace,
            network=self.network,
            trials=self._search.trials,
            kept=self.kept if self.kept is not None and self.kept.plan == self.runner.plan else None,
            plan=self.runner.plan,
            network_note=network_note() if on_cpu else None,  # only Gloo is emulated
            exchange_lines=self.collectives.residuals.summary(),
            errors=self.collectives.errors.relative_errors(),
            cost=self._budget.summary() if self._search.trials else "",
            graph_lines=self._search.graph_lines,
        )

    @property
    def _default_label(self) -> str:
        return self.runner.layout.default_label

    @_disable_dynamo
    def _step_ended(self) -> None:
        began_s, stage = perf_counter(), self.stage
        self._graphs.step_ended()
        self.runner.check_loaded()
        self.collectives.residuals.on_step_end()
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
        if not self.collectives.residuals.keeps_any:
            self._timer.call_after(count)

    def _watched(self, count: int) -> Schedule[None]:
        """Wait for so many steps, of which only the whole time counts."""
        last = self.steps_done + count
        self._call_after(count)
        while self.steps_done < last:
            yield

    def _enter(self, stage: str) -> None:
        self.stage = stage

    def _as_rank_0(self, number: int) -> int:
        """Rank 0's number, from 0 to 255, on every rank. Collective."""
        return number_of_rank_0(number, self.control)()

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
        self.stage = f"no longer planning: {self._search.failure or FROZEN}"

    def _run_given_plan(self) -> Schedule[None]:
        """Run the user's plan, whatever its step time."""
        assert isinstance(self._options.plan, Plan)  # with_plan_loaded() has replaced a path
        plan = agree_on(Plan, self._options.plan, self.control)
        self._search.live_network.agree_on_given()
        self.stage = "running the plan it was given"
        self.runner.use_plan(plan)
        self._graphs.cut_for(parts_of(plan))
        yield from steps(self._policy.warmup_steps)
        if self._options.profile_steps:
            self._keep((yield from self._search.profiled(GIVEN, plan, self._options.profile_steps)))
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
        search, self._default_step_s = self._search, cached.default_step_s
        search.begin_with(cached.trace, cached.network)
        label, origin = cached.label, f", as cached on {cached.date}"
        self.stage = f"checking {label}{origin}"
        if not self._may_run(cached.plan):
            self._change_to(None)
            yield from steps(self._policy.warmup_steps - 1)
            yield from search.timed(self._default_label, None)
            yield from search.warm_up(self._options)
        self._change_to(cached.plan)
        yield from steps(self._policy.warmup_steps)
        now = yield from search.timed(label, cached.plan, self._options.profile_steps)
        self._budget.step_s = cached.default_step_s
        usual = (cached.step_s - cached.spread_s / 2, cached.step_s, cached.step_s + cached.spread_s / 2)
        moved = drift([usual], [now.steps_s], self._policy)
        if self._as_rank_0(moved is None):
            self._graphs.settle()
            self._conclude("it was fastest", origin)
            return True
        was_s, is_s = cached.step_s, now.step_s
        log.info("anabranch: %s%s: %.2f ms a step, not %.2f: searching", label, origin, is_s * 1e3, was_s * 1e3)
        self._graphs.cut_for(None)
        self.runner.use_plan(None)
        yield from steps(self._policy.settle_steps)
        return False

    def _change_to(self, plan: Plan | None) -> None:
        """Run this plan, or the layout's own buckets, unless the next step does so anyway."""
        if self.runner.plan != plan:
            self.runner.use_plan(plan)

    def _may_run(self, plan: Plan | None) -> bool:
        return may_run(plan, self.steps_done, self.collectives)

    def _first_search(self) -> Schedule[None]:
        search = self._search
        self.stage = "profiling"
        yield from search.profiled(self._default_label, None, self._options.profile_steps)
        if search.failure:
            return
        if not (why_not := search.why_not()):
            search.measure(self._options)
            yield from search.warm_up(self._options)
            yield from search.run(self._options)
        yield from search.cut_graphs()
        self._conclude(why_not or NOT_FASTER)
        self._search_cost_s = self._budget.spent_s - self._budget.set_up_s

    def _confirm(self, kept: Trial) -> Schedule[None]:
        """Have a plan whose win is doubtful win once more, later, against the layout that it beat."""
        if not self._as_rank_0(kept.doubtful and kept.plan is not None):
            return
        yield from self._watched(CONFIRM_AFTER_CHECKS * self._policy.drift_check_steps)
        self._search.begin_again()
        if not self._search.goes_on():
            return
        yield from self._search.win_again(kept)
        self._conclude(f"{kept.label} did not win again")

    def _search_again(self, kept: Trial, why: str) -> Schedule[None]:
        """Profile in the layout in force, and try what the new trace calls for."""
        search, spent_s = self._search, self._budget.spent_s - self._budget.set_up_s
        self.stage = f"profiling again: {why}"
        yield from search.profiled(kept.label, kept.plan, self._options.profile_steps)
        why_not = search.why_not()
        if not why_not:
            search.renew_network(self._options)
            if kept.plan is not None:
                yield from search.try_layout(self._default_label, None)
            yield from search.run(self._options)
        self._conclude(why_not or NOT_FASTER)
        # Patience grows with every search: on a noisy machine the next drift is most likely noise, too.
        self._patience *= 2
        self._search_cost_s = self._budget.spent_s - self._budget.set_up_s - spent_s

    def _keep(self, trial: Trial) -> None:
        self.kept = trial
        write_timeline(trial.timeline, self._timeline_path)

    def _conclude(self, reason: str, origin: str = "") -> None:
        """Keep the best layout, which is in force; also for the next start of this training, if this one found it."""
        search, best = self._search, self._search.best
        self._keep(best)
        own_s = [trial.step_s for trial in search.trials if trial.plan is None]
        self._default_step_s = min(own_s, default=self._default_step_s)
        failure = search.take_failure()
        settled = not origin and not failure and not best.doubtful
        if self._cache is not None and settled and self._default_step_s is not None:
            parts, default_s = self._graphs.parts, self._default_step_s
            self._cache.write(best.label, best.plan, best.steps_s, default_s, self.network, self.trace, parts)
        search.live_network.note_error(self.trace, best)
        reason = f"planning failed ({failure})" if failure else reason
        what = f"{self._default_label}: {reason}" if best.plan is None else best.label
        self.stage = f"running {what}{origin}"
        if dist.get_rank(self.control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in search.trials)
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
