"""The exchange of fixed-size messages, in torch operations: the host never waits for the device, nor asks for a size.

A message has slots for ``capacity_factor``·k/P pairs; values that find no slot stay in the residual. Before its pairs
it has a head of two words: a count, −1 if the sender's gradient was not finite, so that every rank learns of it without
another message; and, from owners, the threshold that they found. ``triton_exchange.py`` does the same with kernels.
"""

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.interface import Steps, record_stream
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse import select
from anabranch.exchange.sparse.encoding import frame_messages, message_head, unframe_messages
from anabranch.exchange.sparse.thresholds import owner_threshold, record_step, sampled_magnitude
from anabranch.values.kinds.formats import Sizes
from anabranch.values.kinds.options import OkTopk


def fixed_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk | None = None,
) -> Steps:
    """``oktopk.exchange`` at this density, in one all-to-all and one all-gather of sizes known beforehand."""
    options = options or OkTopk()
    sizes = Sizes.of(len(gradient), comm.size, density, options)
    encoding = sizes.encoding
    residual, boundaries, local = state.residual, state.boundaries, state.local_threshold
    local.copy_(sampled_magnitude((gradient, residual), sizes.k, state.step))
    if select.regions_due(state, sizes, options):
        yield from select.rebalance_regions(gradient, state, comm, sizes)
    offered = select.offer(gradient, residual, local, boundaries, sizes.capacity)
    heads = message_head(offered.passed, offered.poison, torch.zeros_like(local))
    sent = frame_messages(heads, offered.packed, encoding)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent, "split")
    record_stream(sent, received, *offered)

    heads, pairs = unframe_messages(received, encoding)
    buffer = select.region_buffer(len(gradient), comm, gradient.device)
    sums = select.sums_at_owner(pairs, buffer, options.deterministic)
    found, threshold = owner_threshold(sums, sizes, state.threshold_bias, state.step, comm.size)
    selected = select.select_sums(sums, threshold, sizes.capacity, select.SUM_LIMIT)
    poison = selected.poison | (heads[:, 0] < 0).any()
    part = frame_messages(message_head(selected.passed, poison, found)[None], selected.packed[None], encoding)
    everyone = torch.empty(comm.size, part.shape[1], dtype=torch.uint8, device=part.device)
    yield comm.all_gather(everyone, part, "gather")
    record_stream(part, everyone)

    heads, pairs = unframe_messages(everyone, encoding)
    poisoned = (heads[:, 0] < 0).any()
    select.finish(pairs, unframe_messages(sent, encoding)[1], gradient, residual, boundaries, divisor, poisoned)
    if encoding.rounds:
        select.keep_rounding_error(selected.packed, pairs[comm.rank], residual, boundaries[comm.rank], poisoned)
    record_step(state, offered.passed.sum(), heads, comm.rank, poisoned)
