"""Tuned: what every wrapper that a tuner steers can tell and be told, whoever runs its buckets."""

import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from anabranch.comm.collectives import Collectives, Scaler
from anabranch.comm.lanes import same_ranks
from anabranch.ddp.layout import DdpLayout
from anabranch.network import Network
from anabranch.observe.metrics import Logger, MetricsFeed
from anabranch.observe.trace_window import TraceWindow
from anabranch.plan import Plan
from anabranch.timeline import Timeline
from anabranch.trace import Trace
from anabranch.tuning.explain import explanation
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.tuner import Tuner

log = logging.getLogger("anabranch")

CLOSED = "it was closed"


class Tuned:
    """What came of profiling, measuring and planning; checkpoints of what waits to be sent; whether to plan again."""

    _tuner: Tuner | None = None  # while a wrapper is being made there is none
    _idle = ""  # why there is nothing to plan
    _memory: Collectives | None = None  # of one rank too, which may go on where several have stopped
    _scaler: Scaler | None = None
    process_group: dist.ProcessGroup
    _release: "weakref.finalize[..., Any]"

    def _tune(
        self,
        wishes: TuningOptions,
        collectives: Collectives,
        parameters: Mapping[str, nn.Parameter],
        layout: type[DdpLayout] = DdpLayout,
    ) -> None:
        """Let a tuner steer this wrapper of these parameters from now on. Every rank calls it at the same point."""
        self._memory = collectives
        wishes = replace(wishes, kinds=tuple(collectives.kinds), dense_names=collectives.dense_names)
        wishes.check_fits(parameters, dist.get_world_size(self.process_group), collectives)
        control = same_ranks(self.process_group, "gloo", "anabranch control")
        self._tuner = Tuner(self, wishes, control, collectives, layout)
        self._release = weakref.finalize(self, self._tuner.close)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while DDP's own buckets run."""
        return self._tuner.live.plan if self._tuner is not None else None

    @property
    def trace(self) -> Trace | None:
        """The recorded trace, the slowest rank's at every gradient; None before profiling is over."""
        return self._tuner.trace if self._tuner is not None else None

    @property
    def network(self) -> Network | None:
        """The network as measured or given; None before."""
        return self._tuner.network if self._tuner is not None else None

    @property
    def timeline(self) -> Timeline | None:
        """A measured step of what is in force; None before there is one."""
        return self._tuner.kept.timeline if self._tuner is not None and self._tuner.kept is not None else None

    def explain(self) -> str:
        """The plan, what it was predicted to gain and did gain, what is exposed; or why there is no plan."""
        if self._tuner is None:
            return f"No plan: {self._idle}. Gradients travel as under DistributedDataParallel."
        return explanation(self._tuner)

    def log_to(self, *loggers: Logger, every_rank: bool = False) -> None:
        """Tell these loggers the ``Metrics`` of every synchronised step from now on; closed with the model.

        Rank 0 tells its own; with ``every_rank`` each rank does, and each needs a file or folder of its own. Nothing
        waits for a GPU: there, metrics come some steps late. A logger that fails is let go, and the log says so.
        """
        for logger in loggers:
            if isinstance(logger, type) or not callable(getattr(logger, "log", None)):
                raise ValueError(
                    f"log_to() was given {logger!r}: expected loggers with log(metrics) and close(), "
                    "such as JsonLines('run.jsonl')"
                )
        tuner = self._watched("log_to()")
        if tuner is not None and loggers and (every_rank or dist.get_rank(tuner.control) == 0):
            tuner.live.watch.observers.append(MetricsFeed(tuner, loggers))

    def trace_steps(self, first: int, last: int, path: str | os.PathLike[str], force: bool = False) -> None:
        """Have rank 0 write what all ranks did in these steps, by one clock, as one trace for Perfetto.

        The first step of a training is 1. Call it on every rank alike, between steps. At the window's ends ranks
        compare their clocks and wait for their GPUs.
        """
        tuner = self._watched("trace_steps()")
        if tuner is not None:
            TraceWindow(tuner, first, last, path, force)

    def _watched(self, what: str) -> Tuner | None:
        """Who sees the steps; nobody, where there is nothing to plan."""
        if self._idle == CLOSED:
            raise RuntimeError(f"{what} of a DataParallel that was closed: wrap the module again")
        if self._tuner is None:
            log.warning("anabranch: %s has nothing to show: %s", what, self._idle)
        return self._tuner

    def comm_state_dict(self) -> dict[str, Any]:
        """What this rank must keep in a checkpoint beside the model: what waits to be sent; {} without ``OkTopk``."""
        if self._idle == CLOSED:
            raise RuntimeError("this DataParallel was closed, and what had waited is gone: ask before close()")
        kept = self._memory.state_dict() if self._memory is not None else {}
        return {**kept, "steps_trained": self._tuner.steps_done if self._tuner is not None else 0} if kept else {}

    def load_comm_state_dict(self, *states: Any) -> None:
        """Take over what ``comm_state_dict`` gave on this rank: on every rank, before the first step.

        If the number of ranks has changed, give every rank those of all old ranks: ``load_comm_state_dict(*states)``.
        Ranks compare what they were given in the first step: one that loads another checkpoint, or none, is an error.
        """
        if self._tuner is not None:
            self._tuner.live.load(*states)
            self._tuner.steps_done = max((int(state.get("steps_trained", 0)) for state in states), default=0)
        elif self._memory is not None:
            self._memory.load_state_dict(*states)
        elif any(state.get("residuals") for state in states):
            raise RuntimeError(f"gradients that wait to be sent cannot be taken over: {self._idle}")
        self._follow_scale()

    def follow(self, scaler: Scaler) -> None:
        """Let what waits to be sent follow this GradScaler, on every rank; keep the scaler in your checkpoints, too.

        Gradients wait as they were: of a loss times that step's scale. When the scale changes, or what was loaded had
        another, all that waits is multiplied by the same ratio before the next forward.
        """
        self._scaler = scaler
        self._follow_scale()

    def _follow_scale(self) -> None:
        if self._scaler is not None and self._memory is not None:
            self._memory.rescale(float(self._scaler.get_scale()))

    def replan(self) -> None:
        """Profile, measure and plan again soon: within the next 20 steps after rank 0 has called it."""
        if self._tuner is not None:
            self._tuner.replan_asked = True

    def hold(self) -> None:
        """Keep what was chosen last and plan no more, however the step time drifts. Call it on every rank alike."""
        if self._tuner is not None:
            self._tuner.hold()

    def _let_go(self) -> None:
        """It was closed."""
        if self._memory is not None:
            self._memory.close()
        self._tuner, self._memory, self._idle = None, None, CLOSED
