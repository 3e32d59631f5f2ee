"""Ok-Topk: a sparse all-reduce whose traffic stays under 6k words per rank, however many ranks there are.

    local threshold   about k of this rank's accumulated values pass
    split             what passes goes to the owner of its region: 2k(P−1)/P words, regions balanced by count
    global threshold  about k of the sums at all owners pass
    gather            what passes goes to everyone: 2k(P−1)/P words, or twice that where owners must first balance

What a rank offered and everyone applied leaves its residual; all else waits there for a later step. S. Li, T. Hoefler,
*Near-optimal sparse allreduce for distributed deep learning*, PPoPP 2022. ``exact.py`` is the published exchange,
``fixed.py`` one of messages of fixed size whose sizes no host needs to know.
"""

import torch

from anabranch.bench.baselines import dense_exchange
from anabranch.comm.communicator import Communicator
from anabranch.comm.exchange import Steps
from anabranch.sparse.exact import exact_exchange
from anabranch.sparse.fixed import fixed_exchange
from anabranch.sparse.options import OkTopk
from anabranch.sparse.state import BucketState

__all__ = ["OkTopk", "exchange"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float, options: OkTopk
) -> Steps:
    """The exchange of one bucket in one step, as steps for a lane; ``density`` is the settled one, resolved.

    Afterwards ``gradient`` holds, with the same bits on every rank, the sum over the ranks of what was offered and
    applied, divided by ``divisor``, and ``state.residual`` what is still to come. If any rank's gradient is not finite,
    all gradients are NaN and all residuals as they were. Half precisions are exchanged in float32; float64 is refused.
    """
    if gradient.dtype not in DTYPES:
        raise ValueError(f"gradients of {gradient.dtype} cannot be sparsified, residuals are float32: send them dense")
    whole = gradient if gradient.dtype == torch.float32 else gradient.to(torch.float32)
    state.look(whole)
    now = options.density_at(state.step, density)
    if now == 1.0 and state.step < options.warmup_steps:
        yield from dense_exchange(whole, state, comm, divisor, now)
    elif options.exact or not gradient.is_cuda:
        yield from exact_exchange(whole, state, comm, divisor, now, options)
    else:
        yield from fixed_exchange(whole, state, comm, divisor, now, options)
    if whole is not gradient:
        gradient.copy_(whole)
