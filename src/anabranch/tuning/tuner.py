"""The life of a DataParallel: profile under DDP's own buckets, plan, try, keep what is fastest, watch, plan again.

Every rank takes the same course, counted in synchronised backward passes, which by their nature happen equally often on
each. The course goes on, and ranks talk to each other, at the end of such a backward and nowhere else: a forward may be
one rank's private affair. Whatever depends on a measurement is decided by rank 0 and sent to the others before anyone
acts on it.
"""

import logging
import warnings
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.comm.agree import agree_on, from_rank_0, latest, on_all_ranks
from anabranch.comm.collectives import Collectives
from anabranch.ddp.layout import DdpLayout
from anabranch.network import Network
from anabranch.observe.measure import LARGEST_NBYTES, measure
from anabranch.observe.recorder import Recorder
from anabranch.plan import Plan
from anabranch.trace import Trace
from anabranch.tuning.background_planner import BackgroundPlanner, Candidates
from anabranch.tuning.calibration import refine
from anabranch.tuning.candidates import candidates
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.trial import LOOKED, Trial

log = logging.getLogger("anabranch")

SETTLE_STEPS = 3  # after a change of layout: DDP rebuilds in the second step, and caches warm up
WATCH_STEPS = 20  # how often rank 0 says whether to plan again, by its step times or because it was asked to
DRIFT = 0.10
MARGIN = 0.01  # a plan must gain this much to be kept: less is noise, and stock DDP is the safer choice
FROZEN = "parameters were frozen, unfrozen or replaced after the model was wrapped"
LATE = 0.9  # of backward: when even the first gradient comes later, nothing overlaps

Course = Generator[None, None, None]
Trying = Generator[None, None, Trial]


