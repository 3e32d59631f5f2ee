"""The life of a DataParallel: profile under DDP's own buckets, plan, try, keep what is fastest, watch, plan again.

Every rank takes the same course, counted in synchronised backward passes, which by their nature happen equally often on
each. The course goes on, and ranks talk to each other, at the end of such a backward and nowhere else: a forward may be
one rank's private affair. Whatever depends on a measurement is decided by rank 0 and sent to the others before anyone
acts on it.
"""

import json
import logging
import math
import warnings
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.runtime.agree import agree_on, from_rank_0, latest
from anabranch.runtime.candidates import Wishes, candidates, predicted_s
from anabranch.runtime.live import LiveLayout
from anabranch.runtime.measure import LARGEST_NBYTES, measure
from anabranch.runtime.record import Recorder
from anabranch.runtime.refine import bucket_seconds, refined
from anabranch.runtime.trial import Trial
from anabranch.trace import Trace

log = logging.getLogger("anabranch")

SETTLE_STEPS = 3  # after a change of layout: DDP rebuilds in the second step, and caches warm up
WATCH_STEPS = 50  # how often rank 0 looks whether the step time has drifted
DRIFT = 0.10
MARGIN = 0.01  # a plan must gain this much to be kept: less is noise, and stock DDP is the safer choice

Course = Generator[None, None, None]
Trying = Generator[None, None, Trial]
DDP_BUCKETS = "DDP's own buckets"


