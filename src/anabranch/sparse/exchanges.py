"""Ok-Topk for the buckets of a live model: one kind of exchange per density, and what they keep between steps.

A bucket that names "oktopk:0.01" travels at a density of 1 %. Densities are few, because each is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from anabranch.comm.collectives import Collectives
from anabranch.comm.communicator import GroupCommunicator
from anabranch.comm.dense import COMPRESSED, DenseExchanges, all_finite
from anabranch.comm.exchange import Collective, Group, Steps, Traffic
from anabranch.plan import Bucket, Plan
from anabranch.sparse.momentum import Momentum
from anabranch.sparse.naming import LADDER, density_of, kind_of
from anabranch.sparse.oktopk import exchange
from anabranch.sparse.options import OkTopk
from anabranch.sparse.residual_flush import Applied, ResidualFlush
from anabranch.sparse.residual_monitor import residual_grows
from anabranch.sparse.saved_state import check_saved
from anabranch.sparse.sizes import Sizes
from anabranch.sparse.state import BucketState, SparseState

NO_PARAMETERS: Mapping[str, torch.Tensor] = MappingProxyType({})


class OkTopkExchanges:
    """The family of Ok-Topk exchanges of one model, at one density or several, and the memory of their residuals.

    ``parameters`` are those of the model that are averaged, by name. Vectors (biases, norms) always travel dense: they
    are few, and delay hurts them most. So do gradients that are not float32, since residuals are.
    ``averaged`` and ``applied`` as in ``ResidualFlush``. ``frozen``: the model's other parameters by name; a checkpoint
    may hold their residuals, which are kept.
    """

    def __init__(
        self,
        options: OkTopk,
        parameters: Mapping[str, torch.Tensor],
        group: Group,
        averaged: Callable[[], bool],
        applied: Applied | None = None,
        frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> None:
        fixed = [] if options.density == "auto" else [float(options.density)]
        self.kinds = tuple(kind_of(density) for density in fixed or LADDER)
        self.dense_names = frozenset(name for name, p in parameters.items() if p.dim() < 2 or p.dtype != torch.float32)
        self.warmup_steps = options.warmup_steps
        self._options = options
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._known_numels = {name: parameter.numel() for name, parameter in {**parameters, **frozen}.items()}
        self._sizes: dict[tuple[str, ...], tuple[int, ...]] = {}  # of parameters, by bucket
        self._device = next(iter(parameters.values())).device
        self._world_size = dist.get_world_size(group)
        self._state = SparseState(dist.get_rank(group), self._world_size, self._device, options.region_period)
        self._momentum = Momentum(options.momentum, options.wire != "fp32")
        self._residual_flush = ResidualFlush(self._state, parameters, averaged, applied)
        self._parameters = parameters
        self._exchanged: list[tuple[BucketState, torch.Tensor]] = []  # in this step: states and averages
        self._comms: dict[Group, GroupCommunicator] = {}

    def handles(self, kind: str) -> bool:
        return density_of(kind) is not None

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and dtype == torch.float32

    def on_side_stream(self, kind: str) -> bool:
        return self.handles(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        state = self._bucket_state(bucket)
        self._exchanged.append((state, buffer))
        density = density_of(bucket.collective)
        assert density is not None
        steps = exchange(buffer, state, self._comm(group), divisor, density, self._options)
        return self._momentum.wrap(steps, buffer, state)

    def residual_state(self, bucket: Bucket) -> BucketState | None:
        return self._bucket_state(bucket) if self.handles(bucket.collective) else None

    def _bucket_state(self, bucket: Bucket) -> BucketState:
        if bucket.names not in self._sizes:
            self._sizes[bucket.names] = tuple(self._numels[name] for name in bucket.names)
        return self._state.bucket(bucket.names, self._sizes[bucket.names])

    def on_step_end(self) -> None:
        """Under a loss scaler, which skips a step if any gradient is not finite: put back what was sent in it.

        Every rank adds the average to its residual, so that the sum of residuals over the ranks is what it was. A
        bucket that was not finite itself has put back its own already. Waits for the device, as the scaler will.
        """
        exchanged, self._exchanged = self._exchanged, []
        if self._state.scale is None or not exchanged:
            return
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if gradients and not bool(all_finite(*gradients)):
            for state, average in exchanged:
                state.residual.add_(torch.where(all_finite(average), average, 0.0))

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:  # noqa: ARG002
        """Bytes of the last exchange: exact exchanges send what was selected, fixed ones all their slots.

        On a GPU how much was selected is not known to the host, so that the planned sizes are given.
        """
        settled, state = density_of(bucket.collective), self._bucket_state(bucket)
        assert settled is not None
        density = self._options.density_at(max(0, state.step - 1), settled)
        sizes = Sizes.of(numel, ranks, density, self._options)
        if self._device.type != "cpu":
            nbytes = 2 * (ranks - 1) * sizes.message_nbytes
            return Traffic(nbytes, nbytes, sizes.k / numel)
        offered, applied = min(int(state.offered), sizes.max_selected), int(state.applied)
        nbytes = (offered + applied) * sizes.encoding.pair_nbytes * (ranks - 1) // ranks
        return Traffic(nbytes, nbytes, applied / numel)

    def use_plan(self, plan: Plan | None) -> None:
        sparse = [bucket for bucket in (plan.buckets if plan is not None else ()) if self.handles(bucket.collective)]
        self._residual_flush.set_sparse_names({name for bucket in sparse for name in bucket.names})
        self._sizes.clear()

    def probe(self, kind: str) -> Collective:
        """An exchange of noise: its time depends on how many values are selected, not on which."""
        density = density_of(kind)
        assert density is not None
        states: dict[int, BucketState] = {}
        settled = replace(self._options, start_density=None)  # plans are made for the settled density

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if buffer.numel() not in states:
                generator = torch.Generator(buffer.device).manual_seed(dist.get_rank(group))
                buffer.normal_(generator=generator)
                states[buffer.numel()] = BucketState.of(torch.zeros_like(buffer), self._world_size)
            return exchange(buffer, states[buffer.numel()], self._comm(group), divisor, density, settled)

        return exchanged

    def summary(self) -> list[str]:
        lines = []
        for state in self._state.buckets():
            to, share = state.names[-1], float(state.applied) / max(1, state.residual.numel())
            samples = state.residual_monitor.samples() if state.residual_monitor is not None else []
            age = f", about {samples[-1].age_steps:.1f} steps old" if samples and samples[-1].age_steps else ""
            norm = float(state.residual.norm())
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
        velocities = {name: piece.clone() for name, piece in self._momentum.state_dict().items()}
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
        self._momentum.load_state_dict(*(state.get("velocities", {}) for state in self._state.loaded_states))
        self._residual_flush.set_sparse_names(self._residual_flush.sparse_names)

    def _order(self, name: str) -> list[int]:
        """The strides of a parameter and of its residual; empty if it is row-major."""
        parameter = self._parameters[name]
        return [] if parameter.is_contiguous() else list(parameter.stride())

    def _check_orders(self, orders: Mapping[str, Sequence[int]]) -> None:
        for name in self._parameters:
            if (kept := list(orders.get(name, []))) != (own := self._order(name)):
                there, here = (f"strides {order}" if order else "row-major" for order in (kept, own))
                raise ValueError(
                    f"the residual of {name} was saved in its memory order, {there}, and here it is {here}: "
                    "load it into a model of the same memory format"
                )

    def loaded(self) -> list[str]:
        return self._state.loaded

    def rescale(self, scale: float) -> None:
        if self._state.scale is not None:
            self._momentum.rescale(scale / self._state.scale)
        self._state.rescale(scale)

    def close(self) -> None:
        self._residual_flush.close()
        self._state.clear()
        self._momentum.clear()
        self._exchanged = []
        self._comms = {}

    def _comm(self, group: Group) -> GroupCommunicator:
        if group not in self._comms:
            self._comms[group] = GroupCommunicator(group)
        return self._comms[group]


def check_compress(compress: object) -> None:
    """ValueError unless ``DataParallel(compress=...)`` can take this."""
    if compress is not None and not isinstance(compress, OkTopk) and compress not in COMPRESSED:
        raise ValueError(f"compress is {compress!r}: expected one of {', '.join(COMPRESSED)}, OkTopk(...), or None")


def collectives_for(
    compress: str | OkTopk | None,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    averaged: Callable[[], bool],
    applied: Applied | None = None,
    frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Collectives:
    """All exchanges of a model, by the ``compress`` that the user gave; the rest as in ``OkTopkExchanges``."""
    if isinstance(compress, OkTopk):
        oktopk = OkTopkExchanges(compress, parameters, group, averaged, applied, frozen)
        return Collectives(oktopk, DenseExchanges(), memory=oktopk)
    return Collectives(DenseExchanges(() if compress is None else (compress,)))
