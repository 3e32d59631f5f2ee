"""Collectives: all exchanges that the buckets of one model can name, and the state they keep between steps."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import torch

from anabranch.exchange.contracts import Collective, ExchangeFamily, Group, Steps, Traffic
from anabranch.exchange.error_samples import ErrorSamples, Velocity
from anabranch.exchange.residuals.packing import PackedResidual
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket, Plan

NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Scaler(Protocol):
    """A loss scaler, such as torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """The factor by which losses are multiplied."""
        ...


class ResidualState(Protocol):
    """The residual of one bucket: a flat tensor with the parameters one after another.

    ``step`` counts exchanges. ``accumulates_in_place``: gradients were added to the residual as they arrived (Lean).
    The buffer of the exchange then holds zeros instead of gradients, and the exchange may use its memory.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    residual: torch.Tensor
    step: int
    accumulates_in_place: bool
    packed: PackedResidual | None

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """The residuals of frozen parameters, by name. They are not in ``residual``, since nobody could apply them."""
        ...

    def pieces(self) -> Mapping[str, torch.Tensor]:
        """The residual of each parameter; views."""
        ...

    def unpack(self, target: torch.Tensor) -> None:
        """Where residuals are rounded between exchanges: read it into ``target``, the residual until ``pack()``."""
        ...

    def pack(self) -> None:
        """Round the residual, and drop it in float32."""
        ...

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        """The residual in float32, to be changed between two exchanges."""
        ...

    def hold(self, names: Collection[str]) -> None:
        """Hold the residuals of these parameters, and put those of all others back."""
        ...

    def record_norms(self, gradient: torch.Tensor) -> None:
        """Record the norms of a part of this step's gradient before it joins the residual, if a sample is due."""
        ...


class ExchangeMemory(Protocol):
    """The state that exchanges keep between steps, by parameter name: residuals, thresholds, momentum.

    warmup_steps   training steps before other exchanges than dense ones are tried
    """

    warmup_steps: int

    def keeps_residual(self, kind: str) -> bool:
        """Whether a bucket of this kind has a residual."""
        ...

    def residual_state(self, bucket: Bucket) -> ResidualState | None:
        """The residual of this bucket; None if its exchange has none."""
        ...

    def sends_velocities(self, kind: str) -> bool:
        """Whether exchanges of this kind average velocities in place of gradients."""
        ...

    def velocity(self, bucket: Bucket) -> Velocity | None:
        """What exchanges of this bucket average in place of gradients; None if they average gradients."""
        ...

    def on_step_end(self) -> None:
        """Called when all gradients of a step are averaged, on all ranks."""
        ...

    def use_plan(self, plan: Plan | None) -> None:
        """Prepare for a plan, or for DDP's own buckets, from the next step on.

        That step also sends the residuals of parameters that the plan sends dense, so that none is lost.
        """
        ...

    def store_residuals(self, how: str) -> None:
        """Between steps: store residuals as "bf16", "int8", or as they are."""
        ...

    def summary(self) -> list[str]:
        """Lines for ``explain()``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint of this rank must hold."""
        ...

    def load_state_dict(self, *states: Any) -> None:
        """Load what ``state_dict`` returned on this rank, or on all ranks; before the first step."""
        ...

    def loaded(self) -> list[str]:
        """A description of what was loaded, as lines that must be the same on all ranks."""
        ...

    def rescale(self, scale: float) -> None:
        """Multiply residuals to match gradients of a loss times ``scale``, which come from now on."""
        ...

    def close(self) -> None:
        """Remove hooks and free all memory, also if there are still references to this object."""
        ...


