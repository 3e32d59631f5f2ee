"""The tuner: profiles under DDP's own buckets, measures, plans, tries, keeps the fastest, and watches for drift.

Every rank follows the same schedule, counted in averaged backward passes, which happen equally often on each rank.
The tuner lets ranks communicate only at the end of such a backward: in a forward, other ranks may not take part (once,
before the first planned bucket, ranks also compare the checkpoints that they loaded). Everything that
depends on a measurement is decided by rank 0 and sent to the others before any rank acts on it.
"""

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median

import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.comm.agree import agree_on, from_rank_0, latest_over_ranks, true_on_all_ranks
from anabranch.comm.collectives import Collectives
from anabranch.comm.exchange import Group
from anabranch.network import Network
from anabranch.observe.environment import network_note
from anabranch.observe.measure import LARGEST_NBYTES, measure
from anabranch.observe.recorder import Recorder
from anabranch.observe.step_context import StepContext
from anabranch.plan import Plan
from anabranch.trace import Trace
from anabranch.tuning.background_planner import BackgroundPlanner, Candidates
from anabranch.tuning.calibration import calibrate
from anabranch.tuning.candidates import candidates, predicted_s
from anabranch.tuning.explain import Findings
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.runner import Layout, PlanRunner
from anabranch.tuning.trial import Trial

log = logging.getLogger("anabranch")

SETTLING = "settling"
OPAQUE = (
    "not planning: no tensor with a gradient was found in the model's output, so steps cannot be seen; return tensors, "
    "or tuples, lists, dicts or dataclasses of them"
)
GIVEN = "the plan it was given"
FROZEN = "parameters were frozen, unfrozen or replaced after the model was wrapped"

Schedule = Generator[None, None, None]  # one yield per averaged step
TrialSchedule = Generator[None, None, Trial]
Agree = Callable[[TuningOptions], TuningOptions]


