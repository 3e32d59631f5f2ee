"""Quantised exchanges for the buckets of a live model."""

from collections.abc import Callable, Sequence

import torch

from anabranch.exchange.collectives import ResidualState
from anabranch.exchange.communicator import Communicator, GroupCommunicators
from anabranch.exchange.contracts import Collective, Group, Steps, Traffic
from anabranch.exchange.dense import dense, dense_traffic
from anabranch.exchange.quantised.exchange import exchange
from anabranch.exchange.quantised.stochastic import Seeds
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import BF16, COMPRESSED
from anabranch.values.kinds.options import Quantised
from anabranch.values.plan import Bucket

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def options_by_kind(given: Sequence[Quantised]) -> dict[str, Quantised]:
    """The options of every kind: those given, else its own."""
    return {**{kind: Quantised(kind) for kind in COMPRESSED}, **{one.kind: one for one in given}}


class QuantisedExchanges:
    """The family of quantised exchanges.

    given         options of the kinds to plan with; a plan that the user gives may also name others
    residual_of   gives the residual of a bucket whose kind keeps one; None if no such kind is handled

    bf16 sends gradients dense that are neither float32 nor bfloat16: it would not save a byte of float16, and lose much
    of float64.

    Stochastic rounding has new seeds in each exchange. With a residual they are counted by its ``step``, which is in
    checkpoints, so that a resumed run has the same bits. Without, they are counted here, from 0 at every start.
    """

    def __init__(
        self,
        given: Sequence[Quantised] = (),
        residual_of: Callable[[Bucket, torch.Tensor], ResidualState] | None = None,
    ) -> None:
        self.kinds = tuple(one.kind for one in given)
        self._options = options_by_kind(given)
        self._residual_of = residual_of
        self._comms = GroupCommunicators()
        self._exchanged = 0  # exchanges without a residual

    def handles(self, kind: str) -> bool:
        return kind in self._options and (not self._options[kind].keeps_residual or self._residual_of is not None)

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and (dtype in DTYPES or sent_dense(kind, dtype))

    def on_side_stream(self, kind: str) -> bool:
        return self.handles(kind)

    def sends_little(self, kind: str) -> bool:
        return kind != BF16 and self.handles(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        if sent_dense(bucket.collective, buffer.dtype):
            return dense(buffer, group, divisor)
        options, comm = self._options[bucket.collective], self._comms.of(group)
        if options.keeps_residual:
            assert self._residual_of is not None  # it is handled
            return _with_residual(self._residual_of(bucket, buffer), options, buffer, comm, divisor)
        self._exchanged += 1
        seeds = _seeds(options, comm, self._exchanged, bucket.names)
        return exchange(buffer, None, comm, divisor, FORMATS[options.kind], seeds)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:
        if sent_dense(bucket.collective, dtype):
            return dense_traffic(numel, dtype, ranks)
        form = FORMATS[bucket.collective]
        nbytes = 2 * (ranks - 1) * form.message_nbytes(form.region_numel(numel, ranks))
        return Traffic(nbytes, nbytes, 1.0)

    def probe(self, kind: str) -> Collective:
        options = self._options[kind]
        residuals: dict[int, torch.Tensor] = {}

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if options.keeps_residual and buffer.numel() not in residuals:
                residuals[buffer.numel()] = torch.zeros_like(buffer, dtype=torch.float32)
            comm = self._comms.of(group)
            seeds = _seeds(options, comm, 0, ())
            return exchange(buffer, residuals.get(buffer.numel()), comm, divisor, FORMATS[kind], seeds)

        return exchanged

    def close(self) -> None:
        self._comms.clear()


def sent_dense(kind: str, dtype: torch.dtype) -> bool:
    """Whether a bucket of this kind is sent dense because of its dtype."""
    return kind == BF16 and dtype not in (torch.float32, torch.bfloat16)


def _with_residual(
    state: ResidualState, options: Quantised, buffer: torch.Tensor, comm: Communicator, divisor: float
) -> Steps:
    state.record_norms(buffer)
    state.step += 1
    seeds = _seeds(options, comm, state.step, state.names)
    yield from exchange(buffer, state.residual, comm, divisor, FORMATS[options.kind], seeds)


def _seeds(options: Quantised, comm: Communicator, step: int, names: Sequence[str]) -> Seeds | None:
    return Seeds.of(comm.rank, step, names) if options.stochastic else None
