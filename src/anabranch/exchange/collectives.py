"""Collectives: all exchanges that the buckets of one model can name, and what they keep between steps."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from anabranch.exchange.contracts import Collective, ExchangeFamily, Group, Steps, Traffic
from anabranch.exchange.residuals.store import Residuals
from anabranch.values.plan import Bucket, Plan

NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Collectives:
    """All exchanges of one model: finds the family of each bucket's kind, so that a plan may mix families.

    ``families`` come in order of preference. ``excluded``: by kind, the parameters whose gradients must not use it.
    ``mixes``: plans choose for each bucket between all kinds and dense.

    ``residuals`` holds what is kept between steps.
    """

    def __init__(
        self,
        *families: ExchangeFamily,
        residuals: Residuals | None = None,
        excluded: Mapping[str, Collection[str]] = NOTHING,
        mixes: bool = False,
    ) -> None:
        self._families = families
        self._family_of_kind: dict[str, ExchangeFamily] = {}  # filled as kinds are asked for
        self.residuals = residuals or Residuals()
        self.kinds: tuple[str, ...] = tuple(kind for family in families for kind in family.kinds)
        self.excluded = {kind: frozenset(names) for kind, names in excluded.items()}
        self.mixes = mixes

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this kind."""
        return any(family.supports(kind, dtype) for family in self._families if family.handles(kind))

    def on_side_stream(self, kind: str) -> bool:
        """Whether this kind computes before it sends, so that on a GPU it should start on a stream of its own."""
        return self._family(kind).on_side_stream(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """The exchange of one bucket in one step, as ``ExchangeFamily.steps``."""
        return self._family(bucket.collective).steps(bucket, buffer, group, divisor)

    @property
    def max_ctas(self) -> int | None:
        """How many of a GPU's multiprocessors messages may occupy: fewer the less is sent; None: NCCL decides."""
        if not self.kinds:
            return None
        return 1 if not self.mixes and all(self._family(kind).sends_little(kind) for kind in self.kinds) else 2

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """Bytes of the last exchange of this bucket, computed without waiting for a device; None if unknown."""
        return self._family(bucket.collective).traffic(bucket, numel, dtype, ranks)

    def probe(self, kind: str) -> Collective:
        """An exchange of this kind for timing; it does not touch the model's residuals."""
        return self._family(kind).probe(kind)

    def use_plan(self, plan: Plan | None) -> None:
        """Prepare for a plan, or for DDP's own buckets, from the next step on."""
        self.residuals.use_plan(plan)

    def close(self) -> None:
        """Remove hooks and free what was kept between steps, also if there are still references to this object."""
        for family in self._families:
            family.close()
        self.residuals.close()

    def _family(self, kind: str) -> ExchangeFamily:
        if (known := self._family_of_kind.get(kind)) is not None:
            return known
        for family in self._families:
            if family.handles(kind):
                self._family_of_kind[kind] = family
                return family
        known_kinds = ", ".join((*self.kinds, "dense"))
        raise ValueError(f"no exchange of this model is called {kind!r}: expected one of {known_kinds}")
