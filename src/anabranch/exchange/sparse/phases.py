"""Phases of a step that versions of the exchange share: regions, the owner's threshold, the record of a step."""

import torch

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.contracts import Steps, record_stream
from anabranch.exchange.residuals.state import BucketState
from anabranch.exchange.sparse import regions, select
from anabranch.exchange.sparse.thresholds import next_threshold_bias, sampled_magnitude
from anabranch.values.kinds.formats import Sizes, widest_numel
from anabranch.values.kinds.options import OkTopk

# Sums of this magnitude count as not finite: rounding may raise a sum by 1/256 before it is sent.
SUM_LIMIT = torch.finfo(torch.float32).max * (1 - 2**-7)


def rebalance_regions(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, sizes: Sizes, options: OkTopk
) -> Steps:
    """Where new regions are due: ``state.boundaries`` ← by what passes ``state.local_threshold`` on all ranks."""
    if sizes.selects_all:
        state.boundaries.copy_(regions.uniform(len(gradient), comm.size, gradient.device))
    elif regions_due(state, options):
        proposed = select.propose_boundaries(gradient, state.residual, state.local_threshold, comm.size)
        yield comm.all_reduce(proposed, "regions")
        record_stream(proposed)
        state.boundaries.copy_(regions.mean_boundaries(proposed, len(gradient), comm.size))


def regions_due(state: BucketState, options: OkTopk) -> bool:
    """Whether this step begins with new regions; the same on every rank."""
    return state.fresh or state.step % options.region_period == 0


def region_buffer(numel: int, comm: Communicator, device: torch.device) -> torch.Tensor:
    """Zeros for the sums of any region of a bucket of ``numel`` elements. Zero them again after use."""
    return comm.zeros(widest_numel(numel, comm.size), device)


def owner_threshold(
    sums: torch.Tensor, sizes: Sizes, state: BucketState, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold of an owner's share of k among its sums (pairs [m, 2]); and that with its bias, to be applied."""
    if sizes.selects_all:
        zero = torch.zeros_like(state.threshold_bias)
        return zero, zero
    values = sums[:, 0].contiguous().view(torch.float32)
    found = sampled_magnitude((values,), -(-sizes.k // ranks), state.step)
    return found, found * state.threshold_bias.exp()


def record_step(
    state: BucketState, offered: torch.Tensor, heads: torch.Tensor, rank: int, poisoned: torch.Tensor
) -> None:
    """Record a finished step in ``state``: counts, thresholds and the next bias, from the heads of all owners."""
    found = heads[:, 1].contiguous().view(torch.float32)
    state.threshold_bias.copy_(next_threshold_bias(state.threshold_bias, found, rank, poisoned))
    state.global_threshold.copy_(torch.where(found > 0, found, 1.0).log().mean().exp())
    state.offered.copy_(offered)
    state.applied.copy_(heads[:, 0].clamp(min=0).sum())
    state.step += 1
    state.fresh = False
