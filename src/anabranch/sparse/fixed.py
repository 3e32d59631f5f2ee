"""The exchange of fixed-size messages: nothing waits for the host, and no size is ever asked for.

A message has slots for ``capacity_factor``·k/P pairs; what finds none stays in the residual. Before its pairs it has
two words: a count, −1 if the sender's gradient was not finite, so that every rank learns of it with no further
message; and, from owners, the threshold that they found. On GPUs ``fused.py`` does the same with kernels.
"""

from functools import cache
from importlib.util import find_spec

import torch

from anabranch.comm.communicator import Communicator
from anabranch.comm.exchange import Steps, record_stream
from anabranch.sparse import regions, select
from anabranch.sparse.encoding import framed, head, unframed
from anabranch.sparse.options import OkTopk
from anabranch.sparse.sizes import Sizes, widest_numel
from anabranch.sparse.state import BucketState
from anabranch.sparse.thresholds import next_threshold_bias, sampled_magnitude


def fixed_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk | None = None,
) -> Steps:
    """See ``oktopk.exchange``; float32 only. Two messages each way, whose sizes depend on nothing but the density."""
    options = options or OkTopk()
    if len(gradient) == 0:
        return
    sizes = Sizes.of(len(gradient), comm.size, density, options)
    if fusible(gradient, options):
        from anabranch.sparse.triton_exchange import fused_exchange

        yield from fused_exchange(gradient, state, comm, divisor, sizes, options)
        return
    residual, boundaries, local = state.residual, state.boundaries, state.local_threshold
    local.copy_(sampled_magnitude((gradient, residual), sizes.k, state.step))
    yield from balance(gradient, state, comm, sizes, options)
    offered = select.offer(gradient, residual, local, boundaries, sizes.capacity, sizes.encoding)
    sent = framed(head(offered.counts, offered.poison, torch.zeros_like(local)), offered.packed, sizes.encoding)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent, "split")
    record_stream(sent, received, *offered)

    heads, pairs = unframed(received, sizes.encoding)
    sums = select.sums_at_owner(pairs, owned_zeros(gradient, comm), options.deterministic)
    found, threshold = owner_threshold(sums, sizes, state, comm.size)
    taken = select.take(sums, threshold, sizes.capacity, sizes.encoding)
    poison = taken.poison | (heads[:, 0] < 0).any()
    part = framed(head(taken.passed, poison, found)[None], taken.packed[None], sizes.encoding)
    everyone = torch.empty(comm.size, part.shape[1], dtype=torch.uint8, device=part.device)
    yield comm.all_gather(everyone, part, "gather")
    record_stream(part, everyone)

    heads, pairs = unframed(everyone, sizes.encoding)
    poisoned = (heads[:, 0] < 0).any()
    select.finish(pairs, offered.packed, gradient, residual, boundaries, divisor, poisoned)
    if sizes.encoding.rounds:
        select.keep_leftover(taken.packed, taken.leftover, residual, boundaries[comm.rank], poisoned)
    note(state, offered.counts.sum(), heads, comm.rank, poisoned)


def owned_zeros(gradient: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Zeros for the sums of any region of this bucket."""
    return comm.zeros(widest_numel(len(gradient), comm.size), gradient.device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fusible(gradient: torch.Tensor, options: OkTopk) -> bool:
    """Whether the Triton kernels can do this bucket; their sums are in no fixed order."""
    return gradient.is_cuda and not options.deterministic and _has_triton()


def balance(gradient: torch.Tensor, state: BucketState, comm: Communicator, sizes: Sizes, options: OkTopk) -> Steps:
    """Where regions are due: new boundaries, by what passes ``state.local_threshold`` on all ranks."""
    if sizes.everything:
        state.boundaries.copy_(regions.uniform(len(gradient), comm.size, gradient.device))
    elif state.fresh or state.step % options.region_period == 0:
        proposed = select.proposal(gradient, state.residual, state.local_threshold, comm.size)
        yield comm.all_reduce(proposed, "regions")
        record_stream(proposed)
        state.boundaries.copy_(regions.agreed(proposed, len(gradient), comm.size))


def owner_threshold(
    sums: torch.Tensor, sizes: Sizes, state: BucketState, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What parts an owner's own share of k from the rest of its sums, and the same next_threshold_bias: the one to apply."""
    if sizes.everything:
        zero = torch.zeros_like(state.threshold_bias)
        return zero, zero
    values = sums[:, 0].contiguous().view(torch.float32)
    found = sampled_magnitude((values,), -(-sizes.k // ranks), state.step)
    return found, found * state.threshold_bias.exp()


def note(state: BucketState, offered: torch.Tensor, heads: torch.Tensor, rank: int, poisoned: torch.Tensor) -> None:
    """After a step: how many passed, the owners' thresholds, the next threshold_bias."""
    found = heads[:, 1].contiguous().view(torch.float32)
    state.threshold_bias.copy_(next_threshold_bias(state.threshold_bias, found, rank, poisoned))
    state.global_threshold.copy_(torch.where(found > 0, found, 1.0).log().mean().exp())
    state.offered.copy_(offered)
    state.applied.copy_(heads[:, 0].clamp(min=0).sum())
    state.step += 1
    state.fresh = False