class Collectives:
    """All exchanges of one model: finds the family of each bucket's kind, so that a plan may mix families.

    ``families`` come in order of preference. ``memory`` holds residuals and checkpoints, of one family or shared by
    several; None if no family keeps anything. ``excluded``: by kind, the parameters whose gradients must not use it.
    ``mixes``: plans choose for each bucket between all kinds and dense.
    """

    def __init__(
        self,
        *families: ExchangeFamily,
        memory: ExchangeMemory | None = None,
        excluded: Mapping[str, Collection[str]] = NOTHING,
        mixes: bool = False,
    ) -> None:
        self._families = families
        self._family_of_kind: dict[str, ExchangeFamily] = {}  # of kinds asked for so far
        self._memory = memory
        self.kinds: tuple[str, ...] = tuple(kind for family in families for kind in family.kinds)
        self.excluded = {kind: frozenset(names) for kind, names in excluded.items()}
        self.mixes = mixes
        self.warmup_steps = 0 if memory is None else memory.warmup_steps
        self._errors = ErrorSamples()
        self.keep_memory = memory is not None  # then ``on_step_end`` must be called after every step

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this kind."""
        return any(family.supports(kind, dtype) for family in self._families if family.handles(kind))

    def on_side_stream(self, kind: str) -> bool:
        return self._family(kind).on_side_stream(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        exchange = self._family(bucket.collective).steps(bucket, buffer, group, divisor)
        if bucket.collective == DENSE:
            return exchange
        velocity = None if self._memory is None else self._memory.velocity(bucket)
        return self._errors.watched(exchange, bucket, buffer, group, divisor, self.residual_state(bucket), velocity)

    @property
    def max_ctas(self) -> int | None:
        """How many of a GPU's multiprocessors messages may occupy: fewer the less is sent; None: NCCL decides."""
        if not self.kinds:
            return None
        return 1 if not self.mixes and all(self._family(kind).sends_little(kind) for kind in self.kinds) else 2

    def postpone_samples(self) -> None:
        """Sample no errors in the next steps, since they are timed."""
        self._errors.postpone()

    def relative_errors(self) -> Mapping[tuple[str, ...], float]:
        """Measured errors of the averages of compressed buckets, by their names; waits for the device."""
        return self._errors.relative_errors()

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """Bytes of the last exchange of this bucket, computed without waiting for a device; None if unknown."""
        return self._family(bucket.collective).traffic(bucket, numel, dtype, ranks)

    def probe(self, kind: str) -> Collective:
        """An exchange of this kind for timing; it does not touch the model's residuals."""
        return self._family(kind).probe(kind)

    def keeps_residual(self, kind: str) -> bool:
        """Whether a bucket of this kind has a residual, which is float32."""
        return self._memory is not None and self._memory.keeps_residual(kind)

    def residual_state(self, bucket: Bucket) -> ResidualState | None:
        """The residual of this bucket; None if its exchange has none."""
        return None if self._memory is None else self._memory.residual_state(bucket)

    def sends_velocities(self, kind: str) -> bool:
        """Whether exchanges of this kind average velocities in place of gradients."""
        return self._memory is not None and self._memory.sends_velocities(kind)

    def on_step_end(self) -> None:
        """Call this when all gradients of a step are averaged, on all ranks."""
        if self._memory is not None:
            self._memory.on_step_end()

    def use_plan(self, plan: Plan | None) -> None:
        """Prepare for a plan, or for DDP's own buckets, from the next step on (see ``ExchangeMemory``)."""
        self._errors.clear()
        if self._memory is not None:
            self._memory.use_plan(plan)

    def store_residuals(self, how: str) -> None:
        """Between steps: store residuals as "bf16", "int8", or as they are."""
        if self._memory is not None:
            self._memory.store_residuals(how)

    def summary(self) -> list[str]:
        """Lines for ``explain()``."""
        return [] if self._memory is None else self._memory.summary()

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint of this rank must hold; empty if nothing is kept between steps."""
        return {} if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, *states: Any) -> None:
        """Load what ``state_dict`` returned on this rank, or on all ranks; before the first step."""
        if self._memory is not None:
            self._memory.load_state_dict(*states)
        elif any(states):
            raise ValueError(
                "the checkpoint holds the state of a compression, and this model has none: give it the compress= "
                "that the checkpoint was written with, or leave the state out"
            )

    def loaded(self) -> list[str]:
        """A description of what was loaded, as lines that must be the same on all ranks."""
        return [] if self._memory is None else self._memory.loaded()

    def rescale(self, scale: float) -> None:
        """Multiply residuals to match gradients of a loss times ``scale``, which come from now on."""
        if self._memory is not None:
            self._memory.rescale(scale)

    def close(self) -> None:
        """Remove hooks and free what was kept between steps, also if there are still references to this object."""
        for family in self._families:
            family.close()
        if self._memory is not None:
            self._memory.close()

    def _family(self, kind: str) -> ExchangeFamily:
        if (known := self._family_of_kind.get(kind)) is not None:
            return known
        for family in self._families:
            if family.handles(kind):
                self._family_of_kind[kind] = family
                return family
        known_kinds = ", ".join((*self.kinds, "dense"))
        raise ValueError(f"no exchange of this model is called {kind!r}: expected one of {known_kinds}")
