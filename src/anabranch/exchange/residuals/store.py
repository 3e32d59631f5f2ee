"""Residuals: what the exchanges of one model keep between steps, on one rank, and how all of it is sent in the end."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from anabranch.exchange.dense import all_finite
from anabranch.exchange.interface import Group
from anabranch.exchange.model_parameters import shaped
from anabranch.exchange.residuals.bucket_states import BucketState, BucketStates
from anabranch.exchange.residuals.checkpoint import check_saved
from anabranch.exchange.residuals.momentum import Velocity
from anabranch.exchange.shares import WHOLE, Share, within
from anabranch.values.kinds.formats import STORED, BlockFormat
from anabranch.values.kinds.names import density_of, is_two_level
from anabranch.values.nodes import Nodes
from anabranch.values.plan import Bucket, Plan

NO_PARAMETERS: Mapping[str, torch.Tensor] = MappingProxyType({})
Applied = Callable[[Collection[str]], Collection[str]]


class Residuals:
    """All that the exchanges of one model keep between steps; families share it, so that a plan can mix them.

    keeps            whether a bucket of this kind has a residual; without it none has
    parameters       those of the model that are averaged, by name
    averaged         and ``applied``: as in ``ResidualFlush``
    frozen           the model's other parameters; a checkpoint may hold their residuals, which are kept
    warmup_steps     training steps before exchanges that keep residuals are tried
    momentum         share of a velocity that is left after a step (``momentum.py``); 0: gradients are sent
    skipped          whether a loss scaler will skip the step that ends; by default, whether a gradient is not finite
    form             how residuals are rounded between exchanges; None: they are float32
    nodes            those among which two-level buckets are exchanged; None where a plan has no such bucket
    """

    def __init__(
        self,
        keeps: Callable[[str], bool] | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
        group: Group | None = None,
        averaged: Callable[[], bool] = lambda: True,
        applied: Applied | None = None,
        frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
        *,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        skipped: Callable[[], bool] | None = None,
        form: BlockFormat | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self.warmup_steps = warmup_steps
        self._momentum = momentum
        self.keeps: Callable[[str], bool] = keeps or (lambda _: False)
        self.keeps_any = keeps is not None  # if so, ``on_step_end`` must be called after every step
        self._skipped = skipped or (lambda: not _gradients_finite(parameters))
        self._parameters = parameters
        self._numels = {name: parameter.numel() for name, parameter in {**parameters, **frozen}.items()}
        self.device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._states = BucketStates(rank, ranks, self.device, form, nodes)
        self._flush = ResidualFlush(self._states, parameters, averaged, applied)
        self._exchanged: list[tuple[BucketState, torch.Tensor]] = []  # in this step: states and averages

    def use_nodes(self, nodes: Nodes) -> None:
        """Two-level buckets are exchanged among these nodes; before the first one."""
        self._states.use_nodes(nodes)

    def bucket_state(self, bucket: Bucket, average: torch.Tensor | None = None) -> BucketState:
        """The state of a bucket whose kind keeps a residual.

        ``average``: where an exchange that begins now will leave its average, that of its share if it has two levels.
        Under a loss scaler both are remembered until the step ends.
        """
        numels = [self._numels[name] for name in bucket.names]
        state = self._states.bucket(bucket.names, numels, self._share(bucket.collective))
        if average is not None and self._states.scale is not None:
            self._exchanged.append((state, average))
        return state

    def of(self, bucket: Bucket) -> BucketState | None:
        """The state of a bucket; None if its kind keeps no residual."""
        return self.bucket_state(bucket) if self.keeps(bucket.collective) else None

    def buckets(self) -> list[BucketState]:
        """The buckets with residuals of the plan in force."""
        return self._states.buckets()

    def sends_velocities(self, kind: str) -> bool:
        """Whether exchanges of this kind average velocities in place of gradients."""
        return self._momentum > 0 and density_of(kind) is not None

    def velocity(self, bucket: Bucket) -> Velocity | None:
        """What exchanges of this bucket average in place of gradients; None if they average gradients.

        The gradients of a two-level bucket may have residuals in them, from before it was made. A velocity would take
        only a part of these, so they are sent themselves.
        """
        if not self.sends_velocities(bucket.collective):
            return None
        state = self.bucket_state(bucket)
        if state.share != WHOLE and (state.fresh or not self._states.flushing.keys().isdisjoint(bucket.names)):
            return None
        return Velocity(state.sent_velocity(), self._momentum)

    def on_step_end(self) -> None:
        """Call this when all gradients of a step are averaged, on all ranks.

        Under a loss scaler, which skips a step if any gradient is not finite, it puts back what was sent in that step.
        Waits for the device, as the scaler will.
        """
        exchanged, self._exchanged = self._exchanged, []
        if exchanged and self._skipped():
            for state, average in exchanged:
                state.take_back(average)

    def use_plan(self, plan: Plan | None) -> None:
        """Prepare for a plan, or for DDP's own buckets, from the next step on.

        That step also sends the residuals that no bucket of the plan can take, so that none is lost.
        """
        buckets = [bucket for bucket in (plan.buckets if plan is not None else ()) if self.keeps(bucket.collective)]
        self._flush.send_all_but(
            {name: self._share(bucket.collective).of(self._numels[name]) for bucket in buckets for name in bucket.names}
        )

    def store_as(self, how: str) -> None:
        """Between steps: store residuals as "bf16", "int8", or as they are."""
        self._states.store_as(STORED.get(how))

    def summary(self) -> list[str]:
        """Lines for ``explain()``."""
        lines = []
        for state in self._states.buckets():
            to, share = state.names[-1], float(state.applied) / max(1, state.numel)
            norm = float(state.current().norm())
            if state.fresh and state.step:  # no values were selected: all were sent, rounded
                lines.append(f"bucket to {to}: rounding errors of norm {norm:.3g} are kept for the next step")
            else:
                lines.append(f"sparse bucket to {to}: {share:.2%} applied in its last step, |residual| {norm:.3g}")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint of this rank must hold; empty if nothing is kept between steps."""
        if not self.keeps_any:
            return {}
        orders = {name: order for name in self._parameters if (order := self._order(name))}
        return {**self._states.state_dict(), "orders": orders}

    def load_state_dict(self, *states: Any) -> None:
        """Load what ``state_dict`` returned on this rank, or on all ranks; before the first step.

        A state that is refused changes nothing here; other ranks learn of it in the first step.
        """
        if not self.keeps_any:
            if any(states):
                raise ValueError(
                    "the checkpoint holds the state of a compression, and this model has none: give it the compress= "
                    "that the checkpoint was written with, or leave the state out"
                )
            return
        try:
            for state in states:
                if state:
                    check_saved(state, self._numels)
                    self._check_orders(state.get("orders", {}))
            self._states.load_state_dict(*states)
        except ValueError as error:
            self._states.loaded = [f"a state that was refused: {error}"]
            raise
        self._flush.send_all_but(self._flush.kept)

    def loaded(self) -> list[str]:
        """A description of what was loaded, as lines that must be the same on all ranks."""
        return self._states.loaded if self.keeps_any else []

    def rescale(self, scale: float) -> None:
        """Multiply residuals to match gradients of a loss times ``scale``, which come from now on."""
        self._states.rescale(scale)

    def close(self) -> None:
        """Remove hooks and free all memory, also if there are still references to this object."""
        self._flush.close()
        self._states.clear()
        self._exchanged = []

    def _share(self, kind: str) -> Share:
        """The part of each parameter that this rank exchanges in a bucket of this kind."""
        return self._states.share if is_two_level(kind) else WHOLE

    def _order(self, name: str) -> list[int]:
        """The strides of a parameter and of its residual; empty if it is row-major, or a stand-in without memory."""
        parameter = self._parameters[name]
        return [] if parameter.is_contiguous() or 0 in parameter.stride() else list(parameter.stride())

    def _check_orders(self, orders: Mapping[str, Sequence[int]]) -> None:
        for name in self._parameters:
            if (kept := list(orders.get(name, []))) != (own := self._order(name)):
                there, here = (f"strides {order}" if order else "row-major" for order in (kept, own))
                raise ValueError(
                    f"the residual of {name} was saved in its memory order, {there}, and here it is {here}: "
                    "load it into a model of the same memory format"
                )


