"""Ok-Topk for the buckets of a live model: a kind of collective per density, and what they remember between steps.

A bucket that names "oktopk:0.01" travels at a density of 1 %. Densities are few, because each is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from anabranch.comm.communicator import GroupCommunicator
from anabranch.comm.dense import COLLECTIVES, Collective, Group, Steps, Traffic, all_finite, traffic
from anabranch.plan import Bucket, Plan
from anabranch.sparse.exact import MOST
from anabranch.sparse.momentum import Momentum
from anabranch.sparse.naming import LADDER, density_of, kind_of
from anabranch.sparse.oktopk import exchange
from anabranch.sparse.options import OkTopk
from anabranch.sparse.residual_flush import Applied, ResidualFlush
from anabranch.sparse.residual_monitor import residual_grows
from anabranch.sparse.sizes import Sizes
from anabranch.sparse.state import BucketState, SparseState


class SparseCollectives:
    """All collectives of one model whose larger buckets may travel sparsely; see ``runtime.collectives.Collectives``.

    ``parameters`` are those of the model that are averaged, by name. Vectors (biases, norms) always travel dense: they
    are few, and waiting hurts them most. So do gradients that are not float32: what waits is, and would not fit theirs.
    ``averaged`` and ``applied`` as in ``ResidualFlush``.
    """

    def __init__(
        self,
        options: OkTopk,
        parameters: Mapping[str, torch.Tensor],
        group: Group,
        averaged: Callable[[], bool],
        applied: Applied | None = None,
    ) -> None:
        fixed = [] if options.density == "auto" else [float(options.density)]
        self.kinds: Sequence[str] = [kind_of(density) for density in fixed or LADDER]
        self.dense_names = frozenset(name for name, p in parameters.items() if p.dim() < 2 or p.dtype != torch.float32)
        self.warmup_steps = options.warmup_steps
        self._options = replace(options, warmup_steps=0)  # whoever trains has seen to it by then
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._sizes: dict[tuple[str, ...], tuple[int, ...]] = {}  # of the buckets seen so far
        self._device = next(iter(parameters.values())).device
        self._world_size = dist.get_world_size(group)
        self._state = SparseState(dist.get_rank(group), self._world_size, self._device, options.region_period)
        self._momentum = Momentum(options.momentum, options.wire != "fp32")
        self._residual_flush = ResidualFlush(self._state, parameters, averaged, applied)
        self._parameters = parameters
        self._exchanged: list[tuple[BucketState, torch.Tensor]] = []  # in this step: what remembers, and the averages
        self._comms: dict[Group, GroupCommunicator] = {}

    def runs(self, kind: str, dtype: torch.dtype) -> bool:
        """See ``Collectives``."""
        return kind in COLLECTIVES or (density_of(kind) is not None and dtype == torch.float32)

    def aside(self, kind: str) -> bool:
        """See ``Collectives``."""
        return density_of(kind) is not None

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """See ``Collectives``."""
        density, state = density_of(bucket.collective), self.remembered(bucket)
        if density is None or state is None:
            return COLLECTIVES[bucket.collective](buffer, group, divisor)
        self._exchanged.append((state, buffer))
        steps = exchange(buffer, state, self._comm(group), divisor, density, self._options)
        return self._momentum.around(steps, buffer, state)

    def remembered(self, bucket: Bucket) -> BucketState | None:
        """See ``Collectives``."""
        if not self.aside(bucket.collective):
            return None
        if bucket.names not in self._sizes:
            self._sizes[bucket.names] = tuple(self._numels[name] for name in bucket.names)
        return self._state.bucket(bucket.names, self._sizes[bucket.names])

    def on_step_end(self) -> None:
        """Under a loss scaler, which leaves a step out where any gradient is not finite: put back what was sent in it.

        Every rank gets the average, so that the sum over the ranks of what waits is what it was. A bucket that was not
        finite itself has put back its own already. Waits for the device, as the scaler will.
        """
        exchanged, self._exchanged = self._exchanged, []
        if self._state.scale is None or not exchanged:
            return
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if gradients and not bool(all_finite(*gradients)):
            for state, average in exchanged:
                state.residual.add_(torch.where(all_finite(average), average, 0.0))

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """See ``Collectives``. Exact exchanges send what passed, evenly over ranks; fixed ones all their slots.

        What passed lies on the device, so that on a GPU, also of an exact exchange, the planned sizes are given.
        """
        settled, state = density_of(bucket.collective), self.remembered(bucket)
        if settled is None or state is None:
            return traffic(bucket.collective, numel, dtype, ranks)
        density = self._options.density_at(max(0, state.step - 1), settled)
        sizes = Sizes.of(numel, ranks, density, self._options)
        if self._device.type != "cpu":
            nbytes = 2 * (ranks - 1) * sizes.message_nbytes
            return Traffic(nbytes, nbytes, sizes.k / numel)
        offered, applied = min(int(state.offered), MOST * sizes.k), int(state.applied)
        nbytes = (offered + applied) * sizes.encoding.pair_nbytes * (ranks - 1) // ranks
        return Traffic(nbytes, nbytes, applied / numel)

    def use_plan(self, plan: Plan | None) -> None:
        """See ``Collectives``."""
        sparse = [bucket for bucket in (plan.buckets if plan is not None else ()) if self.aside(bucket.collective)]
        self._residual_flush.keep({name for bucket in sparse for name in bucket.names})
        self._sizes.clear()

    def probe(self, kind: str) -> Collective:
        """See ``Collectives``. Sends noise: what an exchange takes depends on how many values pass, not on which."""
        density = density_of(kind)
        if density is None:
            return COLLECTIVES[kind]
        states: dict[int, BucketState] = {}
        settled = replace(self._options, start_density=None)  # what the density falls to is what it costs in the end

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if buffer.numel() not in states:
                generator = torch.Generator(buffer.device).manual_seed(dist.get_rank(group))
                buffer.normal_(generator=generator)
                states[buffer.numel()] = BucketState.of(torch.zeros_like(buffer), self._world_size)
            return exchange(buffer, states[buffer.numel()], self._comm(group), divisor, density, settled)

        return exchanged

    def words(self) -> list[str]:
        """See ``Collectives``."""
        told = []
        for state in self._state.buckets():
            to, share = state.names[-1], float(state.applied) / max(1, state.residual.numel())
            samples = state.residual_monitor.samples() if state.residual_monitor is not None else []
            age = f", for about {samples[-1].age_steps:.1f} steps" if samples and samples[-1].age_steps else ""
            waits = float(state.residual.norm())
            told.append(f"sparse bucket to {to}: {share:.2%} applied in its last step, |waiting| {waits:.3g}{age}")
            if residual_grows(samples, max(share, 1e-4)):
                then = samples[len(samples) // 2]
                told.append(
                    f"WARNING: what waits in the bucket to {to} grows without bound: |waiting| {then.norm:.3g} at step "
                    f"{then.step} and {samples[-1].norm:.3g} at step {samples[-1].step}, {then.age_steps:.1f} and "
                    f"{samples[-1].age_steps:.1f} steps of gradients: give OkTopk a higher density"
                )
        return told

    def state_dict(self) -> dict[str, Any]:
        """See ``Collectives``."""
        velocities = {name: piece.clone() for name, piece in self._momentum.state_dict().items()}
        orders = {name: order for name in self._parameters if (order := self._order(name))}
        return {**self._state.state_dict(), "velocities": velocities, "orders": orders}

    def load_state_dict(self, *states: Any) -> None:
        """See ``Collectives``."""
        for state in states:
            if state and "orders" in state:
                self._check_orders(state["orders"])
        self._state.load_state_dict(*states)
        self._momentum.load_state_dict(*(state.get("velocities", {}) for state in self._state.taken))
        self._residual_flush.keep(self._residual_flush.sparse)

    def _order(self, name: str) -> list[int]:
        """In which a parameter lies in memory, and what waits of it too; nothing where it is row-major."""
        parameter = self._parameters[name]
        return [] if parameter.is_contiguous() else list(parameter.stride())

    def _check_orders(self, orders: Mapping[str, Sequence[int]]) -> None:
        for name in self._parameters:
            if (kept := list(orders.get(name, []))) != (own := self._order(name)):
                there, here = (f"strides {order}" if order else "row-major" for order in (kept, own))
                raise ValueError(
                    f"what waits of {name} was kept in the order of its memory, {there}, and here it is {here}: "
                    "load it into a model of the same memory format"
                )

    def loaded(self) -> list[str]:
        """See ``Collectives``."""
        return self._state.loaded

    def rescale(self, scale: float) -> None:
        """See ``Collectives``."""
        if self._state.scale is not None:
            self._momentum.rescale(scale / self._state.scale)
        self._state.rescale(scale)

    def close(self) -> None:
        """See ``Collectives``."""
        self._residual_flush.close()

    def _comm(self, group: Group) -> GroupCommunicator:
        if group not in self._comms:
            self._comms[group] = GroupCommunicator(group)
        return self._comms[group]


def check_compress(compress: object) -> None:
    """Refuse what ``DataParallel(compress=...)`` cannot run."""
    plain = [kind for kind in COLLECTIVES if kind != "dense"]
    if compress is not None and not isinstance(compress, OkTopk) and compress not in plain:
        raise ValueError(f"compress is {compress!r}: expected one of {', '.join(plain)}, OkTopk(...), or None")
