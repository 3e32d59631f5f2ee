"""Ok-Topk: a sparse all-reduce whose traffic stays under 3k entries per rank, however many ranks there are.

    local threshold   about k of this rank's accumulated values pass
    split             what passes goes to the owner of its region: k(P−1)/P entries, regions balanced by count
    global threshold  about k of the sums at all owners pass
    gather            what passes goes to everyone: k(P−1)/P entries, or twice that where owners must first balance

An entry, a value with its position, has 8, 4 or 3 bytes, as ``OkTopk(wire=…)`` says; the published bound of 6k words is
that of 8.

What a rank offered and everyone applied leaves its residual; everything else stays there for a later step. S. Li,
T. Hoefler, *Near-optimal sparse allreduce for distributed deep learning*, PPoPP 2022.

This module alone chooses between the three versions of the exchange:

    exact.py            the published exchange: counts first, then messages of exactly their size; on CPUs
    fixed.py            messages of fixed size, in torch operations: on GPUs without Triton, or deterministic
    triton_exchange.py  messages of fixed size, in Triton kernels: on GPUs
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.contracts import Steps, record_stream
from anabranch.exchange.residuals.state import BucketState
from anabranch.exchange.sparse.exact import exact_exchange
from anabranch.exchange.sparse.fixed import fixed_exchange
from anabranch.values.kinds.options import OkTopk

Version = Callable[[torch.Tensor, BucketState, Communicator, float, float, OkTopk], Steps]


def exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float, options: OkTopk
) -> Steps:
    """The exchange of one float32 bucket in one step, as steps for a lane.

    ``density`` is the bucket's final density; ``options`` may start from a higher one. Afterwards ``gradient`` holds,
    with the same bits on every rank, the sum over the ranks of what was offered and applied, divided by ``divisor``,
    and ``state.residual`` what is still to be sent. If any rank's gradient is not finite, all gradients are NaN and all
    residuals as they were.
    """
    if gradient.dtype != torch.float32:
        raise ValueError(
            f"a sparse exchange was given gradients of {gradient.dtype}, and residuals are float32: give it a float32 "
            "copy, as in_float32() does, or send them dense"
        )
    if len(gradient) == 0:
        return
    state.record_norms(gradient)
    run = version_for(gradient, options)
    yield from run(gradient, state, comm, divisor, options.density_at(state.step, density), options)


def in_float32(
    buffer: torch.Tensor,
    exchange: Callable[[torch.Tensor], Steps],
    state: BucketState,
    comm: Communicator,
    divisor: float,
) -> Steps:
    """An exchange on a float32 copy of a buffer of another dtype, to which averages are rounded once.

    Of an average that float16 cannot hold, the rest goes to the residual of rank 0 and is sent in a later step. An
    infinite one would be lost, or, if all were put back, be infinite in every step to come.
    """
    if buffer.dtype == torch.float32:
        yield from exchange(buffer)
        return
    wide = buffer.float()
    yield from exchange(wide)
    record_stream(wide)
    largest = torch.finfo(buffer.dtype).max
    fitting = wide.clamp(-largest, largest)
    if comm.rank == 0 and buffer.dtype == torch.float16:
        state.residual.add_(torch.where(wide.isfinite(), wide - fitting, 0.0), alpha=divisor)
    buffer.copy_(fitting)


def version_for(gradient: torch.Tensor, options: OkTopk) -> Version:
    """The version of the exchange for a bucket on this device."""
    if options.exact or not gradient.is_cuda:
        return exact_exchange
    return fixed_size_version(gradient, options)


def fixed_size_version(gradient: torch.Tensor, options: OkTopk) -> Version:
    """The version with messages of fixed size: Triton kernels on a GPU that has them, torch operations elsewhere.

    The kernels add in no fixed order, so deterministic runs do without them.
    """
    kernels = _triton_exchange() if gradient.is_cuda and not options.deterministic else None
    return fixed_exchange if kernels is None else kernels


@cache
def _triton_exchange() -> Version | None:
    """The version in Triton kernels, imported when a GPU first needs it; None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from anabranch.exchange.sparse.triton_exchange import triton_exchange

    return triton_exchange
