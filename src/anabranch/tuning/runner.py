"""Runs plans on a live model, one at a time; a new plan takes effect between two steps."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch._compile import _disable_dynamo

from anabranch.exchange.agreement import all_or_none, check_same
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group
from anabranch.exchange.lanes import Lanes
from anabranch.observe.clock import clock_for
from anabranch.observe.step_timer import StepTimer
from anabranch.values.kinds.names import is_two_level
from anabranch.values.plan import Plan


class Layout(Protocol):
    """The owner of one model's buckets: DDP's reducer, or Lean's engine."""

    @property
    def default_label(self) -> str:
        """A name for the buckets that run without a plan."""

    @property
    def default_plan(self) -> Plan | None:
        """The buckets that run without a plan; None if the layout builds and launches them itself."""

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are averaged now, by name."""

    def report_averaged(self, callback: Callable[[], None]) -> None:
        """Call this from now on whenever all gradients of a step are averaged, inside backward, on every rank."""

    def may_change(self, averaged: bool) -> bool:
        """Whether buckets may change before this forward; ``averaged``: its gradients will be averaged."""

    def can_rebuild(self) -> bool:
        """Whether this rank can still build buckets of the parameters that were trained when the model was wrapped.

        It can if some were frozen or unfrozen since, on this rank alone: all ranks must change their buckets together.
        """

    def before_forward(self) -> None:
        """Called before a forward that will be differentiated; raises if the model cannot continue."""

    def use(self, launcher: BucketLauncher | None) -> None:
        """Build the buckets of the launcher's plan; None restores the layout's own buckets.

        Does not communicate. Every rank calls it before the same forward.
        """

    def close(self) -> None:
        """Remove hooks."""


class PlanRunner:
    """One model whose buckets can be changed between steps; owns its lanes and its step timer.

    group        sends gradients
    after_step   called when the gradients of a step are averaged

    plan_in_force   the plan of the last step; None for the layout's own buckets
    stale           a plan could not be used: parameters were converted or replaced after the model was wrapped
    """

    def __init__(self, layout: Layout, group: Group, collectives: Collectives, after_step: Callable[[], None]) -> None:
        self.layout = layout
        self.parameters = layout.trained()
        self.device = next(iter(self.parameters.values())).device
        self.lanes = Lanes(group, self.device, collectives.max_ctas)
        self.timer = StepTimer(clock_for(self.device), after_step)
        layout.report_averaged(self.timer.gradients_averaged)
        self.stale = False
        self.launcher: BucketLauncher | None = None
        self._collectives = collectives
        self._checked = False  # whether ranks have compared what they loaded
        self.plan_in_force: Plan | None = None
        self._requested: tuple[Plan | None] | None = None  # the plan that the next forward changes to, if any
        if layout.default_plan is not None:
            try:
                self.lanes.grow(1)
                with all_or_none(f"building {layout.default_label}", group):
                    self._change_layout(None)
            except BaseException:
                self.close()
                raise

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step; None for the layout's own buckets."""
        return self._requested[0] if self._requested is not None else self.plan_in_force

    @property
    def control(self) -> Group:
        """A group of the same ranks for small messages in host memory, which nothing else uses."""
        return self.lanes.control

    def use_plan(self, plan: Plan | None) -> None:
        """Change to this plan at the next forward; None means the layout's own buckets. Collective."""
        if plan == self.plan:
            return
        if plan is not None:
            self.lanes.grow(plan.lanes)
            if (nodes := self._collectives.nodes) is not None:
                self.lanes.use_nodes(nodes, {b.lane for b in plan.buckets if is_two_level(b.collective)})
        self._collectives.residuals.use_plan(plan)
        self._requested = (plan,)

    def before_forward(self, averaged: bool) -> bool:
        """Call this before a forward that will be differentiated; returns whether it was to change the layout.

        ``averaged``: its gradients will be averaged.
        """
        self.lanes.check()  # first, since a lane's error says why a backward pass was interrupted
        self.layout.before_forward()
        if self.launcher is not None:
            self.launcher.divisor = None
        # This is the first forward after a synchronised backward, so there are no accumulated gradients that a new
        # layout would miss.
        changes = self._requested
        if changes is not None and self.layout.may_change(averaged):
            (plan,) = changes
            self._requested = None
            if self.layout.can_rebuild():
                self._change_layout(plan)
            else:
                self.stale = True
        if averaged:
            self.timer.forward_begins()
        return changes is not None

    def load(self, *states: Any) -> None:
        """Load a checkpoint into the collectives; ranks compare what they loaded in the first step."""
        if self._checked:
            raise RuntimeError(
                "load_comm_state_dict() after steps were made: load before the first step, in which ranks compare what "
                "they loaded; close() this DataParallel, wrap the module again, and load"
            )
        self._collectives.residuals.load_state_dict(*states)

    @_disable_dynamo
    def check_loaded(self) -> None:
        """Raise DisagreementError on all ranks if they loaded different checkpoints; once they agree, do nothing.

        It is called before the first planned bucket, because ranks at different steps would send different messages.
        """
        if not self._checked:
            what = "the checkpoint given to load_comm_state_dict(), on every rank or on none,"
            check_same(what, self._collectives.residuals.loaded(), self.control)
            self._checked = True

    def trains_the_same(self) -> bool:
        """Whether the model trains the same parameters as when it was wrapped; if not, there is nothing to plan for."""
        now = self.layout.trained()
        return list(now) == list(self.parameters) and all(now[name] is p for name, p in self.parameters.items())

    def close(self) -> None:
        """End threads, destroy the groups created here, and remove hooks."""
        self.layout.close()
        self._collectives.close()
        if self.launcher is not None:  # DDP's reducer has it until the wrapper is dropped
            self.launcher.close()
        self.timer.clock.close()
        self.lanes.close()

    def _change_layout(self, plan: Plan | None) -> None:
        self.timer.forget_steps()
        buckets = plan if plan is not None else self.layout.default_plan
        launched_now = self.launcher.plan if self.launcher is not None else None
        self.plan_in_force = plan
        if buckets == launched_now:
            return
        self.launcher = None
        if buckets is not None:
            numels = {name: parameter.numel() for name, parameter in self.parameters.items()}
            self.launcher = BucketLauncher(
                buckets, self.lanes, self._collectives, numels, self.timer.mark_bucket, self.check_loaded
            )
        self.layout.use(self.launcher)