class ResidualFlush:
    """Sends residuals that no bucket has: added to the next gradients of their parameters.

    After a change of plan, or from a checkpoint, a rank may have a residual that its buckets would never send: the
    parameter is sent exactly now, or another rank of the node exchanges these elements. A hook on the parameter adds it
    to the gradient of the next backward pass, on this rank alone, and the averaging of that gradient sends it. If the
    average is not finite, nobody applies it, and the residual is kept. So residuals need no message of their own.

    averaged   whether the backward pass that ends was averaged
    applied    where parameters are updated inside backward: which of the given parameters were. Elsewhere a gradient
               counts as applied if all averages are finite. What was flushed to a bucket with a residual counts as sent
               if its own averages are finite: what these lack is in the residual, with all that came with it.
    """

    def __init__(
        self,
        states: BucketStates,
        parameters: Mapping[str, torch.Tensor],
        averaged: Callable[[], bool],
        applied: Applied | None = None,
    ) -> None:
        self.kept: Mapping[str, range] = {}  # the elements that buckets with residuals have
        self._states = states
        self._parameters = parameters
        self._averaged = averaged
        self._applied = applied or self._applied_by_optimizer
        self._handles: list[RemovableHandle] = []

    def send_all_but(self, kept: Mapping[str, range]) -> None:
        """From now on only buckets of these elements have residuals: flush those of all others."""
        self.kept = kept
        self._states.keep_buckets_of(kept)
        self.close()
        for name, piece in self._states.unbucketed.items():
            if name in self._parameters and not within(piece.elements, kept.get(name, range(0))):
                parameter = self._parameters[name]
                trained = parameter.requires_grad
                parameter.requires_grad_(True)  # else torch refuses a hook; a frozen parameter may be trained later
                self._handles.append(parameter.register_hook(partial(self._add, name)))
                parameter.requires_grad_(trained)

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _add(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        # Callbacks run in order when backward ends. One queued by a callback runs after DDP's, which averages.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._check))
        piece = self._states.begin_flush(name)
        if piece is None:
            return gradient
        added = gradient + shaped(piece.to(gradient.device), self._parameters[name])
        if gradient.dtype != torch.float16:
            return added.to(gradient.dtype)
        return self._fitting(name, added, gradient)

    def _fitting(self, name: str, added: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Clamp a sum to float16; keep the remainder as residual, since an infinite sum would never be sent."""
        largest = torch.finfo(gradient.dtype).max
        fitting = added.clamp(-largest, largest)
        rest = torch.where(gradient.isfinite(), added - fitting, 0.0)
        if bool(rest.any()):
            whole = rest.new_empty(rest.numel())
            shaped(whole, self._parameters[name]).copy_(rest)
            self._states.put_back(name, whole)
        return fitting.to(gradient.dtype)

    def _check(self) -> None:
        """Residuals that were added count as sent if they were applied; under no_sync() a later pass decides."""
        if not self._states.flushing or not self._averaged():
            return
        self._states.end_flush(self._applied(self._states.flushing))
        self.send_all_but(self.kept)

    def _applied_by_optimizer(self, names: Collection[str]) -> Collection[str]:
        """All or none, since the optimizer's step is skipped as a whole if any gradient is not finite."""
        if _gradients_finite(self._parameters):
            return names
        bucketed = {name for state in self._states.buckets() for name in state.names}
        for name in bucketed.intersection(names):
            parameter = self._parameters[name]
            if parameter.grad is not None:
                finite = torch.empty(parameter.numel(), dtype=torch.bool, device=parameter.device)
                shaped(finite, parameter).copy_(parameter.grad.isfinite())
                self._states.mark_sent(name, finite)
        return ()


def _gradients_finite(parameters: Mapping[str, torch.Tensor]) -> bool:
    return bool(all_finite(*(p.grad for p in parameters.values() if p.grad is not None)))
