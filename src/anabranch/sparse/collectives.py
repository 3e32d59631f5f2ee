"""Ok-Topk for the buckets of a live model: a kind of collective per density, and what they remember between steps.

A bucket that names "oktopk:0.01" travels at a density of 1 %. Densities are few, because each is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from anabranch.plan import Bucket
from anabranch.runtime.dense import COLLECTIVES, Collective, Group, Steps
from anabranch.sparse.comm import GroupComm
from anabranch.sparse.oktopk import exchange
from anabranch.sparse.options import OkTopk
from anabranch.sparse.rivals import dense_exchange
from anabranch.sparse.state import BucketState, SparseState

KIND = "oktopk"
LADDER = (0.01, 0.02, 0.05, 0.1, 0.2)  # the densities that "auto" chooses from


def kind_of(density: float) -> str:
    """What a bucket of this density names."""
    return f"{KIND}:{density:g}"


def density_of(kind: str) -> float | None:
    """The density in such a name; None if it is no sparse kind."""
    name, _, text = kind.partition(":")
    if name != KIND:
        return None
    try:
        density = float(text)
    except ValueError:
        return None
    return density if 0 < density <= 1 else None


class SparseCollectives:
    """All collectives of one model whose larger buckets may travel sparsely; see ``runtime.collectives.Collectives``.

    ``parameters`` are those of the model that are averaged, by name. Vectors (biases, norms) always travel dense: they
    are few, and waiting hurts them most. So do gradients that are not float32: what waits is, and would not fit theirs.
    """

    def __init__(self, options: OkTopk, parameters: Mapping[str, torch.Tensor], group: Group) -> None:
        fixed = [] if options.density == "auto" else [float(options.density)]
        self.kinds: Sequence[str] = [kind_of(density) for density in fixed or LADDER]
        self.dense_names = frozenset(name for name, p in parameters.items() if p.dim() < 2 or p.dtype != torch.float32)
        self.warmup_steps, self.flushing = options.warmup_steps, False
        self._options = replace(options, warmup_steps=0)  # whoever trains has seen to it by then
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._world_size = dist.get_world_size(group)
        self._state = SparseState(dist.get_rank(group), self._world_size, self._device)
        self._comms: dict[Group, GroupComm] = {}

    def runs(self, kind: str, dtype: torch.dtype) -> bool:
        """See ``Collectives``."""
        return kind in COLLECTIVES or (density_of(kind) is not None and dtype == torch.float32)

    def aside(self, kind: str) -> bool:
        """See ``Collectives``."""
        return density_of(kind) is not None

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """See ``Collectives``."""
        density = density_of(bucket.collective)
        if density is None:
            return COLLECTIVES[bucket.collective](buffer, group, divisor)
        state = self._state.bucket(bucket.names, [self._numels[name] for name in bucket.names])
        if self.flushing:
            return dense_exchange(buffer, state, self._comm(group), divisor, 1.0)
        return exchange(buffer, state, self._comm(group), divisor, density, self._options)

    def probe(self, kind: str) -> Collective:
        """See ``Collectives``. Sends noise: what an exchange takes depends on how many values pass, not on which."""
        density = density_of(kind)
        if density is None:
            return COLLECTIVES[kind]
        states: dict[int, BucketState] = {}

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if buffer.numel() not in states:
                generator = torch.Generator(buffer.device).manual_seed(dist.get_rank(group))
                buffer.normal_(generator=generator)
                states[buffer.numel()] = BucketState.of(torch.zeros_like(buffer), self._world_size)
            return exchange(buffer, states[buffer.numel()], self._comm(group), divisor, density, self._options)

        return exchanged

    def waits(self) -> bool:
        """See ``Collectives``."""
        return any(bool(state.residual.any()) for state in self._state.buckets())

    def words(self) -> list[str]:
        """See ``Collectives``."""
        told = []
        for state in self._state.buckets():
            share = float(state.applied) / max(1, state.residual.numel())
            waits = float(state.residual.norm())
            told.append(
                f"sparse bucket to {state.names[-1]}: {share:.2%} applied in its last step, |waiting| {waits:.3g}"
            )
        return told

    def state_dict(self) -> dict[str, Any]:
        """See ``Collectives``."""
        return self._state.state_dict()

    def load_state_dict(self, *states: Any) -> None:
        """See ``Collectives``."""
        self._state.load_state_dict(*states)

    def _comm(self, group: Group) -> GroupComm:
        if group not in self._comms:
            self._comms[group] = GroupComm(group)
        return self._comms[group]
