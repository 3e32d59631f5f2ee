"""Quantised exchanges for the buckets of a live model."""

from collections.abc import Callable

import torch

from anabranch.comm.collectives import ResidualState
from anabranch.comm.communicator import GroupCommunicators
from anabranch.comm.exchange import Collective, Group, Steps, Traffic
from anabranch.kinds import INT4
from anabranch.plan import Bucket
from anabranch.quantised.block_format import FORMATS
from anabranch.quantised.exchange import exchange

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_RESIDUAL = frozenset({INT4})  # kinds too coarse to drop their rounding errors


class QuantisedExchanges:
    """The family of quantised exchanges. ``kinds``: those that plans may use.

    ``residual_of`` gives the residual of a bucket whose kind is in ``WITH_RESIDUAL``; None if there is no such kind.
    """

    def __init__(
        self, kinds: tuple[str, ...], residual_of: Callable[[Bucket, torch.Tensor], ResidualState] | None = None
    ) -> None:
        self.kinds = kinds
        self._residual_of = residual_of
        self._comms = GroupCommunicators()

    def handles(self, kind: str) -> bool:
        return kind in FORMATS and (kind not in WITH_RESIDUAL or self._residual_of is not None)

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and dtype in DTYPES

    def on_side_stream(self, kind: str) -> bool:
        return self.handles(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        kind = bucket.collective
        if kind not in WITH_RESIDUAL:
            return exchange(buffer, None, self._comms.of(group), divisor, FORMATS[kind])
        assert self._residual_of is not None  # it is handled
        return self._with_residual(self._residual_of(bucket, buffer), kind, buffer, group, divisor)

    def _with_residual(
        self, state: ResidualState, kind: str, buffer: torch.Tensor, group: Group, divisor: float
    ) -> Steps:
        state.record_norms(buffer)
        state.step += 1
        yield from exchange(buffer, state.residual, self._comms.of(group), divisor, FORMATS[kind])

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:  # noqa: ARG002
        form = FORMATS[bucket.collective]
        nbytes = 2 * (ranks - 1) * form.message_nbytes(form.region_numel(numel, ranks))
        return Traffic(nbytes, nbytes, 1.0)

    def probe(self, kind: str) -> Collective:
        residuals: dict[int, torch.Tensor] = {}

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if kind in WITH_RESIDUAL and buffer.numel() not in residuals:
                residuals[buffer.numel()] = torch.zeros_like(buffer, dtype=torch.float32)
            return exchange(buffer, residuals.get(buffer.numel()), self._comms.of(group), divisor, FORMATS[kind])

        return exchanged

    def close(self) -> None:
        self._comms.clear()