class Tuner:
    """Tunes one DataParallel, which calls ``before_forward`` and ``after_forward``.

    group        sends gradients
    model_name   is written into traces
    agree_later  compares models and options between ranks, at the end of the first step; None: they have been compared
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        collectives: Collectives,
        options: TuningOptions,
        policy: TuningPolicy,
        model_name: str,
        agree_later: Agree | None = None,
    ) -> None:
        self.collectives = collectives
        self.runner = PlanRunner(layout, group, collectives, self._step_ended)
        self.trace: Trace | None = None
        self.network: Network | None = None
        self.trials: list[Trial] = []
        self.kept: Trial | None = None
        self.failure = ""  # why planning failed, if it did
        self.stage = SETTLING
        self.replan_requested = False
        self.steps_done = 0
        self._options = options
        self._policy = policy
        self._model_name = model_name
        self._agree_later = agree_later
        self._timer = self.runner.timer
        self._patience = 1  # number of the first drift check that may start planning again
        self._prediction: tuple[Trace, Plan | None, Network, float | None] | None = None  # the last one, and its inputs
        try:
            self._schedule = self._tuning()
            next(self._schedule, None)
        except BaseException:
            self.runner.close()
            raise

    # Called by DataParallel.

    @_disable_dynamo
    def before_forward(self, averaged: bool) -> None:
        """Call this before a forward that will be differentiated; ``averaged``: its gradients will be averaged."""
        self.runner.before_forward(averaged)

    @_disable_dynamo
    def after_forward(self, output: object, averaged: bool = True) -> None:
        """Call this with the output of such a forward."""
        self._timer.forward_ended(output, averaged)
        if self.stage in (SETTLING, OPAQUE):
            self.stage = OPAQUE if self._timer.output_is_opaque else SETTLING

    def hold(self) -> None:
        """Never plan again: keep the last choice, or the layout's own buckets if there was no choice yet."""
        self._schedule.close()
        given = self._options.plan if isinstance(self._options.plan, Plan) else None
        label, plan = self._default_label if given is None else GIVEN, given
        if self.kept is not None:
            label, plan = self.kept.label, self.kept.plan
        self.stage = f"running {label}, held"
        self.runner.use_plan(plan)

    def close(self) -> None:
        """Release hooks, threads and groups."""
        with suppress(ValueError):  # another thread is in a step, when the program ends without waiting for it
            self._schedule.close()
        self._timer.close()
        self.runner.close()

    # Read by observers and explain().

    @property
    def control(self) -> Group:
        """A group of the same ranks for small messages in host memory, used by nothing else."""
        return self.runner.lanes.control

    def current_step(self) -> StepContext:
        """The step that is running, or that ends now."""
        plan = self.runner.plan_in_force
        tried = self.kept if self.kept is not None and plan is not None and self.kept.plan == plan else None
        communication_s = tried.timeline.communication_s if tried is not None else None
        return StepContext(self.steps_done + 1, plan, self.stage, self._predicted_s(plan), communication_s)

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
        )

    def _predicted_s(self, plan: Plan | None) -> float | None:
        """The simulator's prediction for this layout, computed once per layout."""
        if self.trace is None or self.network is None:
            return None
        known = self._prediction
        if known is not None and known[0] is self.trace and known[1] is plan and known[2] is self.network:
            return known[3]
        try:
            seconds: float | None = predicted_s(self.trace, plan, self.network)
        except Exception as error:  # a user's plan may name a kind for which the network has no cost
            log.info("anabranch: no prediction for the layout in force: %s", error)
            seconds = None
        self._prediction = (self.trace, plan, self.network, seconds)
        return seconds

    @property
    def _default_label(self) -> str:
        return self.runner.layout.default_label

    @_disable_dynamo
    def _step_ended(self) -> None:
        self.steps_done += 1
        self.runner.check_loaded()
        self.collectives.on_step_end()
        if self.runner.stale:
            self._schedule.close()
            self.stage = f"no longer planning: {FROZEN}"
        try:
            with warnings.catch_warnings(record=True) as caught:  # under -W error a warning would stop one rank only
                warnings.simplefilter("always")
                next(self._schedule, None)
        except Exception as error:
            self.stage = f"stopped planning: {type(error).__name__}: {error}"
            raise
        for warning in caught if dist.get_rank(self.control) == 0 else []:
            log.warning("anabranch: %s", warning.message)

    # The schedule of tuning.

    def _tuning(self) -> Schedule:
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
        if self._options.profile_steps == 0:
            self.stage = f"running {self._default_label}: profile_steps is 0"
            return
        yield from self._steps(self._policy.settle_steps)
        while self.runner.trains_the_same():
            self.stage = "profiling"
            self.failure = ""
            yield from self._profile(self._default_label, None)
            if self.failure:
                break
            self.stage = "dense while training warms up"
            yield from self._steps(self.collectives.warmup_steps - self.steps_done)
            self._measure()
            # First on one lane, which shows the cost of messages; then on several, which shows their contention; then
            # once more with both known.
            yield from self._try_candidates(replace(self._options, lanes=1))
            self._calibrate(several_lanes=False)
            yield from self._try_candidates(self._options)
            if self._calibrate(several_lanes=True):
                yield from self._try_candidates(self._options)
            before = self.kept.plan if self.kept is not None else None
            chosen = yield from self._choose()
            # If planning again changed nothing (batches of varying size, for example), plan less and less often.
            self._patience = 1 if chosen.plan != before else 2 * self._patience
            yield from self._until_drift()
            yield from self._change_to(None)
        self.stage = f"no longer planning: {self.failure or FROZEN}"

    def _run_given_plan(self) -> Schedule:
        """Run the user's plan, whatever its step time."""
        assert isinstance(self._options.plan, Plan)  # with_plan_loaded() has replaced a path
        plan = agree_on(Plan, self._options.plan, self.control)
        if self._options.network is not None:
            self.network = agree_on(Network, self._options.network, self.control)
        self.stage = "running the plan it was given"
        yield from self._change_to(plan)
        if self._options.profile_steps:
            yield from self._profile(GIVEN, plan)
            self.kept = self.trials[0]
        while True:
            yield

    def _steps(self, count: int) -> Schedule:
        yield from [None] * count

    def _change_to(self, plan: Plan | None) -> Schedule:
        """Change to another layout from the next step on, and wait until it has settled."""
        self.runner.use_plan(plan)
        yield from self._steps(self._policy.settle_steps)

    def _profile(self, label: str, plan: Plan | None) -> Schedule:
        """Record the trace under the layout in force; its step time is the one that plans must beat."""
        with Recorder(self._timer, self.runner.parameters) as recorder:
            self.trials = [(yield from self._try(label, plan))]
        if not true_on_all_ranks(recorder.steps > 0, self.control):
            self.failure = "no step could be recorded (is the whole model called again in backward, by checkpointing?)"
            return
        trace = recorder.trace({"model": self._model_name})
        self.trace = agree_on(Trace, latest_over_ranks(trace, self.control), self.control)
        if self.trace.tensors[0].ready_s > self._policy.late_gradients * self.trace.backward_s:
            warnings.warn(
                "all gradients come at the end of backward, as when the whole model is one compiled graph: "
                "nothing of their communication can be hidden",
                stacklevel=2,
            )

    def _try(self, label: str, plan: Plan | None) -> TrialSchedule:
        """Time some steps of the layout in force, the last of them bucket by bucket."""
        count, detailed = self._options.profile_steps, self._policy.detailed_steps
        yield from self._steps(max(0, count - detailed))
        with self._timer.bucket_timing():
            yield from self._steps(min(count, detailed))
        self._timer.clock.settle()
        return Trial.of(label, plan, self._timer.last_steps(count), self._timer.clock, detailed)

    def _measure(self) -> None:
        """Measure the network and how much lanes slow each other, unless the user gave a network."""
        assert self.trace is not None
        lanes = self.runner.lanes
        lanes.grow(min(self._options.lanes or 2, lanes.max_lanes))
        if self._options.network is not None:
            self.network = agree_on(Network, self._options.network, self.control)
            return
        self.stage = "measuring the network"
        kinds = {kind: self.collectives.probe(kind) for kind in ("dense", *self._options.kinds)}
        largest = min(max(self.trace.nbytes, 1 << 16), LARGEST_NBYTES)
        self.network = measure(lanes.groups, self.runner.device, largest, collectives=kinds)

    def _try_candidates(self, options: TuningOptions) -> Schedule:
        """Try every candidate that has not been tried yet."""
        if self.failure:
            return
        self.stage = "planning"
        for label, plan in (yield from self._plan(options)):
            if all(trial.plan != plan for trial in self.trials):
                self.stage = f"trying {label}"
                yield from self._change_to(plan)
                self.trials.append((yield from self._try(label, plan)))

    def _plan(self, options: TuningOptions) -> Generator[None, None, Candidates]:
        """Have rank 0 plan while training continues; returns its candidates, on every rank."""
        assert self.trace is not None and self.network is not None
        make = partial(candidates, options, self.trace, self.network, self._policy)
        planner = BackgroundPlanner(make, self.control)
        yield
        while not planner.done():
            yield
        found, self.failure = planner.outcome()
        if self.failure:
            warnings.warn(f"planning failed, {self._default_label} stay: {self.failure}", stacklevel=2)
        return [(label, plan) for label, plan in found if plan.lanes <= self.runner.lanes.max_lanes]

    def _calibrate(self, several_lanes: bool) -> bool:
        """Calibrate a measured network (not a given one) by trials on one lane or on several; whether it changed."""
        assert self.trace is not None and self.network is not None
        before = self.network
        if self._options.network is None:
            for trial in self.trials:
                if trial.plan is not None and (trial.plan.lanes > 1) == several_lanes:
                    self.network = calibrate(self.network, self.trace, trial, self.control)
        return self.network != before

    def _choose(self) -> TrialSchedule:
        """Keep the layout's own buckets unless a plan beats them twice: in the first trials, and in second trials."""
        best = self.trials[self._fastest_index(self.trials)]
        reason = f"planning failed ({self.failure})" if self.failure else "no plan was clearly faster"
        if best.plan is not None:
            self.stage = f"confirming {best.label}"
            yield from self._change_to(None)
            default = yield from self._try(self._default_label, None)
            yield from self._change_to(best.plan)
            again = yield from self._try(best.label, best.plan)
            # Show the trials that decide: the second trials of these two.
            self.trials = [default, *(again if trial is best else trial for trial in self.trials[1:])]
            best = again if self._fastest_index([default, again]) == 1 else default
            reason = f"{again.label} was not clearly faster when tried again"
        self.runner.use_plan(best.plan)
        self.kept = best
        self.stage = f"running {self._default_label}: {reason}" if best.plan is None else f"running {best.label}"
        if dist.get_rank(self.control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in self.trials)
            log.info("anabranch: %s (%s)", self.stage, tried)
        return best

    def _fastest_index(self, trials: list[Trial]) -> int:
        """Rank 0's decision: 0, the first trial, unless the best of the others beats it by the minimum gain."""
        first, *others = trials
        best = min(others or trials, key=lambda trial: trial.step_s)
        beaten = best.step_s < first.step_s * (1 - self._policy.min_gain)
        return from_rank_0(bytes([trials.index(best) if beaten else 0]), self.control)[0]

    def _until_drift(self) -> Schedule:
        """Return when rank 0 finds that the step time has drifted, or ``replan()`` was called there."""
        policy, clock = self._policy, self._timer.clock
        yield from self._steps(policy.settle_steps)
        usual_s, checks = 0.0, 0
        while True:
            yield from self._steps(policy.drift_check_steps)
            checks += 1
            marks = [s for s in self._timer.last_steps(policy.drift_check_steps) if clock.settled(s.averaged)]
            seconds = [clock.elapsed_s(step.forward, step.averaged) for step in marks]
            now_s = median(seconds) if seconds else usual_s
            usual_s = usual_s or now_s
            drifted = checks >= self._patience and abs(now_s - usual_s) > policy.max_drift * usual_s
            if from_rank_0(bytes([drifted or self.replan_requested]), self.control)[0]:
                self.replan_requested = False
                return
