"""Collectives: all exchanges that the buckets of one model can name, and what they keep between steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import torch

from anabranch.exchange.communicator import Communicators
from anabranch.exchange.dense import dense_traffic
from anabranch.exchange.interface import ExchangeFamily, Group, Steps, Traffic
from anabranch.exchange.lanes import Lane
from anabranch.exchange.quantised.exchange import sent_dense
from anabranch.exchange.residuals.store import Residuals
from anabranch.exchange.shares import WHOLE, Share
from anabranch.exchange.two_level import TwoLevelExchange
from anabranch.exchange.two_level import supports as supports_two_levels
from anabranch.values.kinds.names import BF16, between_nodes, is_dense, is_two_level
from anabranch.values.nodes import Nodes
from anabranch.values.plan import Bucket

Around = Callable[[Steps, torch.Tensor, Group, float], Steps]  # of steps that average a tensor, its group and divisor
NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Collectives:
    """All exchanges of one model: finds the family of each bucket's kind, so that a plan may mix families.

    families    in order of preference
    residuals   what is kept between steps
    excluded    by kind, the parameters whose gradients must not use it
    mixes       plans choose for each bucket between all kinds and dense

    nodes       of the ranks, where exchanges may have two levels
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
        self.nodes: Nodes | None = None
        self._share = WHOLE
        self._comms = Communicators()  # inside nodes

    def use_nodes(self, nodes: Nodes | None, rank: int) -> None:
        """Exchanges may have two levels from now on, if there are nodes; before the first exchange. ``rank``: own."""
        self.nodes = nodes
        if nodes is not None:
            self._share = Share.on(nodes, rank)
            self.residuals.use_nodes(nodes)

    def family(self, kind: str) -> ExchangeFamily:
        """The family to which this kind belongs; ValueError if there is none."""
        for family in self._families:
            if family.handles(between_nodes(kind)):
                return family
        known_kinds = ", ".join((*self.kinds, "dense"))
        raise ValueError(f"no exchange of this model is called {kind!r}: expected one of {known_kinds}")

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether a bucket of this dtype may name this kind."""
        if is_two_level(kind) and (self.nodes is None or not supports_two_levels(dtype)):
            return False
        kind = between_nodes(kind)
        return any(family.supports(kind, dtype) for family in self._families if family.handles(kind))

    def stages(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        numels: Sequence[int],
        lane: Lane,
        divisor: float,
        around: Around = lambda steps, *_: steps,
    ) -> Sequence[Steps]:
        """The exchange of a bucket of parameters of these sizes, for a message on this lane: one stage, or three.

        ``around``: what becomes of the steps between all ranks, or between nodes.
        """
        family = self.family(bucket.collective)
        if not self._in_stages(bucket):
            return [around(family.steps(bucket, buffer, lane.group, divisor), buffer, lane.group, divisor)]
        assert lane.nodes is not None  # before it has such a bucket
        exact = _is_exact(bucket.collective, buffer.dtype)
        exchange = TwoLevelExchange(buffer, numels, self._share, lane.nodes, self._comms, divisor, exact)
        sent = exchange.share, exchange.group, exchange.divisor
        between = around(family.steps(bucket, *sent), *sent)
        if buffer.dtype == torch.float16 and not exact:
            state = self.residuals.of(bucket)
            between = chain(between, exchange.limited(state.residual if state is not None else None))
        return exchange.stages(between)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        """Bytes of the last exchange of this bucket, computed without waiting for a device; None if unknown."""
        family = self.family(bucket.collective)
        if not self._in_stages(bucket):
            return family.traffic(bucket, numel, dtype, ranks)
        places = self._share.parts
        inside = dense_traffic(numel, dtype, places)
        share_dtype = dtype if _is_exact(bucket.collective, dtype) else torch.float32
        between = family.traffic(bucket, -(-numel // places), share_dtype, ranks // places)
        if between is None:
            return None
        sent, received = inside.sent_nbytes + between.sent_nbytes, inside.received_nbytes + between.received_nbytes
        return Traffic(sent, received, between.density)

    def _in_stages(self, bucket: Bucket) -> bool:
        """Whether a bucket is exchanged on two levels; a single rank, given the plan of more, has no nodes."""
        return self.nodes is not None and is_two_level(bucket.collective)

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
        self._comms.clear()
        self.residuals.close()


def _is_exact(kind: str, dtype: torch.dtype) -> bool:
    """Whether a bucket of this kind and dtype is averaged in its own precision."""
    return is_dense(kind) or sent_dense(between_nodes(kind), dtype)
