"""The quantised exchange: every rank sends each owner its region in few bits, and owners send everyone the averages.

    quantise   this rank's values → a message to each owner         then the all-to-all
    reduce     the messages to this owner → the average, rounded    then the all-gather
    finish     all averages → the gradient

Sums are in float32 and in the order of ranks; owners round, so that all ranks end with the same bits. A value is
rounded twice, however many ranks there are. Integers and numbers travel in one message. With a residual nothing is
lost: what the first rounding changed stays with the sender, what the second changed with the owner, and both are added
to the next gradient. Until ``finish`` neither gradient nor residual changes.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch

from anabranch.exchange.communicator import Communicator, Communicators
from anabranch.exchange.dense import dense, dense_traffic
from anabranch.exchange.interface import Collective, ExchangeFamily, Group, Steps, Traffic, record_stream, runs_triton
from anabranch.exchange.quantised import torch_steps
from anabranch.exchange.quantised.torch_steps import Kept
from anabranch.values.kinds.formats import FORMATS, BlockFormat
from anabranch.values.kinds.names import BF16, COMPRESSED, between_nodes
from anabranch.values.kinds.options import Quantised
from anabranch.values.plan import Bucket


def exchange(
    buffer: torch.Tensor, residual: torch.Tensor | None, comm: Communicator, divisor: float, form: BlockFormat
) -> Steps:
    """Average one bucket, as steps for a lane; ``residual`` is float32, or None if rounding errors are dropped.

    Where any rank has a value that is not finite, the average of its block is NaN on all ranks; in bf16 that of this
    value is infinite or NaN. With residuals all averages of the bucket are NaN, and residuals stay as they were.
    """
    if buffer.numel() == 0:
        return
    run = steps_for(buffer)
    sent = run.quantise(buffer, residual, comm.size, form)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent, "split")
    record_stream(sent, received)
    message, rounding_error = run.reduce(received, divisor, form, residual is not None)
    gathered = torch.empty_like(sent)
    yield comm.all_gather(gathered, message[None], "gather")
    record_stream(message, gathered)
    kept = None
    if residual is not None and rounding_error is not None:
        record_stream(rounding_error)
        kept = Kept(residual, sent, rounding_error, comm.rank, divisor)
    run.finish(gathered, buffer, form, kept)


def steps_for(buffer: torch.Tensor) -> ModuleType:
    """``quantise``, ``reduce`` and ``finish``: as kernels on a GPU that has Triton, in torch operations elsewhere."""
    if not runs_triton(buffer.device):
        return torch_steps
    from anabranch.exchange.quantised import triton_steps  # when a GPU first needs them

    return triton_steps


class WithResidual(Protocol):
    """The state of a bucket, as far as this exchange knows it: its residual, and how many steps it had."""

    residual: torch.Tensor
    step: int


def options_by_kind(given: Sequence[Quantised]) -> dict[str, Quantised]:
    """The options of every kind: those given, else its own."""
    return {**{kind: Quantised(kind) for kind in COMPRESSED}, **{one.kind: one for one in given}}


class QuantisedExchanges(ExchangeFamily):
    """The family of quantised exchanges.

    given      options of the kinds to plan with; a plan that the user gives may also name others
    state_of   gives the state of a bucket whose kind keeps a residual; None if no such kind is handled

    bf16 sends gradients dense that are neither float32 nor bfloat16: it would not save a byte of float16, and lose much
    of float64.
    """

    def __init__(
        self, given: Sequence[Quantised] = (), state_of: Callable[[Bucket, torch.Tensor], WithResidual] | None = None
    ) -> None:
        self.kinds = tuple(one.kind for one in given)
        self._options = options_by_kind(given)
        self._state_of = state_of
        self._comms = Communicators()

    def handles(self, kind: str) -> bool:
        options = self._options.get(between_nodes(kind))
        return options is not None and (not options.keeps_residual or self._state_of is not None)

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return super().supports(kind, dtype) or (self.handles(kind) and sent_dense(kind, dtype))

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        kind = between_nodes(bucket.collective)
        if sent_dense(kind, buffer.dtype):
            return dense(buffer, group, divisor)
        residual = None
        if self._options[kind].keeps_residual:
            assert self._state_of is not None  # it is handled
            state = self._state_of(bucket, buffer)
            state.step += 1
            residual = state.residual
        return exchange(buffer, residual, self._comms[group], divisor, FORMATS[kind])

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:
        kind = between_nodes(bucket.collective)
        if sent_dense(kind, dtype):
            return dense_traffic(numel, dtype, ranks)
        form = FORMATS[kind]
        nbytes = 2 * (ranks - 1) * form.message_nbytes(form.region_numel(numel, ranks))
        return Traffic(nbytes, nbytes, 1.0)

    def probe(self, kind: str) -> Collective:
        options, form = self._options[between_nodes(kind)], FORMATS[between_nodes(kind)]
        residuals: dict[int, torch.Tensor] = {}

        def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
            if options.keeps_residual and buffer.numel() not in residuals:
                residuals[buffer.numel()] = torch.zeros_like(buffer, dtype=torch.float32)
            return exchange(buffer, residuals.get(buffer.numel()), self._comms[group], divisor, form)

        return exchanged

    def close(self) -> None:
        self._comms.clear()


def sent_dense(kind: str, dtype: torch.dtype) -> bool:
    """Whether a bucket of this kind is sent dense because of its dtype."""
    return between_nodes(kind) == BF16 and dtype not in (torch.float32, torch.bfloat16)
