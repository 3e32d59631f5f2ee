"""The life of a DataParallel: profile under DDP's own buckets, plan, try, keep what is fastest, watch, plan again.

Every rank takes the same course, counted in synchronised backward passes, which by their nature happen equally often on
each. The course goes on, and ranks talk to each other, at the end of such a backward and nowhere else: a forward may be
one rank's private affair. Whatever depends on a measurement is decided by rank 0 and sent to the others before anyone
acts on it.
"""

import json
import logging
import math
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.runtime.agree import agree_on, from_rank_0, latest
from anabranch.runtime.buffers import BehindBuffers
from anabranch.runtime.candidates import Wishes, candidates, predicted_s
from anabranch.runtime.clock import clock_for
from anabranch.runtime.hook import PlanHook
from anabranch.runtime.lanes import Lane, Lanes
from anabranch.runtime.layout import Layout, built_by_ddp, layout_of, reduced_parameters, relayout
from anabranch.runtime.measure import LARGEST_NBYTES, measure
from anabranch.runtime.record import Recorder
from anabranch.runtime.refine import bucket_seconds, refined
from anabranch.runtime.trial import Trial
from anabranch.runtime.watch import StepWatch
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
        self._owner = weakref.ref(ddp)  # not the other way round: a dropped model must be able to go
        self._wishes, self._control = wishes, control
        self._parameters = reduced_parameters(ddp)
        self._device = next(iter(self._parameters.values())).device
        self._lanes = Lanes(ddp.process_group, self._device)
        self._watch = StepWatch(clock_for(self._device), self._step_done)
        self._buffers = BehindBuffers(self._module_buffers, control)
        self._recorder: Recorder | None = None
        self._due: tuple[Plan | None] | None = None  # what the next forward lays the buckets out for
        self._stock: Layout | None = None  # DDP's own buckets, once there are others
        self.hook: PlanHook | None = None
        self.trace: Trace | None = None
        self.network: Network | None = None
        self.trials: list[Trial] = []
        self.kept: Trial | None = None
        self.stage = "settling"
        self.replan_asked = False
        self._course = self._life()
        next(self._course)

    @property
    def _ddp(self) -> Any:
        ddp = self._owner()
        if ddp is None:
            raise RuntimeError("the DataParallel of this pilot is gone")
        return ddp

    # What DataParallel calls.

    def before_forward(self, averaged: bool) -> None:
        """A forward that will be differentiated is about to begin, and whether its gradients will be averaged."""
        self._lanes.check()
        if self.hook is not None:
            self.hook.divisor = None
        # This is the first forward after a synchronised backward, so nothing was accumulated that a new reducer would
        # not know of. With static_graph it would average after its first backward even under no_sync(), so not there.
        if self._due is not None and (averaged or not self._ddp.static_graph):
            (plan,), self._due = self._due, None
            self._lay_out(plan)
        if averaged:
            self._watch.forward_begins()
            if self._recorder is not None:
                self._recorder.forward_begins()

    def after_forward(self, output: object) -> None:
        """A forward whose gradients will be averaged has returned."""
        self._watch.forward_ended(output)
        if self._recorder is not None:
            self._recorder.forward_ended(output)

    def drain_buffers(self) -> None:
        """Wait for buffers on their way, so that what is sent next cannot meet them."""
        self._buffers.drain()

    def discard_buffers(self) -> None:
        """Someone else sees to the buffers this time."""
        self._buffers.discard()

    def sync_buffers(self) -> bool:
        """Whether rank 0's buffers are in place; if not, DDP must broadcast them."""
        return self._buffers.install()

    def close(self) -> None:
        """Let go of hooks, threads and groups."""
        self._course.close()
        self._lanes.close()

    def _step_done(self) -> None:
        next(self._course, None)  # a course that ended (closed, or an error that was shown) leaves things as they are

    # The course: one yield per synchronised step.

    def _life(self) -> Course:
        yield from self._steps(SETTLE_STEPS)
        if self._wishes.plan is not None:
            yield from self._as_told()
        while self._trains_the_same():
            self.stage = "profiling"
            self.trials = [(yield from self._profile())]
            self._measure()
            yield from self._try_all(replace(self._wishes, lanes=1))
            self._refine()
            yield from self._try_all(self._wishes)
            self._keep()
            yield from self._until_drift()
            self._run(None)
            yield from self._steps(SETTLE_STEPS)

    def _try_all(self, wishes: Wishes) -> Course:
        """Try every candidate that has not been tried yet."""
        self.stage = "planning"
        for label, plan in (yield from self._think(wishes)):
            if all(trial.plan != plan for trial in self.trials):
                self.stage = f"trying {label}"
                self._run(plan)
                yield from self._steps(SETTLE_STEPS)
                self.trials.append((yield from self._try(label, plan)))

    def _refine(self) -> None:
        """Correct the network by what the first plan's buckets took, on the rank that had to wait for no other."""
        assert self.trace is not None and self.network is not None
        plan, took_s = self.trials[1].plan, bucket_seconds(self.trials[1].timeline)
        assert plan is not None
        seconds = torch.tensor(took_s if len(took_s) == len(plan) else [math.nan] * len(plan), dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=self._control)
        if plan.lanes == 1 and not seconds.isnan().any():
            self.network = agree_on(Network, refined(self.network, self.trace, plan, seconds.tolist()), self._control)

    def _as_told(self) -> Course:
        """Run the user's plan, whatever comes of it."""
        plan = agree_on(Plan, self._wishes.plan, self._control)
        self._run(plan)
        self.stage = "running the plan it was given"
        yield from self._steps(SETTLE_STEPS)
        while True:
            self.kept = yield from self._try("the plan it was given", plan)
            self.trials = [self.kept]
            yield from self._steps(WATCH_STEPS)

    def _steps(self, count: int) -> Course:
        for _ in range(count):
            yield

    def _profile(self) -> Trying:
        """DDP's own buckets: the trace, and the step time to beat."""
        with Recorder(self._parameters) as self._recorder:
            recorder = self._recorder
            try:
                trial = yield from self._try(DDP_BUCKETS, None)
            finally:
                self._recorder = None
        trace = recorder.trace({"model": type(self._ddp.module).__name__})
        self.trace = agree_on(Trace, latest(trace, self._control), self._control)
        return trial

    def _try(self, label: str, plan: Plan | None) -> Trying:
        """Time some steps of the layout in force."""
        count = self._wishes.profile_steps
        if self.hook is not None:
            self.hook.look = True
        yield from self._steps(count)
        if self.hook is not None:
            self.hook.look = False
        self._watch.clock.settle()
        return Trial.of(label, plan, self._watch.take(count), self._watch.clock)

    def _measure(self) -> None:
        """What the network costs, unless the user said; and how much lanes slow each other."""
        assert self.trace is not None
        self._lanes.grow(self._wishes.lanes or 2)
        if self._wishes.network is not None:
            self.network = agree_on(Network, self._wishes.network, self._control)
            return
        self.stage = "measuring the network"
        kinds = ("dense",) if self._wishes.compress is None else ("dense", self._wishes.compress)
        largest = min(max(self.trace.nbytes, 1 << 16), LARGEST_NBYTES)
        self.network = measure(self._lanes.groups, self._device, largest, collectives=kinds)

    def _think(self, wishes: Wishes) -> Generator[None, None, list[tuple[str, Plan]]]:
        """Rank 0 plans beside the next steps; then everyone has its candidates."""
        assert self.trace is not None and self.network is not None
        leader = dist.get_rank(self._control) == 0
        with ThreadPoolExecutor(1, "anabranch-planner") as pool:
            thought = pool.submit(candidates, wishes, self.trace, self.network) if leader else None
            yield from self._steps(2)
            mine = thought.result() if thought is not None else []
        labels = json.loads(from_rank_0(json.dumps([label for label, _ in mine]).encode(), self._control))
        plans = [agree_on(Plan, mine[i][1] if leader else None, self._control) for i in range(len(labels))]
        return list(zip(labels, plans, strict=True))

    def predicted_s(self, plan: Plan | None) -> float:
        """Predicted time from the start of forward to averaged gradients."""
        assert self.trace is not None and self.network is not None
        return predicted_s(self.trace, plan, self.network)

    def _keep(self) -> None:
        """Go on with whatever was fastest on rank 0: DDP's own buckets, unless a plan beats them clearly."""
        stock, *planned = self.trials
        best = min(planned, key=lambda trial: trial.step_s)
        mine = self.trials.index(best) if best.step_s < stock.step_s * (1 - MARGIN) else 0
        self.kept = self.trials[from_rank_0(bytes([mine]), self._control)[0]]
        self._run(self.kept.plan)
        if self.kept is stock:
            self.stage = "running DDP's own buckets: no plan was faster"
        else:
            self.stage = f"running {self.kept.label}"
        if dist.get_rank(self._control) == 0:
            log.info(
                "anabranch: %s (%s)", self.stage, ", ".join(f"{t.label} {t.step_s * 1e3:.2f} ms" for t in self.trials)
            )

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

    def _run(self, plan: Plan | None) -> None:
        """Have the next forward lay the buckets out for this plan; no plan means DDP's own."""
        if plan is not None:
            self._lanes.grow(plan.lanes)
        self._due = (plan,)

    def _lay_out(self, plan: Plan | None) -> None:
        """Lay the buckets out anew; does not communicate."""
        if not self._trains_the_same():
            self._course.close()
            return
        self._watch.forget()
        if plan is None:
            if self.hook is not None:
                self.hook = None
                relayout(self._ddp, self._stock, None)
            return
        if self.hook is not None and self.hook.plan == plan:
            return
        if self.hook is None:
            self._stock = self._stock or built_by_ddp(self._ddp)
        self.hook = PlanHook(plan, self._lanes, self._watch, self._send_buffers)
        relayout(self._ddp, layout_of(plan, list(self._parameters)), self.hook.run)

    def _trains_the_same(self) -> bool:
        """Whether the model trains what it was wrapped with; if not, its buckets must stay as they are."""
        same = list(reduced_parameters(self._ddp)) == list(self._parameters)
        if not same:
            self.stage = "no longer planning: parameters were frozen or unfrozen after the model was wrapped"
        return same

    def _module_buffers(self) -> list[torch.Tensor]:
        self._ddp._assign_modules_buffers()  # as DDP does before it sends them: they may have been replaced
        return list(self._ddp.modules_buffers)

    def _send_buffers(self, lane: Lane) -> None:
        ddp = self._ddp
        if ddp.will_sync_module_buffers() and not hasattr(ddp, "buffer_hook") and not ddp._join_config.enable:
            self._buffers.send(lane)
