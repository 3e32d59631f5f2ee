"""ResidualMemory: what exchanges with residuals keep between steps, for all buckets of one model on one rank."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from anabranch.exchange.contracts import Group
from anabranch.exchange.dense import all_finite
from anabranch.exchange.error_samples import Velocity
from anabranch.exchange.residuals.checkpoint import check_saved
from anabranch.exchange.residuals.flush import Applied, ResidualFlush
from anabranch.exchange.residuals.momentum import Momentum
from anabranch.exchange.residuals.monitor import SAMPLE_PERIOD, residual_grows
from anabranch.exchange.residuals.state import BucketState, SparseState
from anabranch.values.kinds.formats import STORED, BlockFormat
from anabranch.values.kinds.names import density_of
from anabranch.values.plan import Bucket, Plan

NO_PARAMETERS: Mapping[str, torch.Tensor] = MappingProxyType({})


class ResidualMemory:
    """The residuals of one model's buckets; families of exchanges share it, so that a plan can mix them.

    keeps_residual   whether a bucket of this kind has a residual
    parameters       those of the model that are averaged, by name
    averaged         and ``applied``: as in ``ResidualFlush``
    frozen           the model's other parameters; a checkpoint may hold their residuals, which are kept
    warmup_steps     as in ``ExchangeMemory``
    momentum         velocities, which are saved with the residuals
    skipped          whether a loss scaler will skip the step that ends; by default, whether a gradient is not finite
    form             how residuals are rounded between exchanges; None: they are float32
    """

    def __init__(
        self,
        keeps_residual: Callable[[str], bool],
        parameters: Mapping[str, torch.Tensor],
        group: Group,
        averaged: Callable[[], bool],
        applied: Applied | None = None,
        frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
        *,
        warmup_steps: int = 0,
        momentum: Momentum | None = None,
        sample_period: int = SAMPLE_PERIOD,
        skipped: Callable[[], bool] | None = None,
        form: BlockFormat | None = None,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.momentum = momentum or Momentum(0.0)
        self.keeps_residual = keeps_residual
        self._skipped = skipped or self._any_not_finite
        self._parameters = parameters
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._known_numels = {name: parameter.numel() for name, parameter in {**parameters, **frozen}.items()}
        self._sizes: dict[tuple[str, ...], tuple[int, ...]] = {}  # of parameters, by bucket
        device = next(iter(parameters.values())).device
        self._state = SparseState(dist.get_rank(group), dist.get_world_size(group), device, sample_period, form)
        self._residual_flush = ResidualFlush(self._state, parameters, averaged, applied)
        self._exchanged: list[tuple[BucketState, torch.Tensor]] = []  # in this step: states and averages

    def bucket_state(self, bucket: Bucket) -> BucketState:
        """The state of a bucket whose kind keeps a residual."""
        if bucket.names not in self._sizes:
            self._sizes[bucket.names] = tuple(self._numels[name] for name in bucket.names)
        return self._state.bucket(bucket.names, self._sizes[bucket.names])

    def begin_exchange(self, bucket: Bucket, buffer: torch.Tensor) -> BucketState:
        """The same, for an exchange that begins now, and whose average will be in ``buffer``."""
        state = self.bucket_state(bucket)
        self._exchanged.append((state, buffer))
        return state

    def residual_state(self, bucket: Bucket) -> BucketState | None:
        return self.bucket_state(bucket) if self.keeps_residual(bucket.collective) else None

    def sends_velocities(self, kind: str) -> bool:
        return self.momentum.decay > 0 and density_of(kind) is not None

    def velocity(self, bucket: Bucket) -> Velocity | None:
        return self.momentum.velocity(self.bucket_state(bucket)) if self.sends_velocities(bucket.collective) else None

    def on_step_end(self) -> None:
        """Under a loss scaler, which skips a step if any gradient is not finite: put back what was sent in it.

        Every rank adds the average to its residual, so that the sum of residuals over the ranks is what it was. Where
        an average is not finite itself, the exchange has put back its own already. Waits for the device, as the scaler
        will.
        """
        exchanged, self._exchanged = self._exchanged, []
        if self._state.scale is None or not exchanged:
            return
        if self._skipped():
            for state, average in exchanged:
                with state.whole() as residual:
                    residual.add_(torch.where(average.isfinite(), average, 0.0))

    def use_plan(self, plan: Plan | None) -> None:
        buckets = plan.buckets if plan is not None else ()
        kept = {name for bucket in buckets if self.keeps_residual(bucket.collective) for name in bucket.names}
        self._residual_flush.set_sparse_names(kept)
        self._sizes.clear()

    def store_residuals(self, how: str) -> None:
        self._state.store_as(STORED.get(how))

    def summary(self) -> list[str]:
        lines = []
        for state in self._state.buckets():
            to, share = state.names[-1], float(state.applied) / max(1, sum(state.numels))
            samples = state.residual_monitor.samples() if state.residual_monitor is not None else []
            age = f", about {samples[-1].age_steps:.1f} steps old" if samples and samples[-1].age_steps else ""
            norm = float(state.current().norm())
            if state.fresh and state.step:  # no values were selected: all were sent, rounded
                lines.append(f"bucket to {to}: rounding errors of norm {norm:.3g} are kept for the next step{age}")
                continue
            lines.append(f"sparse bucket to {to}: {share:.2%} applied in its last step, |residual| {norm:.3g}{age}")
            if residual_grows(samples, max(share, 1e-4)):
                then = samples[len(samples) // 2]
                lines.append(
                    f"WARNING: the residual of the bucket to {to} grows without bound: its norm was {then.norm:.3g} at "
                    f"step {then.step} and {samples[-1].norm:.3g} at step {samples[-1].step}, {then.age_steps:.1f} and "
                    f"{samples[-1].age_steps:.1f} steps of gradients: give OkTopk a higher density"
                )
        return lines

    def state_dict(self) -> dict[str, Any]:
        velocities = {name: piece.clone() for name, piece in self.momentum.state_dict().items()}
        orders = {name: order for name in self._parameters if (order := self._order(name))}
        return {**self._state.state_dict(), "velocities": velocities, "orders": orders}

    def load_state_dict(self, *states: Any) -> None:
        """Load checked states. One that is refused changes nothing here; other ranks learn of it in the first step."""
        try:
            for state in states:
                if state:
                    check_saved(state, self._known_numels)
                    self._check_orders(state.get("orders", {}))
            self._state.load_state_dict(*states)
        except ValueError as error:
            self._state.loaded = [f"a state that was refused: {error}"]
            raise
        self.momentum.load_state_dict(*(state.get("velocities", {}) for state in self._state.loaded_states))
        self._residual_flush.set_sparse_names(self._residual_flush.sparse_names)

    def loaded(self) -> list[str]:
        return self._state.loaded

    def rescale(self, scale: float) -> None:
        if self._state.scale is not None:
            self.momentum.rescale(scale / self._state.scale)
        self._state.rescale(scale)

    def close(self) -> None:
        self._residual_flush.close()
        self._state.clear()
        self.momentum.clear()
        self._exchanged = []

    def _any_not_finite(self) -> bool:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return bool(gradients) and not bool(all_finite(*gradients))

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
