"""Runs plans on a live model, one at a time; a plan takes effect between two steps."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch._compile import _disable_dynamo

from anabranch.comm.agree import check_same
from anabranch.comm.collectives import Collectives
from anabranch.comm.exchange import BucketExchange, Group
from anabranch.comm.lanes import Lanes
from anabranch.comm.launcher import BucketLauncher
from anabranch.observe.clock import clock_for
from anabranch.observe.step_timer import StepTimer
from anabranch.plan import Plan


class Layout(Protocol):
    """What holds the buckets of one model: DDP's reducer, or Lean's engine."""

    @property
    def default_label(self) -> str:
        """What runs without a plan, in words."""
        ...

    @property
    def default_plan(self) -> Plan | None:
        """The buckets that run without a plan; None if the layout builds and launches them itself."""
        ...

    @property
    def exchange(self) -> BucketExchange:
        """How buckets are exchanged."""
        ...

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are averaged now, by name."""
        ...

    def progress(self) -> object:
        """Something that changes with every averaged backward pass and with nothing else."""
        ...

    def may_change(self, averaged: bool) -> bool:
        """Whether buckets may be laid out anew before a forward whose gradients will, or will not, be averaged."""
        ...

    def before_forward(self) -> None:
        """A forward that will be differentiated is about to begin; raises if the model cannot go on."""
        ...

    def before_change(self) -> None:
        """Another plan is wanted: bring what is under way to rest."""
        ...

    def use(self, launcher: BucketLauncher | None) -> None:
        """Lay the buckets out for the launcher's plan; None gives the layout its own buckets back.

        Does not communicate. Every rank calls it before the same forward.
        """
        ...

    def close(self) -> None:
        """Remove hooks."""
        ...


class PlanRunner:
    """One model whose buckets can be changed between steps; owns its lanes and its step timer.

    ``group`` carries gradients, ``control`` is a group of the same ranks for small messages in host memory.
    ``after_step`` is called when the gradients of a step are averaged.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        control: Group,
        collectives: Collectives,
        after_step: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.parameters = layout.trained()
        self.device = next(iter(self.parameters.values())).device
        single_cta = any(collectives.on_side_stream(kind) for kind in collectives.kinds)  # they send little data
        self.lanes = Lanes(group, self.device, single_cta)
        self.timer = StepTimer(clock_for(self.device), after_step, layout.progress)
        self.stale = False  # a plan could not be taken: the model trains other parameters than when it was wrapped
        self.launcher: BucketLauncher | None = None
        self._collectives = collectives
        self._control = control
        self._checked = False  # whether ranks have compared what they loaded
        self._in_force: Plan | None = None
        self._wanted: tuple[Plan | None] | None = None  # what the next forward lays the buckets out for
        if layout.default_plan is not None:
            self.lanes.grow(1)
            self._lay_out(None)

    @property
    def plan(self) -> Plan | None:
        """What the next step runs; None for the layout's own buckets."""
        return self._in_force if self._wanted is None else self._wanted[0]

    @property
    def plan_in_force(self) -> Plan | None:
        """What the last step ran; None for the layout's own buckets."""
        return self._in_force

    def use_plan(self, plan: Plan | None) -> None:
        """Have the next forward lay the buckets out for this plan; None means the layout's own. Collective."""
        self.layout.before_change()
        if plan is not None:
            self.lanes.grow(plan.lanes)
        self._collectives.use_plan(plan)
        self._wanted = (plan,)

    @_disable_dynamo
    def before_forward(self, averaged: bool) -> None:
        """A forward that will be differentiated is about to begin; ``averaged``: its gradients will be averaged."""
        self.lanes.check()  # first: it knows best why a backward pass broke off
        self.layout.before_forward()
        if self.launcher is not None:
            self.launcher.divisor = None
        # This is the first forward after a synchronised backward, so no gradient was accumulated that a new layout
        # would not know of.
        if self._wanted is not None and self.layout.may_change(averaged):
            (plan,), self._wanted = self._wanted, None
            if self.trains_the_same():
                self._lay_out(plan)
            else:
                self.stale = True
        if averaged:
            self.timer.forward_begins()

    def load(self, *states: Any) -> None:
        """Have the collectives take over a checkpoint; ranks compare it in the first step."""
        if self._checked:
            raise RuntimeError(
                "load_comm_state_dict() after steps were made: load before the first, in which ranks compare what they "
                "were given; close() this DataParallel, wrap the module again, and load"
            )
        self._collectives.load_state_dict(*states)

    @_disable_dynamo
    def check_loaded(self) -> None:
        """Refuse, on all ranks alike, checkpoints that differ between ranks; once, in the first averaged backward.

        It comes before the first planned bucket, because ranks at different steps send different messages.
        """
        if not self._checked:
            self._checked = True
            what = "the checkpoint given to load_comm_state_dict(), on every rank or on none,"
            check_same(what, self._collectives.loaded(), self._control)

    def trains_the_same(self) -> bool:
        """Whether the model trains what it was wrapped with; if not, its buckets must stay as they are."""
        now = self.layout.trained()
        return list(now) == list(self.parameters) and all(now[name] is p for name, p in self.parameters.items())

    def close(self) -> None:
        """End threads, destroy the groups made here, and remove hooks."""
        self.layout.close()
        self._collectives.close()
        self.timer.clock.close()
        self.lanes.close()
        del self._control

    def _lay_out(self, plan: Plan | None) -> None:
        self.timer.forget_steps()
        wanted = plan if plan is not None else self.layout.default_plan
        running = self.launcher.plan if self.launcher is not None else None
        self._in_force = plan
        if wanted == running:
            return
        self.launcher = None
        if wanted is not None:
            self.launcher = BucketLauncher(
                wanted, self.lanes, self.layout.exchange, self.timer.mark_bucket, self.check_loaded
            )
        self.layout.use(self.launcher)
