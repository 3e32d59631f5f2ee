"""What each step of a live model took, sent and was predicted to take, told to loggers when its marks have settled."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from anabranch.comm.dense import Traffic, traffic
from anabranch.network import Network
from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import StepMarks
from anabranch.plan import Plan
from anabranch.trace import Trace
from anabranch.tuning.candidates import predicted_s
from anabranch.tuning.trial import timeline_of

if TYPE_CHECKING:
    from anabranch.tuning.tuner import Tuner

log = logging.getLogger("anabranch")


@dataclass(frozen=True, slots=True)
class Metrics:
    """One synchronised step on one rank: ``measured_s`` is ``compute_s`` and then ``exposed_s``.

    step            the first step of a training is 1; a loaded ``comm_state_dict`` counts on
    measured_s      from the start of forward to averaged gradients, without the optimizer
    predicted_s     what the simulator says of the same; None before profiling and measuring are over
    compute_s       forward, loss and backward
    exposed_s       what of communication nothing hid
    overlap         share of the communication time that was hidden; None if its buckets were never timed
    sent_nbytes     by this rank, computed from the plan and the sizes of messages, not counted on the wire; None if
    received_nbytes   a collective does not say
    density         share of all elements that was exchanged: 1 where everything travels dense; None likewise
    plan            the fingerprint's first digits; None under DDP's own buckets
    stage           what the model was doing, as ``explain()`` begins
    """

    step: int
    rank: int
    measured_s: float
    predicted_s: float | None
    compute_s: float
    exposed_s: float
    overlap: float | None
    sent_nbytes: int | None
    received_nbytes: int | None
    density: float | None
    plan: str | None
    buckets: int | None
    lanes: int
    stage: str


class Logger(Protocol):
    """Where metrics go; yours, too."""

    def log(self, metrics: Metrics) -> None:
        """One step, in order; some steps late on a GPU."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


@dataclass(slots=True)
class _Pending:
    """A step whose marks may not have settled, and what was in force in it."""

    number: int
    marks: StepMarks
    plan: Plan | None
    stage: str
    predicted_s: float | None
    traffic: Traffic | None
    communication_s: float | None  # of a trial of the same layout