class Tuner:
    """Steers one DataParallel, which calls ``before_forward``, ``after_forward`` and ``sync_buffers``.

    ``control`` is a group of the same ranks that carries host memory and that nobody else uses.
    """

    def __init__(
        self,
        ddp: Any,
        wishes: TuningOptions,
        control: dist.ProcessGroup,
        collectives: Collectives,
        layout: type[DdpLayout] = DdpLayout,
    ) -> None:
        self._wishes, self.control, self.collectives = wishes, control, collectives
        self.live = layout(ddp, control, self._step_done, collectives)
        self._watch = self.live.watch
        self._recorder: Recorder | None = None
        self.trace: Trace | None = None
        self.network: Network | None = None
        self.trials: list[Trial] = []
        self.kept: Trial | None = None
        self.failure = ""  # why planning failed, if it did
        self.stage, self.replan_asked = "settling", False
        self._patience, self.steps_done = 1, 0
        self._course = self._life()
        next(self._course, None)

    # What DataParallel calls.

    @_disable_dynamo
    def before_forward(self, averaged: bool) -> None:
        """A forward that will be differentiated is about to begin, and whether its gradients will be averaged."""
        self.live.before_forward(averaged)
        if averaged and self._recorder is not None:
            self._recorder.forward_begins()

    @_disable_dynamo
    def after_forward(self, output: object) -> None:
        """A forward whose gradients will be averaged has returned."""
        self._watch.forward_ended(output)
        if self._recorder is not None:
            self._recorder.forward_ended(output)

    def hold(self) -> None:
        """Plan no more: go on with what was chosen last, or DDP's own buckets before any choice."""
        self._course.close()
        label, plan = (self.kept.label, self.kept.plan) if self.kept is not None else (self.live.stock, None)
        self.stage = f"running {label}, held"
        self.live.want(plan)

    def close(self) -> None:
        """Let go of hooks, threads and groups."""
        self._course.close()
        self._watch.close()
        self.live.close()
        if dist.is_initialized():
            with suppress(ValueError, AssertionError):  # gone already, with the default group
                dist.destroy_process_group(self.control)
        # The last reference to a group must go while Python is whole: its threads need the interpreter to end.
        del self.control

    @_disable_dynamo
    def _step_done(self) -> None:
        self.steps_done += 1
        self.live.agree()
        self.collectives.on_step_end()
        if self.live.stale:
            self._course.close()
            self.stage = f"no longer planning: {FROZEN}"
        try:
            with warnings.catch_warnings(record=True) as caught:  # raised, by -W error, one would stop one rank alone
                warnings.simplefilter("always")
                next(self._course, None)
        except Exception as error:
            self.stage = f"stopped planning: {type(error).__name__}: {error}"
            raise
        for warning in caught if dist.get_rank(self.control) == 0 else []:
            log.warning("anabranch: %s", warning.message)

    # The course: one yield per synchronised step.

    def _life(self) -> Course:
        if self._wishes.plan is not None:
            yield from self._as_told()
        if self._wishes.profile_steps == 0:
            self.stage = f"running {self.live.stock}: profile_steps is 0"
            return
        yield from self._steps(SETTLE_STEPS)
        while self.live.trains_the_same():
            self.stage, self.failure = "profiling", ""
            yield from self._profile(self.live.stock, None)
            if self.failure:
                break
            self.stage = "dense while training warms up"
            yield from self._steps(self.collectives.warmup_steps - self.steps_done)
            self._measure()
            # On one lane, to learn what messages cost; then on more, to learn how they meet; then knowing both.
            yield from self._try_all(replace(self._wishes, lanes=1))
            self._refine(several_lanes=False)
            yield from self._try_all(self._wishes)
            if self._refine(several_lanes=True):
                yield from self._try_all(self._wishes)
            before = self.kept.plan if self.kept is not None else None
            chosen = yield from self._choose()
            # Where planning again changes nothing (batches of varying size, say), do it ever less often.
            self._patience = 1 if chosen.plan != before else 2 * self._patience
            yield from self._until_drift()
            yield from self._change_to(None)
        self.stage = f"no longer planning: {self.failure or FROZEN}"

    def _try_all(self, wishes: TuningOptions) -> Course:
        """Try every candidate that has not been tried yet."""
        if self.failure:
            return
        self.stage = "planning"
        for label, plan in (yield from self._think(wishes)):
            if all(trial.plan != plan for trial in self.trials):
                self.stage = f"trying {label}"
                yield from self._change_to(plan)
                self.trials.append((yield from self._try(label, plan)))

    def _change_to(self, plan: Plan | None) -> Course:
        """Another layout from the next step on, and time for it to settle."""
        self.live.want(plan)
        yield from self._steps(SETTLE_STEPS)

    def _refine(self, several_lanes: bool) -> bool:
        """Correct what was measured (not what was given) by what the buckets of such trials took; whether it was."""
        assert self.trace is not None and self.network is not None
        before = self.network
        told = [trial for trial in self.trials if trial.plan is not None and (trial.plan.lanes > 1) == several_lanes]
        for trial in told if self._wishes.network is None else []:
            self.network = refine(self.network, self.trace, trial, self.control)
        return self.network != before

    def _as_told(self) -> Course:
        """Run the user's plan, whatever comes of it."""
        plan = agree_on(Plan, self._wishes.plan, self.control)
        if self._wishes.network is not None:
            self.network = agree_on(Network, self._wishes.network, self.control)
        self.stage = "running the plan it was given"
        yield from self._change_to(plan)
        if self._wishes.profile_steps:
            yield from self._profile("the plan it was given", plan)
            self.kept = self.trials[0]
        while True:
            yield

    def _steps(self, count: int) -> Course:
        yield from [None] * count

    def _profile(self, label: str, plan: Plan | None) -> Course:
        """The layout in force: the trace, and the step time to beat."""
        with Recorder(self.live.parameters) as self._recorder:
            recorder = self._recorder
            try:
                self.trials = [(yield from self._try(label, plan))]
            finally:
                self._recorder = None
        if not on_all_ranks(recorder.steps > 0, self.control):
            self.failure = "no step could be recorded (is the whole model called again in backward, by checkpointing?)"
            return
        trace = recorder.trace({"model": type(self.live.ddp.module).__name__})
        self.trace = agree_on(Trace, latest(trace, self.control), self.control)
        if self.trace.tensors[0].ready_s > LATE * self.trace.backward_s:
            warnings.warn(
                "all gradients come at the end of backward, as when the whole model is one compiled graph: "
                "nothing of their communication can be hidden",
                stacklevel=2,
            )

    def _try(self, label: str, plan: Plan | None) -> Trying:
        """Time some steps of the layout in force, the last of them bucket by bucket."""
        count, hook = self._wishes.profile_steps, self.live.hook
        yield from self._steps(max(0, count - LOOKED))
        if hook is not None:
            hook.look = True
        yield from self._steps(min(count, LOOKED))
        if hook is not None:
            hook.look = False
        self._watch.clock.settle()
        return Trial.of(label, plan, self._watch.take(count), self._watch.clock)

    def _measure(self) -> None:
        """What the network costs, unless the user said; and how much lanes slow each other."""
        assert self.trace is not None
        self.live.lanes.grow(min(self._wishes.lanes or 2, self.live.lanes.most))
        if self._wishes.network is not None:
            self.network = agree_on(Network, self._wishes.network, self.control)
            return
        self.stage = "measuring the network"
        kinds = {kind: self.collectives.probe(kind) for kind in ("dense", *self._wishes.kinds)}
        largest = min(max(self.trace.nbytes, 1 << 16), LARGEST_NBYTES)
        self.network = measure(self.live.lanes.groups, self.live.device, largest, collectives=kinds)

    def _think(self, wishes: TuningOptions) -> Generator[None, None, Candidates]:
        """Rank 0 plans beside the next steps; then everyone has its candidates."""
        assert self.trace is not None and self.network is not None
        thinking = BackgroundPlanner(partial(candidates, wishes, self.trace, self.network), self.control)
        yield
        while not thinking.done():
            yield
        found, self.failure = thinking.outcome()
        if self.failure:
            warnings.warn(f"planning failed, {self.live.stock} stay: {self.failure}", stacklevel=2)
        return [(label, plan) for label, plan in found if plan.lanes <= self.live.lanes.most]

    def _choose(self) -> Trying:
        """Go on with DDP's own buckets unless a plan beats them clearly, twice: in the trials, and again in turn."""
        best = self.trials[self._winner(self.trials)]
        reason = f"planning failed ({self.failure})" if self.failure else "no plan was clearly faster"
        if best.plan is not None:
            self.stage = f"confirming {best.label}"
            yield from self._change_to(None)
            stock = yield from self._try(self.live.stock, None)
            yield from self._change_to(best.plan)
            again = yield from self._try(best.label, best.plan)
            # What is shown is what decided: the second trials of the two.
            self.trials = [stock, *(again if trial is best else trial for trial in self.trials[1:])]
            best = again if self._winner([stock, again]) == 1 else stock
            reason = f"{again.label} was not clearly faster when tried again"
        self.live.want(best.plan)
        self.kept = best
        self.stage = f"running {self.live.stock}: {reason}" if best.plan is None else f"running {best.label}"
        if dist.get_rank(self.control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in self.trials)
            log.info("anabranch: %s (%s)", self.stage, tried)
        return best

    def _winner(self, trials: list[Trial]) -> int:
        """Rank 0's verdict: the first trial, unless the best of the others beats it by more than the margin."""
        first, *others = trials
        best = min(others or trials, key=lambda trial: trial.step_s)
        beaten = best.step_s < first.step_s * (1 - MARGIN)
        return from_rank_0(bytes([trials.index(best) if beaten else 0]), self.control)[0]

    def _until_drift(self) -> Course:
        """Return when rank 0 sees the step time leave its range, or was asked for a new plan."""
        yield from self._steps(SETTLE_STEPS)
        usual_s, rounds = 0.0, 0
        while True:
            yield from self._steps(WATCH_STEPS)
            rounds += 1
            marks = [step for step in self._watch.take(WATCH_STEPS) if self._watch.clock.settled(step.averaged)]
            seconds = [self._watch.clock.between(step.forward, step.averaged) for step in marks]
            now_s = median(seconds) if seconds else usual_s
            usual_s = usual_s or now_s
            drifted = rounds >= self._patience and abs(now_s - usual_s) > DRIFT * usual_s
            if from_rank_0(bytes([drifted or self.replan_asked]), self.control)[0]:
                self.replan_asked = False
                return
