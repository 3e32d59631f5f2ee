"""Collectives: all exchanges that the buckets of one model can name, and what they keep between steps."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from anabranch.exchange.interface import ExchangeFamily, Traffic
from anabranch.exchange.residuals.store import Residuals
from anabranch.values.kinds.names import BF16
from anabranch.values.plan import Bucket

NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Collectives:
    """All exchanges of one model: finds the family of each bucket's kind, so that a plan may mix families.

    families    in order of preference
    residuals   what is kept between steps
    excluded    by kind, the parameters whose gradients must not use it
    mixes       plans choose for each bucket between all kinds and dense
    """

    def __init__(
        self,
        *families: ExchangeFamily,
        residuals: Residuals | None = None,
        excluded: Mapping[str, Collection[str]] = NOTHING,
        mixes: bool = False,
    ) -> None:
        self._families = families
        self.residuals = residuals or Residuals()
        self.kinds: tuple[str, ...] = tuple(kind for family in families for kind in family.kinds)
        self.excluded = {kind: frozenset(names) for kind, names in excluded.items()}
        self.mixes = mixes

    def family(self, kind: str) -> ExchangeFamily:
        """The family to which this kind belongs; ValueError if there is none."""
        for family in self._families:
            if family.handles(kind):
                return family
        known_kinds = ", ".join((*self.kinds, "dense"))
        raise ValueError(f"no exchange of this model is called {kind!r}: expected one of {known_kinds}")

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this kind."""
        return any(family.supports(kind, dtype) for family in self._families if family.handles(kind))

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """Bytes of the last exchange of this bucket, computed without waiting for a device; None if unknown."""
        return self.family(bucket.collective).traffic(bucket, numel, dtype, ranks)

    @property
    def max_ctas(self) -> int | None:
        """The number of a GPU's multiprocessors that messages may occupy: few if little is sent; None: NCCL's."""
        if not self.kinds:
            return None
        return 2 if self.mixes or BF16 in self.kinds else 1  # all other kinds send a fourth of the bytes or less

    def close(self) -> None:
        """Remove hooks and free what was kept between steps, also if there are still references to this object."""
        for family in self._families:
            family.close()
        self.residuals.close()