class MetricsFeed:
    """Shows every step of a tuner to loggers. A logger that fails is let go: training must not die of it."""

    def __init__(self, tuner: "Tuner", loggers: Sequence[Logger]) -> None:
        self._tuner, self._loggers = tuner, list(loggers)
        self._clock = tuner.live.watch.clock
        self._pending: deque[_Pending] = deque()
        self._predicted: tuple[Trace | None, Plan | None, Network | None, float | None] = (None, None, None, None)
        self._sizes: tuple[Plan | None, list[tuple[int, torch.dtype]]] | None = None  # of the buckets of the last step
        self._known: tuple[Plan, str] | None = None  # the last plan's fingerprint
        self._rank, self._ranks = dist.get_rank(tuner.control), dist.get_world_size(tuner.control)
        # On the host two more marks per bucket cost nothing; on a GPU a thread would have to look out for ends.
        tuner.live.watch.lookers += isinstance(self._clock, HostClock)

    @_disable_dynamo
    def on_step_end(self, step: StepMarks) -> None:
        """See ``Observer``."""
        tuner, hook = self._tuner, self._tuner.live.hook
        plan = hook.plan if hook is not None else None
        tried = tuner.kept if tuner.kept is not None and tuner.kept.plan == plan and plan is not None else None
        communication_s = tried.timeline.communication_s if tried is not None else None
        number = tuner.steps_done + 1
        self._pending.append(
            _Pending(number, step, plan, tuner.stage, self._prediction(plan), self._traffic(plan), communication_s)
        )
        self._tell()

    def close(self) -> None:
        """Tell what has settled by now; waits for no device, which may never come to it."""
        self._tell()
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                log.error("anabranch: %s could not be closed: %s", type(logger).__name__, error)
        self._loggers = []
        self._pending.clear()

    def _tell(self) -> None:
        while self._pending and self._settled(self._pending[0].marks):
            metrics = self._metrics(self._pending.popleft())
            for logger in list(self._loggers):
                try:
                    logger.log(metrics)
                except Exception as error:
                    self._loggers.remove(logger)
                    words = "anabranch: %s failed at step %d and gets no more metrics: %s: %s"
                    log.error(words, type(logger).__name__, metrics.step, type(error).__name__, error)

    def _settled(self, marks: StepMarks) -> bool:
        return all(self._clock.settled(mark) for mark in (marks.forward, marks.computed, marks.averaged))

    def _metrics(self, done: _Pending) -> Metrics:
        marks, between = done.marks, self._clock.between
        exposed_s = max(0.0, between(marks.computed, marks.averaged))
        sent, received, density = done.traffic if done.traffic is not None else (None, None, None)
        return Metrics(
            step=done.number,
            rank=self._rank,
            measured_s=between(marks.forward, marks.averaged),
            predicted_s=done.predicted_s,
            compute_s=between(marks.forward, marks.computed),
            exposed_s=exposed_s,
            overlap=self._overlap(done, exposed_s),
            sent_nbytes=sent,
            received_nbytes=received,
            density=density,
            plan=self._fingerprint(done.plan),
            buckets=len(done.plan) if done.plan is not None else None,
            lanes=done.plan.lanes if done.plan is not None else 1,
            stage=done.stage,
        )

    def _fingerprint(self, plan: Plan | None) -> str | None:
        """A hash over all names, made once per plan."""
        if plan is None:
            return None
        if self._known is None or self._known[0] is not plan:
            self._known = (plan, plan.fingerprint[:12])
        return self._known[1]

    def _overlap(self, done: _Pending, exposed_s: float) -> float | None:
        """By this step's own buckets where all were seen, else by what those of the trial took; DDP's are not timed."""
        if done.plan is None:
            return None
        marks, clock = done.marks, self._clock
        if len(marks.buckets) == len(done.plan) and clock.settled(marks.backward):
            timeline = timeline_of(marks, done.plan, clock)
            if len(timeline.communication) == len(done.plan):
                return timeline.overlap
        if not done.communication_s:
            return None
        return min(1.0, max(0.0, 1.0 - exposed_s / done.communication_s))

    def _prediction(self, plan: Plan | None) -> float | None:
        """The simulator's word, asked for once per layout."""
        trace, network = self._tuner.trace, self._tuner.network
        if trace is None or network is None:
            return None
        known = self._predicted
        if known[0] is trace and known[1] is plan and known[2] is network:
            return known[3]
        try:
            seconds = predicted_s(trace, plan, network)
        except Exception as error:  # a plan of the user's own may use what the network has no price for
            log.info("anabranch: no prediction for the layout in force: %s", error)
            seconds = None
        self._predicted = (trace, plan, network, seconds)
        return seconds

    def _traffic(self, plan: Plan | None) -> Traffic | None:
        """Of all buckets together; DDP's own send every gradient once around a ring."""
        sizes = self._sizes_of(plan)
        if plan is None:
            parts = [traffic("dense", numel, dtype, self._ranks) for numel, dtype in sizes]
        else:
            told = self._tuner.collectives.traffic
            parts = [told(bucket, *size, self._ranks) for bucket, size in zip(plan.buckets, sizes, strict=True)]
        known = [part for part in parts if part is not None]
        if len(known) < len(sizes):
            return None
        exchanged = sum(part.density * numel for part, (numel, _) in zip(known, sizes, strict=True))
        return Traffic(
            sum(part.sent_nbytes for part in known),
            sum(part.received_nbytes for part in known),
            exchanged / max(1, sum(numel for numel, _ in sizes)),
        )

    def _sizes_of(self, plan: Plan | None) -> list[tuple[int, torch.dtype]]:
        """Elements and dtype of each bucket; under DDP's own, of all gradients of a dtype together."""
        if self._sizes is None or self._sizes[0] is not plan:
            parameters = self._tuner.live.parameters
            dtypes = {parameter.dtype for parameter in parameters.values()}
            names = (
                [bucket.names for bucket in plan.buckets]
                if plan is not None
                else [tuple(name for name, p in parameters.items() if p.dtype == dtype) for dtype in dtypes]
            )
            sizes = [(sum(parameters[n].numel() for n in part), parameters[part[0]].dtype) for part in names]
            self._sizes = (plan, sizes)
        return self._sizes[1]
