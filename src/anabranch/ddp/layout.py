"""The layout in force on a live DDP: planned buckets with their hook and lanes, or DDP's own; and its buffers."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from anabranch.comm.agree import check_same
from anabranch.comm.collectives import Collectives
from anabranch.comm.lanes import Lane, Lanes
from anabranch.ddp.deferred_buffers import DeferredBuffers
from anabranch.ddp.hook import PlanHook
from anabranch.ddp.reducer import Layout, built_by_ddp, gradients_seen, layout_of, reduced_parameters, relayout
from anabranch.observe.clock import clock_for
from anabranch.observe.step_timer import StepTimer
from anabranch.plan import Plan


class DdpLayout:
    """One DDP whose buckets can be changed between steps. ``after_step`` is called when gradients are averaged."""

    stock = "DDP's own buckets"  # what runs without a plan, in words

    def __init__(
        self, ddp: Any, control: dist.ProcessGroup, after_step: Callable[[], None], collectives: Collectives
    ) -> None:
        self._collectives = collectives
        self._owner = weakref.ref(ddp)  # not the other way round: a dropped model must be able to go
        self.parameters = self.trained_now()
        self.device = next(iter(self.parameters.values())).device
        slim = any(collectives.aside(kind) for kind in collectives.kinds)  # it sends little, beside computation
        self.lanes = Lanes(ddp.process_group, self.device, slim)
        self.watch = StepTimer(clock_for(self.device), after_step, self._seen)
        self.hook: PlanHook | None = None  # the plan in force; none with DDP's own buckets
        self.stale = False  # a layout could not be taken: the model trains something else than it was wrapped with
        self.agreed = False  # whether ranks have compared what they loaded
        self._control = control
        self._buffers = DeferredBuffers(self._module_buffers, control)
        self._due: tuple[Plan | None] | None = None  # what the next forward lays the buckets out for
        self._ddp_layout: Layout | None = None  # DDP's own buckets, once there are others

    @property
    def ddp(self) -> Any:
        """The DDP itself."""
        ddp = self._owner()
        if ddp is None:
            raise RuntimeError("the DataParallel of this layout is gone")
        return ddp

    @property
    def plan(self) -> Plan | None:
        """What the next step runs: the plan in force, unless another is wanted; None for DDP's own buckets."""
        if self._due is not None:
            return self._due[0]
        return self.hook.plan if self.hook is not None else None

    def want(self, plan: Plan | None) -> None:
        """Have the next forward lay the buckets out for this plan; no plan means DDP's own."""
        if plan is not None:
            self.lanes.grow(plan.lanes)
        self._collectives.use_plan(plan)
        self._due = (plan,)

    @_disable_dynamo
    def before_forward(self, averaged: bool) -> None:
        """A forward that will be differentiated is about to begin, and whether its gradients will be averaged."""
        self.lanes.check()
        if self.hook is not None:
            self.hook.divisor = None
        # This is the first forward after a synchronised backward, so nothing was accumulated that a new reducer would
        # not know of. With static_graph it would average after its first backward even under no_sync(), so not there.
        if self._due is not None and (averaged or not self.ddp.static_graph):
            (plan,), self._due = self._due, None
            if self.trains_the_same():
                self._lay_out(plan)
            else:
                self.stale = True
        if averaged:
            self.watch.forward_begins()

    def load(self, *states: Any) -> None:
        """Have the collectives take over what they kept; ranks compare it in the first step."""
        if self.agreed:
            raise RuntimeError(
                "load_comm_state_dict() after steps were made: load before the first, in which ranks compare what they "
                "were given; close() this DataParallel, wrap the module again, and load"
            )
        self._collectives.load_state_dict(*states)

    @_disable_dynamo
    def agree(self) -> None:
        """Refuse, on all ranks alike, what they have loaded differently; once, in the first averaged backward.

        It comes before the first planned bucket, because ranks that remember different steps send different messages.
        """
        if not self.agreed:
            self.agreed = True
            what = "the checkpoint given to load_comm_state_dict(), on every rank or on none,"
            check_same(what, self._collectives.loaded(), self._control)

    def trained_now(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are averaged, by name."""
        return reduced_parameters(self.ddp)

    def trains_the_same(self) -> bool:
        """Whether the model trains what it was wrapped with; if not, its buckets must stay as they are."""
        now = self.trained_now()
        return list(now) == list(self.parameters) and all(now[name] is p for name, p in self.parameters.items())

    @_disable_dynamo
    def drain_buffers(self) -> None:
        """Wait for buffers on their way, so that what is sent next cannot meet them."""
        self._buffers.drain()

    @_disable_dynamo
    def discard_buffers(self) -> None:
        """Someone else sees to the buffers this time."""
        self._buffers.discard()

    @_disable_dynamo
    def sync_buffers(self) -> bool:
        """Whether rank 0's buffers are in place; if not, DDP must broadcast them."""
        return self._buffers.install()

    def close(self) -> None:
        """Let go of threads and groups."""
        self._collectives.close()
        self.watch.clock.close()
        self.lanes.close()
        self._buffers.close()
        del self._control

    def _seen(self) -> object:
        ddp = self._owner()
        return None if ddp is None else gradients_seen(ddp)

    def _lay_out(self, plan: Plan | None) -> None:
        """Does not communicate: every rank comes here before the same step."""
        self.watch.forget()
        if plan is None:
            if self.hook is not None:
                self.hook = None
                relayout(self.ddp, self._ddp_layout, None)
            return
        if self.hook is not None and self.hook.plan == plan:
            return
        if self.hook is None:
            self._ddp_layout = self._ddp_layout or built_by_ddp(self.ddp)
        self.hook = PlanHook(plan, self.lanes, self.watch, self._send_buffers, self._collectives, self.agree)
        relayout(self.ddp, layout_of(plan, list(self.parameters)), self.hook.run)

    def _module_buffers(self) -> list[torch.Tensor]:
        self.ddp._assign_modules_buffers()  # as DDP does before it sends them: they may have been replaced
        return list(self.ddp.modules_buffers)

    def _send_buffers(self, lane: Lane) -> None:
        ddp = self.ddp
        if ddp.will_sync_module_buffers() and not hasattr(ddp, "buffer_hook") and not ddp._join_config.enable:
            self._buffers.send(lane)
