"""Collectives: what the buckets of a live model can name, from a plain all-reduce to exchanges that remember."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from anabranch.comm.dense import COLLECTIVES, Collective, Group, Steps, Traffic, traffic
from anabranch.plan import Bucket, Plan


class Scaler(Protocol):
    """What torch.amp.GradScaler is, too."""

    def get_scale(self) -> float:
        """What losses are multiplied by."""
        ...


class ResidualState(Protocol):
    """What the exchange of one bucket remembers: what waits, one parameter after another.

    ``accumulates_in_place``: gradients are added to the residual as they come, so the memory of the gradient is free.
    """

    names: tuple[str, ...]
    residual: torch.Tensor
    accumulates_in_place: bool

    def pieces(self) -> Mapping[str, torch.Tensor]:
        """What waits of each parameter; views."""
        ...

    def record_norms(self, gradient: torch.Tensor) -> None:
        """Record the norms of a part of this step's gradient before it is added to the residual, if a sample is due."""
        ...


class Collectives(Protocol):
    """The collectives of one model. What they remember between steps they keep by the names of parameters.

    kinds         those to measure and to plan with beside "dense", cheapest first
    dense_names   gradients that must travel dense
    warmup_steps  steps of training before any of ``kinds`` is tried
    """

    kinds: Sequence[str]
    dense_names: frozenset[str]
    warmup_steps: int

    def runs(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this."""
        ...

    def aside(self, kind: str) -> bool:
        """Whether it computes before it sends, so that on a GPU it should begin on a stream of its own."""
        ...

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """The exchange of one bucket in this step."""
        ...

    def remembered(self, bucket: Bucket) -> ResidualState | None:
        """What the exchange of this bucket remembers; None if it forgets everything."""
        ...

    def on_step_end(self) -> None:
        """All gradients of a step are averaged, on all ranks."""
        ...

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """What the last exchange of this bucket sent, computed without waiting for a device; None if nobody knows."""
        ...

    def probe(self, kind: str) -> Collective:
        """An exchange of this kind that belongs to no bucket, to be timed; called again and again, it remembers."""
        ...

    def use_plan(self, plan: Plan | None) -> None:
        """The next step is run by this plan, or by DDP's own buckets: send in it what waits and is not the plan's."""
        ...

    def words(self) -> list[str]:
        """What a person should know of their state, line by line."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank must hold."""
        ...

    def load_state_dict(self, *states: Any) -> None:
        """Take over what ``state_dict`` gave, of this rank or of all ranks; before the first step."""
        ...

    def loaded(self) -> list[str]:
        """What was, line by line, as far as it must be the same on all ranks."""
        ...

    def rescale(self, scale: float) -> None:
        """From now on gradients are those of a loss times this: so becomes what waits."""
        ...

    def close(self) -> None:
        """Let go of hooks."""
        ...


class DenseCollectives:
    """All-reduces in full precision, and one that sends bfloat16 where that was asked for; none remembers anything."""

    def __init__(self, compress: str | None = None) -> None:
        self.kinds: Sequence[str] = () if compress is None else (compress,)
        self.dense_names: frozenset[str] = frozenset()
        self.warmup_steps = 0

    def runs(self, kind: str, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """See ``Collectives``."""
        return kind in COLLECTIVES

    def aside(self, kind: str) -> bool:  # noqa: ARG002
        """None does."""
        return False

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """See ``Collectives``."""
        return COLLECTIVES[bucket.collective](buffer, group, divisor)

    def remembered(self, bucket: Bucket) -> ResidualState | None:  # noqa: ARG002
        """See ``Collectives``."""
        return None

    def on_step_end(self) -> None:
        """Nothing to do."""

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """See ``Collectives``."""
        return traffic(bucket.collective, numel, dtype, ranks)

    def probe(self, kind: str) -> Collective:
        """See ``Collectives``."""
        return COLLECTIVES[kind]

    def use_plan(self, plan: Plan | None) -> None:
        """Nothing waits."""

    def words(self) -> list[str]:
        """Nothing to tell."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, *states: Any) -> None:
        """Nothing can be taken over: a checkpoint with sparse state needs ``compress=OkTopk(...)`` again."""
        if any(states):
            raise ValueError(
                "the checkpoint holds the state of a compression, and this DataParallel has none: make it with the "
                "compress= that the checkpoint was written with, or leave the state out"
            )

    def loaded(self) -> list[str]:
        """Nothing."""
        return []

    def rescale(self, scale: float) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """No hooks."""
