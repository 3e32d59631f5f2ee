"""Tuned: the common part of DataParallel and LeanDataParallel: results of tuning, logging, checkpoints."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.groups import keep_all_groups
from anabranch.exchange.interface import Scaler
from anabranch.observe.metrics import Logger, MetricsFeed
from anabranch.observe.trace_window import TraceWindow
from anabranch.tuning.explain import explanation
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.runner import Layout
from anabranch.tuning.training_cache import TrainingCache
from anabranch.tuning.tuner import Agree, Tuner
from anabranch.values.files import brief
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

log = logging.getLogger("anabranch")

CLOSED = "it was closed"


class Tuned:
    """A wrapper with a tuner: its plan, trace, network and timeline, loggers, checkpoints, and when to plan again."""

    _tuner: Tuner | None = None  # None while the wrapper is constructed, and if there is nothing to plan
    _no_plan_reason = ""  # why there is nothing to plan
    _collectives: Collectives | None = None  # also with one rank, which may continue from a checkpoint of several
    _scaler: Scaler | None = None
    _layout: Any = None  # a ``Layout``; each wrapper has its own class of it
    _graph_cutter: Any  # a ``Graphs``; each wrapper has its own class of it
    module: Any
    process_group: dist.ProcessGroup
    _release: "weakref.finalize[..., Any]"

    def _start_tuning(
        self,
        options: TuningOptions,
        collectives: Collectives,
        parameters: Mapping[str, nn.Parameter],
        make_layout: Callable[[], Layout],
        settings: Sequence[str],
        agree_later: Agree | None = None,
    ) -> Tuner:
        """Start a tuner, which chooses the plans of a layout from now on.

        ``settings`` are the lines of a cached plan's key that are not in ``options``.
        """
        self._collectives = collectives
        options = replace(options, kinds=collectives.kinds, excluded=collectives.excluded, mixes=collectives.mixes)
        group = self.process_group
        collectives.use_nodes(options.found_nodes.nodes, group.rank())
        options.check_fits(parameters, group.size(), collectives)
        cache = None
        if options.uses_cache:
            cache = TrainingCache(options, settings, self.module, parameters, collectives, group)
        name, layout, graphs = type(self.module).__name__, make_layout(), self._graph_cutter
        self._layout = layout
        self._tuner = Tuner(layout, group, collectives, options, name, graphs, cache, agree_later)
        self._release = weakref.finalize(self, _release, self._tuner, os.getpid())
        return self._tuner

    @property
    def plan(self) -> Plan | None:
        """The plan that the next step runs; None for DDP's own buckets, or Lean's of DDP's sizes."""
        return self._tuner.runner.plan if self._tuner is not None else None

    @property
    def trace(self) -> Trace | None:
        """The recorded trace, the slowest rank's at every gradient; None before profiling is over."""
        return self._tuner.search.trace if self._tuner is not None else None

    @property
    def network(self) -> Network | None:
        """The network as measured or given; None before it is measured."""
        return self._tuner.search.network.known if self._tuner is not None else None

    @property
    def timeline(self) -> Timeline | None:
        """A measured step under the plan in force; None before there is one."""
        return self._tuner.kept.timeline if self._tuner is not None and self._tuner.kept is not None else None

    def explain(self) -> str:
        """The plan, its predicted and measured gain, and the exposed time; or why there is no plan."""
        if self._no_plan_reason == CLOSED:
            return f"No plan: {CLOSED}. Wrap the module again to train it."
        if self._tuner is None:
            return f"No plan: {self._no_plan_reason}. Gradients are averaged as under DistributedDataParallel."
        return explanation(self._tuner.findings())

    def log_to(self, *loggers: Logger, every_rank: bool = False) -> None:
        """Give these loggers the ``Metrics`` of every averaged step from now on; they are closed with the model.

        Rank 0 logs its own steps; with ``every_rank`` each rank does, and each needs a file or folder of its own. On a
        GPU metrics come some steps late, since logging does not wait for it. A logger that fails is dropped, with an
        error in the log.
        """
        for logger in loggers:
            if isinstance(logger, type) or not callable(getattr(logger, "log", None)):
                raise ValueError(
                    f"log_to() was given {logger!r}: expected loggers with log(metrics) and close(), "
                    "such as JsonLines('run.jsonl')"
                )
        tuner, rank, ranks = self._tuner_to_observe("log_to()"), self.process_group.rank(), self.process_group.size()
        if tuner is not None and loggers and (every_rank or rank == 0):
            timer, parameters = tuner.runner.timer, tuner.runner.parameters
            traffic, norm = tuner.collectives.traffic, self._grad_norm_source()
            feed = MetricsFeed(loggers, timer, tuner.current_step, traffic, parameters, rank, ranks, norm)
            timer.observers.append(feed)

    def _grad_norm_source(self) -> Callable[[], torch.Tensor | None]:
        """A function that returns the norm of the step that ends, if it is known. It does not refer to this wrapper."""
        return lambda: None

    def trace_steps(self, first: int, last: int, path: str | os.PathLike[str], force: bool = False) -> None:
        """Have rank 0 write the steps ``first`` to ``last`` of all ranks, by one clock, as one trace for Perfetto.

        The first step of a training is 1. Call it on every rank with the same arguments, between steps. At the start
        and the end of the window ranks compare their clocks and wait for their GPUs.
        """
        tuner = self._tuner_to_observe("trace_steps()")
        if tuner is not None:
            timer, parameters = tuner.runner.timer, tuner.runner.parameters
            TraceWindow(first, last, path, force, timer, tuner.current_step, parameters, tuner.runner.control)

    def _tuner_to_observe(self, what: str) -> Tuner | None:
        """The tuner, whose timer observers subscribe to; None, with a warning, if there is none."""
        if self._no_plan_reason == CLOSED:
            raise RuntimeError(f"{what} of a DataParallel that was closed: wrap the module again")
        if self._tuner is None:
            log.warning("anabranch: %s has nothing to show: %s", what, self._no_plan_reason)
        return self._tuner

    def comm_state_dict(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint with the model: its residuals; {} where none are kept."""
        if self._no_plan_reason == CLOSED:
            raise RuntimeError("this DataParallel was closed, and its residuals are gone: save them before close()")
        state = self._collectives.residuals.state_dict() if self._collectives is not None else {}
        return {**state, "steps_trained": self._tuner.steps_done if self._tuner is not None else 0} if state else {}

    def load_comm_state_dict(self, *states: Any) -> None:
        """Load what ``comm_state_dict`` returned on this rank: on every rank, before the first step.

        If the number of ranks has changed, give every rank the states of all old ranks:
        ``load_comm_state_dict(*states)``. Ranks compare what they loaded in the first step, which raises
        DisagreementError on all of them if one has loaded another checkpoint, or none.
        """
        if strange := [state for state in states if not isinstance(state, Mapping)]:
            raise ValueError(
                f"load_comm_state_dict() was given {brief(strange[0])}: expected a dict of comm_state_dict()"
            )
        if self._tuner is not None:
            self._tuner.runner.load(*states)
            self._tuner.runner.timer.steps_done = max((state.get("steps_trained", 0) for state in states), default=0)
        elif self._collectives is not None:
            self._collectives.residuals.load_state_dict(*states)
        elif any(state.get("residuals") for state in states):
            raise RuntimeError(f"residuals cannot be loaded: {self._no_plan_reason}")
        self._follow_scale()

    def follow(self, scaler: Scaler) -> None:
        """Scale residuals with this GradScaler. Call it on every rank, and save the scaler in checkpoints, too.

        Residuals are gradients of a loss times the scale of their step. When the scale changes, or a loaded checkpoint
        had another scale, they are multiplied by the same ratio before the next forward.
        """
        self._scaler = scaler
        self._follow_scale()

    def _follow_scale(self) -> None:
        if self._scaler is not None and self._collectives is not None:
            self._collectives.residuals.rescale(float(self._scaler.get_scale()))

    def replan(self) -> None:
        """Profile, measure and plan again. Rank 0's call counts; it takes effect within 40 steps, or after a trial."""
        if self._tuner is not None:
            self._tuner.replan_requested = True

    def hold(self) -> None:
        """Keep the best layout seen so far and never plan again, even if the step time drifts.

        Rank 0's call counts; it takes effect at its next decision: within a few steps of a search, else within 60.
        """
        if self._tuner is not None:
            self._tuner.search.held = True

    def _mark_closed(self) -> None:
        if self._collectives is not None:
            self._collectives.close()
        self._tuner = self._collectives = None
        self._no_plan_reason = CLOSED


def _release(tuner: Tuner, home_pid: int) -> None:
    """Close a tuner that was made in the process ``home_pid``. A forked child has none of the threads to end."""
    if os.getpid() == home_pid:
        tuner.close()
    else:
        keep_all_groups()