class Pilot:
    """Steers one DataParallel, which calls ``before_forward``, ``after_forward`` and ``sync_buffers``.

    ``control`` is a group of the same ranks that carries host memory and that nobody else uses.
    """

    def __init__(self, ddp: Any, wishes: Wishes, control: dist.ProcessGroup) -> None:
        self._wishes, self._control = wishes, control
        self.live = LiveLayout(ddp, control, self._step_done)
        self._watch = self.live.watch
        self._recorder: Recorder | None = None
        self.trace: Trace | None = None
        self.network: Network | None = None
        self.trials: list[Trial] = []
        self.kept: Trial | None = None
        self.failure = ""  # why planning failed, if it did
        self.stage = "settling"
        self.replan_asked = False
        self._course = self._life()
        next(self._course)

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

    def close(self) -> None:
        """Let go of hooks, threads and groups."""
        self._course.close()
        self.live.close()

    @_disable_dynamo
    def _step_done(self) -> None:
        next(self._course, None)  # a course that ended (closed, or an error that was shown) leaves things as they are

    # The course: one yield per synchronised step.

    def _life(self) -> Course:
        yield from self._steps(SETTLE_STEPS)
        if self._wishes.plan is not None:
            yield from self._as_told()
        while self.live.trains_the_same():
            self.stage, self.failure = "profiling", ""
            self.trials = [(yield from self._profile())]
            self._measure()
            yield from self._try_all(replace(self._wishes, lanes=1))
            self._refine()
            yield from self._try_all(self._wishes)
            yield from self._choose()
            yield from self._until_drift()
            yield from self._change_to(None)
        self.stage = "no longer planning: parameters were frozen or unfrozen after the model was wrapped"

    def _try_all(self, wishes: Wishes) -> Course:
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

    def _refine(self) -> None:
        """Correct the network by what the first plan's buckets took, on the rank that had to wait for no other."""
        assert self.trace is not None and self.network is not None
        if len(self.trials) == 1:
            return
        plan, took_s = self.trials[1].plan, bucket_seconds(self.trials[1].timeline)
        assert plan is not None
        seconds = torch.tensor(took_s if len(took_s) == len(plan) else [math.nan] * len(plan), dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=self._control)
        if plan.lanes == 1 and not seconds.isnan().any():
            self.network = agree_on(Network, refined(self.network, self.trace, plan, seconds.tolist()), self._control)

    def _as_told(self) -> Course:
        """Run the user's plan, whatever comes of it."""
        plan = agree_on(Plan, self._wishes.plan, self._control)
        self.stage = "running the plan it was given"
        yield from self._change_to(plan)
        while True:
            self.kept = yield from self._try("the plan it was given", plan)
            self.trials = [self.kept]
            yield from self._steps(WATCH_STEPS)

    def _steps(self, count: int) -> Course:
        for _ in range(count):
            yield

    def _profile(self) -> Trying:
        """DDP's own buckets: the trace, and the step time to beat."""
        with Recorder(self.live.parameters) as self._recorder:
            recorder = self._recorder
            try:
                trial = yield from self._try(DDP_BUCKETS, None)
            finally:
                self._recorder = None
        trace = recorder.trace({"model": type(self.live.ddp.module).__name__})
        self.trace = agree_on(Trace, latest(trace, self._control), self._control)
        return trial

    def _try(self, label: str, plan: Plan | None) -> Trying:
        """Time some steps of the layout in force."""
        count = self._wishes.profile_steps
        if self.live.hook is not None:
            self.live.hook.look = True
        yield from self._steps(count)
        if self.live.hook is not None:
            self.live.hook.look = False
        self._watch.clock.settle()
        return Trial.of(label, plan, self._watch.take(count), self._watch.clock)

    def _measure(self) -> None:
        """What the network costs, unless the user said; and how much lanes slow each other."""
        assert self.trace is not None
        self.live.lanes.grow(self._wishes.lanes or 2)
        if self._wishes.network is not None:
            self.network = agree_on(Network, self._wishes.network, self._control)
            return
        self.stage = "measuring the network"
        kinds = ("dense",) if self._wishes.compress is None else ("dense", self._wishes.compress)
        largest = min(max(self.trace.nbytes, 1 << 16), LARGEST_NBYTES)
        self.network = measure(self.live.lanes.groups, self.live.device, largest, collectives=kinds)

    def _think(self, wishes: Wishes) -> Generator[None, None, list[tuple[str, Plan]]]:
        """Rank 0 plans beside the next steps; then everyone has its candidates."""
        assert self.trace is not None and self.network is not None
        leader = dist.get_rank(self._control) == 0
        with ThreadPoolExecutor(1, "anabranch-planner") as pool:
            thought = pool.submit(candidates, wishes, self.trace, self.network) if leader else None
            yield from self._steps(2)
            mine, failure = _outcome(thought)
        said = json.dumps({"labels": [label for label, _ in mine], "failure": failure}).encode()
        heard = json.loads(from_rank_0(said, self._control))
        self.failure = heard["failure"]
        if leader and failure:
            warnings.warn(f"planning failed, DDP's own buckets stay: {failure}", stacklevel=2)
        plans = [agree_on(Plan, mine[i][1] if leader else None, self._control) for i in range(len(heard["labels"]))]
        return list(zip(heard["labels"], plans, strict=True))

    def predicted_s(self, plan: Plan | None) -> float:
        """Predicted time from the start of forward to averaged gradients."""
        assert self.trace is not None and self.network is not None
        return predicted_s(self.trace, plan, self.network)

    def _choose(self) -> Course:
        """Go on with DDP's own buckets unless a plan beats them clearly, twice: in the trials, and again in turn."""
        best = self.trials[self._winner(self.trials)]
        if best.plan is not None:
            self.stage = f"confirming {best.label}"
            yield from self._change_to(None)
            stock = yield from self._try(DDP_BUCKETS, None)
            yield from self._change_to(best.plan)
            again = yield from self._try(best.label, best.plan)
            confirmed = self._winner([stock, again]) == 1
            self.trials = [
                self.trials[0].joined(stock),
                *(t.joined(again) if t is best else t for t in self.trials[1:]),
            ]
            best = next(t for t in self.trials if t.plan == (best.plan if confirmed else None))
        self.kept = best
        self.live.want(best.plan)
        reason = f"planning failed ({self.failure})" if self.failure else "no plan was clearly faster"
        lost = f"running DDP's own buckets: {reason}"
        self.stage = lost if best.plan is None else f"running {best.label}"
        if dist.get_rank(self._control) == 0:
            tried = ", ".join(f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in self.trials)
            log.info("anabranch: %s (%s)", self.stage, tried)

    def _winner(self, trials: list[Trial]) -> int:
        """Rank 0's verdict: the first trial, unless the best of the others beats it by more than the margin."""
        first, *others = trials
        best = min(others or trials, key=lambda trial: trial.step_s)
        beaten = best.step_s < first.step_s * (1 - MARGIN)
        return from_rank_0(bytes([trials.index(best) if beaten else 0]), self._control)[0]

    def _until_drift(self) -> Course:
        """Return when rank 0 sees the step time leave its range, or when the user asks for a new plan."""
        yield from self._steps(SETTLE_STEPS)
        usual_s = 0.0
        while not self.replan_asked:
            for _ in range(WATCH_STEPS):
                yield
                if self.replan_asked:
                    break
            marks = [step for step in self._watch.take(WATCH_STEPS) if self._watch.clock.settled(step.averaged)]
            seconds = [self._watch.clock.between(step.forward, step.averaged) for step in marks]
            now_s = median(seconds) if seconds else usual_s
            usual_s = usual_s or now_s
            if from_rank_0(bytes([abs(now_s - usual_s) > DRIFT * usual_s]), self._control)[0]:
                break
        self.replan_asked = False


def _outcome(thought: Future[list[tuple[str, Plan]]] | None) -> tuple[list[tuple[str, Plan]], str]:
    """What a planner came up with, or what went wrong: a planner's error must not leave the other ranks waiting."""
    if thought is None:
        return [], ""
    try:
        return thought.result(), ""
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
