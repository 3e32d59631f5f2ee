"""The tuner: when to search for a layout, what to keep of it, and when to search again.

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

from anabranch.exchange.agreement import agree_on, explained, from_rank_0, number_of_rank_0, true_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group
from anabranch.observe.environment import network_note
from anabranch.observe.step_timer import StepContext
from anabranch.tuning.candidates import may_run
from anabranch.tuning.cut_search import Graphs, parts_of
from anabranch.tuning.decisions import Candidate, drift
from anabranch.tuning.explain import Findings
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.runner import Layout, PlanRunner
from anabranch.tuning.search import FROZEN, Schedule, Search, steps
from anabranch.tuning.training_cache import TrainingCache
from anabranch.tuning.trial import Trial
from anabranch.values.plan import Plan

log = logging.getLogger("anabranch")

Agree = Callable[[TuningOptions], TuningOptions]

GIVEN = "the plan it was given"
HELD = "hold"
OVER = object()
NEVER = sys.maxsize
USUAL_WINDOWS, RECENT_WINDOWS = 5, 2  # a drift is a difference between the first windows and the last ones
CONFIRM_AFTER_CHECKS = 3  # checks of the step time before a plan whose win is doubtful must win again
NOT_FASTER = "no plan was clearly faster"


class Tuner:
    """Tunes one DataParallel, which calls ``before_forward``; the timer of its runner sees the end of forward.

    group        sends gradients
    model_name   is written into traces
    graphs       that torch.compile makes of the model
    cache        where earlier trainings have kept their choices; None for no cache
    agree_later  compares models and options between ranks, at the end of the first step; None: they have been compared

    kept         the result of the last search; None before its end
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        collectives: Collectives,
        options: TuningOptions,
        model_name: str,
        graphs: Graphs,
        cache: TrainingCache | None = None,
        agree_later: Agree | None = None,
    ) -> None:
        self.collectives = collectives
        self.runner = PlanRunner(layout, group, collectives, self._step_ended)
        self.kept: Trial | None = None
        self.replan_requested = False
        self._policy = options.policy
        self._cache = cache
        self._agree_later = agree_later
        self._graphs = graphs
        self._search_cost_s = 0.0  # of the last search
        self._patience = 1  # number of the first drift check that may start another search
        self._default_step_s: float | None = None  # the last measured step of the layout's own buckets
        self._first_step_at_s: float | None = None
        try:
            self.search = Search(self.runner, collectives, options, self._graphs, model_name)
            self._schedule = self._tuning()
            self._advance()
        except BaseException:
            self.runner.close()
            raise

    # Called by DataParallel.

    def before_forward(self, averaged: bool, *inputs: object) -> None:
        """Call this before a forward that will be differentiated; ``averaged``: its gradients will be averaged."""
        if self._cache is not None and inputs:
            self._cache.note_input(*inputs)
        began_s = perf_counter()
        if self._first_step_at_s is None:
            self._first_step_at_s = began_s
            if self._cache is not None and not self._cache.newest_fits:
                self._graphs.cut_for(None)  # before torch compiles; ranks need not agree on cuts
        if self.runner.before_forward(averaged):
            self.search.budget.charge(perf_counter() - began_s)

    def close(self) -> None:
        """Release hooks, threads and groups."""
        with suppress(ValueError):  # another thread is in a step, when the program ends without waiting for it
            self._schedule.close()
        self.runner.timer.close()
        self.runner.close()

    # Read by observers and explain().

    @property
    def steps_done(self) -> int:
        """The averaged steps of this training, those before a checkpoint that was loaded included."""
        return self.runner.timer.steps_done

    def current_step(self) -> StepContext:
        """The step that is running, or that ends now."""
        kept, plan = self.kept, self.runner.plan_in_force
        timeline = kept.timeline if kept is not None and plan is not None and kept.plan == plan else None
        predicted_s = self.search.network.predicted_s(self.search.trace, plan)
        communication_s = timeline.communication_s if timeline is not None else None
        return StepContext(self.steps_done + 1, plan, self.search.stage, predicted_s, communication_s)

    def findings(self) -> Findings:
        """The results so far."""
        runner, search, kept = self.runner, self.search, self.kept
        return Findings(
            stage=search.stage,
            trace=search.trace,
            network=search.network.known,
            trials=search.trials,
            kept=kept if kept is not None and kept.plan == runner.plan else None,
            plan=runner.plan,
            network_note=network_note() if runner.device.type == "cpu" else None,  # only Gloo is emulated
            exchange_lines=self.collectives.residuals.summary(),
            errors=runner.launcher.errors.relative_errors() if runner.launcher is not None else {},
            cost=search.budget.summary() if search.trials else "",
            graph_lines=[*self._graphs.lines(), *search.cut_lines],
            nodes=search.options.found_nodes,
        )

    # Steps.

    @_disable_dynamo
    def _step_ended(self) -> None:
        search = self.search
        began_s, stage = perf_counter(), search.stage
        self.runner.check_loaded()
        self.collectives.residuals.on_step_end()
        if self.runner.stale:
            self._schedule.close()
            search.stage = f"no longer planning: {FROZEN}"
        try:
            with explained(f"ranks could not agree on a plan ({stage})"):
                self._advance()
        except Exception as error:
            search.stage = f"stopped planning: {type(error).__name__}: {error}"
            raise
        ended_s = perf_counter()
        search.budget.charge(ended_s - began_s)
        search.budget.trained_s = ended_s - (self._first_step_at_s or began_s)

    def _advance(self) -> None:
        if next(self._schedule, OVER) is OVER:
            self._graphs.settle()
            self._call_after(NEVER)

    def _call_after(self, count: int) -> None:
        """Call ``_step_ended`` again after ``count`` steps; where nothing needs more, time those before coarsely."""
        if not self.collectives.residuals.keeps_any:
            self.runner.timer.call_after(count)

    def _watched(self, count: int) -> Schedule[None]:
        """Wait ``count`` steps, timing whole steps only."""
        last = self.steps_done + count
        self._call_after(count)
        while self.steps_done < last:
            yield

    # The schedule.

    def _tuning(self) -> Schedule[None]:
        search, agree = self.search, self._agree_later
        if agree is not None:
            yield
            search.options = agree(search.options)
            self.collectives.use_nodes(search.options.found_nodes.nodes, dist.get_rank(self.runner.control))
            search.options.check_plan_fits(self.runner.parameters, self.collectives)
        if search.options.no_plan_reason:
            search.stage = f"not planning: {search.options.no_plan_reason}"
            return
        if search.options.plan is not None:
            yield from self._run_given_plan()
            return
        if search.options.profile_steps == 0:
            search.stage = f"running {search.default_label}: profile_steps is 0"
            return
        if self._cache is not None and agree is None:
            self._begin_with_newest(self._cache)
        yield  # the first input shows the batch size, which is a part of the cache's key
        if not (yield from self._run_cached_choice()):
            yield from steps(self._policy.warmup_steps - 1)
            yield from self._first_search()
        while self.kept is not None:
            yield from self._confirm(self.kept)
            why = yield from self._until_drift()
            if not why:
                search.stage = f"running {self.kept.label}, held"
                return
            if not true_on_all_ranks(self.runner.trains_the_same(), self.runner.control):
                break
            yield from self._search_again(self.kept, why)
        search.stage = f"no longer planning: {search.failure or FROZEN}"

    def _run_given_plan(self) -> Schedule[None]:
        """Run the user's plan, whatever its step time."""
        search = self.search
        assert isinstance(search.options.plan, Plan)  # with_plan_loaded() has replaced a path
        plan = agree_on(Plan, search.options.plan, self.runner.control)
        search.network.agree_on_given()
        search.stage = "running the plan it was given"
        self.runner.use_plan(plan)
        self._graphs.cut_for(parts_of(plan))
        yield from steps(self._policy.warmup_steps)
        if search.options.profile_steps:
            self.kept = yield from search.profiled(GIVEN, plan)
        while not search.held:
            yield from self._watched(self._policy.drift_check_steps)
        search.stage = f"running {GIVEN}, held"

    def _begin_with_newest(self, cache: TrainingCache) -> None:
        """Run what an earlier training chose from the first step on, in the hope that its batch was the same."""
        if cached := cache.read(self.runner.control, self.runner.lanes.max_lanes, any_input=True):
            self._graphs.cut_for(cached.parts)  # at once, and once
            if cached.plan is not None and may_run(cached.plan, self.steps_done, self.collectives):
                self.runner.use_plan(cached.plan)

    def _run_cached_choice(self) -> Schedule[bool]:
        """Run what an earlier training chose, and time some steps of it; whether they took as long as then."""
        search = self.search
        cached = self._cache.read(self.runner.control, self.runner.lanes.max_lanes) if self._cache is not None else None
        if cached is None:
            self.runner.use_plan(None)  # the newest choice was for another batch
            self._graphs.cut_for(None)
            return False
        self._graphs.cut_for(cached.parts)
        self._default_step_s = cached.default_step_s
        search.trace, search.network.known = cached.trace, cached.network
        label, origin = cached.label, f", as cached on {cached.date}"
        search.stage = f"checking {label}{origin}"
        if not may_run(cached.plan, self.steps_done, self.collectives):
            self.runner.use_plan(None)
            yield from steps(self._policy.warmup_steps - 1)
            yield from search.begin_with(search.default_label, None)
            yield from search.warm_up()
        self.runner.use_plan(cached.plan)
        yield from steps(self._policy.warmup_steps)
        now = yield from search.begin_with(label, cached.plan, search.options.profile_steps)
        search.budget.step_s = cached.default_step_s
        usual = (cached.step_s - cached.spread_s / 2, cached.step_s, cached.step_s + cached.spread_s / 2)
        if search.as_rank_0(drift([usual], [now.steps_s], self._policy) is None):
            self._graphs.settle()
            self._conclude("it was fastest", origin)
            return True
        was_ms, is_ms = cached.step_s * 1e3, now.step_s * 1e3
        log.info("anabranch: %s%s: %.2f ms a step, not %.2f: searching", label, origin, is_ms, was_ms)
        self._graphs.cut_for(None)
        self.runner.use_plan(None)
        yield from steps(self._policy.settle_steps)
        return False

    def _first_search(self) -> Schedule[None]:
        search = self.search
        search.stage = "profiling"
        yield from search.profiled(search.default_label, None)
        if search.failure:
            return
        if not (why_not := search.why_not()):
            search.measure()
            yield from search.warm_up()
            yield from search.run(search.options)
        yield from search.cut_graphs()
        self._conclude(why_not or NOT_FASTER)
        self._search_cost_s = search.budget.searching_s

    def _confirm(self, kept: Trial) -> Schedule[None]:
        """Have a plan whose win is doubtful win once more, later, against the layout that it beat."""
        search = self.search
        if not search.as_rank_0(kept.doubtful and kept.plan is not None):
            return
        yield from self._watched(CONFIRM_AFTER_CHECKS * self._policy.drift_check_steps)
        search.begin()
        if not search.goes_on():
            return
        yield from search.win_again(kept)
        self._conclude(f"{kept.label} did not win again")

    def _until_drift(self) -> Schedule[str]:
        """Wait until rank 0 calls for another search, and return why; an empty text if it was told to hold.

        What rank 0 finds in one check is sent until the next one, so that nobody waits for it.
        """
        windows: list[tuple[float, ...]] = []  # seconds of steps: the first windows and the last ones
        checks, why, found = 0, "", None
        while True:
            yield from self._watched(self._policy.drift_check_steps)
            if found is not None and found():
                self.replan_requested = False
                why = from_rank_0(why.encode(), self.runner.control).decode()
                return "" if why == HELD else why
            windows.append(self._last_window())
            del windows[USUAL_WINDOWS:-RECENT_WINDOWS]
            checks += 1
            moved = drift(windows[:-RECENT_WINDOWS], windows[-RECENT_WINDOWS:], self._policy)
            affordable = checks >= self._patience and self.search.budget.left_s >= self._search_cost_s
            why = self._why_search(moved if affordable else None)
            found = number_of_rank_0(bool(why), self.runner.control)

    def _last_window(self) -> tuple[float, ...]:
        """Seconds of the steps since the last check."""
        clock = self.runner.timer.clock
        marks = self.runner.timer.last_steps(self._policy.drift_check_steps)
        return tuple(clock.elapsed_s(step.forward, step.averaged) for step in marks if clock.settled(step.averaged))

    def _why_search(self, moved: tuple[float, float] | None) -> str:
        if self.search.held:
            return HELD
        if self.replan_requested:
            return "replan() was called"
        return f"steps take {moved[1] * 1e3:.1f} ms instead of {moved[0] * 1e3:.1f} ms" if moved is not None else ""

    def _search_again(self, kept: Trial, why: str) -> Schedule[None]:
        """Profile in the layout in force, and try what the new trace calls for."""
        search = self.search
        before_s = search.budget.searching_s
        search.stage = f"profiling again: {why}"
        yield from search.profiled(kept.label, kept.plan)
        why_not = search.why_not()
        if not why_not:
            search.renew_network()
            own: list[Candidate] = [(search.default_label, None)] if kept.plan is not None else []
            yield from search.run(search.options, own)
        self._conclude(why_not or NOT_FASTER)
        # Patience grows with every search: on a noisy machine the next drift is most likely noise, too.
        self._patience *= 2
        self._search_cost_s = search.budget.searching_s - before_s

    def _conclude(self, reason: str, origin: str = "") -> None:
        """Keep the best layout, which is in force; also for the next start of this training, if this one found it."""
        search, best = self.search, self.search.best
        self.kept = best
        own_s = [trial.step_s for trial in search.trials if trial.plan is None]
        self._default_step_s = min(own_s, default=self._default_step_s)
        failure, search.failure = search.failure, ""
        settled = not origin and not failure and not best.doubtful
        if self._cache is not None and settled and self._default_step_s is not None:
            self._cache.write(best, self._default_step_s, search.network.known, search.trace, self._graphs.parts)
        search.network.note_error(search.trace, best)
        reason = f"planning failed ({failure})" if failure else reason
        what = f"{search.default_label}: {reason}" if best.plan is None else best.label
        search.stage = f"running {what}{origin}"
        if dist.get_rank(self.runner.control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in search.trials)
            log.info("anabranch: %s (%s). %s", search.stage, tried, search.budget.summary())
