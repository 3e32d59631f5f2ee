"""The quantised exchange: every rank sends each owner its region in few bits, and owners send everyone the averages.

    quantise   this rank's values → a message to each owner         then the all-to-all
    reduce     the messages to this owner → the average, rounded    then the all-gather
    finish     all averages → the gradient

Sums are in float32 and in the order of ranks; owners round, so that all ranks end with the same bits. A value is
rounded twice, however many ranks there are. Integers and numbers travel in one message. With a residual nothing is
lost: what the first rounding changed stays with the sender, what the second changed with the owner, and both are added
to the next gradient. Until ``finish`` neither gradient nor residual changes.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.contracts import Steps, record_stream
from anabranch.exchange.quantised import torch_steps
from anabranch.exchange.quantised.stochastic import Seeds
from anabranch.exchange.quantised.torch_steps import Kept
from anabranch.values.kinds.formats import BlockFormat


class QuantisedSteps(Protocol):
    """The three steps, in torch operations or as kernels."""

    def quantise(
        self,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        ranks: int,
        form: BlockFormat,
        seed: int | None = None,
    ) -> torch.Tensor: ...

    def reduce(
        self, received: torch.Tensor, divisor: float, form: BlockFormat, with_error: bool, seed: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def finish(
        self, gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat, kept: Kept | None = None
    ) -> None: ...


def exchange(
    buffer: torch.Tensor,
    residual: torch.Tensor | None,
    comm: Communicator,
    divisor: float,
    form: BlockFormat,
    seeds: Seeds | None = None,
) -> Steps:
    """Average one bucket, as steps for a lane; ``residual`` is float32, or None if rounding errors are dropped.

    ``seeds``: of stochastic rounding; None rounds to the nearest.

    Where any rank has a value that is not finite, the average of its block is NaN on all ranks; in bf16 that of this
    value is infinite or NaN. With residuals all averages of the bucket are NaN, and residuals stay as they were.
    """
    if buffer.numel() == 0:
        return
    run = steps_for(buffer)
    as_sender, as_owner = seeds or (None, None)
    sent = run.quantise(buffer, residual, comm.size, form, as_sender)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent, "split")
    record_stream(sent, received)
    message, rounding_error = run.reduce(received, divisor, form, residual is not None, as_owner)
    gathered = torch.empty_like(sent)
    yield comm.all_gather(gathered, message[None], "gather")
    record_stream(message, gathered)
    kept = None
    if residual is not None and rounding_error is not None:
        record_stream(rounding_error)
        kept = Kept(residual, sent, rounding_error, comm.rank, divisor)
    run.finish(gathered, buffer, form, kept)


def steps_for(buffer: torch.Tensor) -> QuantisedSteps:
    """Triton kernels on a GPU that has them, torch operations elsewhere."""
    kernels = _triton_steps() if buffer.is_cuda else None
    return torch_steps if kernels is None else kernels


@cache
def _triton_steps() -> Any:
    """The steps as kernels, imported when a GPU first needs them; None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from anabranch.exchange.quantised import triton_steps

    return triton_steps
