"""Thresholds: the magnitude from which values are sent, found exactly or from a sample of the same step.

With error feedback a threshold cannot be controlled well by the counts of past steps. Raising it by a little empties
the next steps, because many residuals lie just below it, and counts swing between 0.2k and 3k. A sample of the very
values to be selected has no history and is right at once: 640 expected values above the threshold give a count within
12 % (three standard deviations), whatever the gradients did before.

Owners do the same with their sums, and apply a bias: owner i takes the threshold t_i of its own share, times
exp(bias_i), where the bias follows mean_j(log t_j) − log t_i slowly. So regions with larger values send more, as under
one global threshold, and the total still follows the step.
"""

import math

import torch

from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.values.kinds.formats import Sizes

SAMPLE_ABOVE = 640  # expected values above the threshold in a sample: the count then deviates by 4 %
TURN = 2**31  # fractions of a turn are integers in these units, so every device computes the same positions
GOLDEN = round(TURN * (math.sqrt(5) - 1) / 2)  # its multiples, mod a turn, are spread evenly whatever their number
ROOT = round(TURN * (math.sqrt(2) - 1))  # shift of the positions from one step to the next
BIAS_MEMORY = 0.9
# Low bits of a sampled threshold that are 0. The error of 1 % is below a sample's own, and kernels take half the time.
LOW_BITS = 16


def kth_magnitude(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest magnitude, exactly; 0 if there are fewer than k values. Costs a full top-k."""
    if k > len(values):
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.topk(values.abs(), max(k, 1), sorted=False).values.amin()


def sample_numel(numel: int, k: int) -> int:
    """The number of values in a sample; ``numel`` where a sample would be as large as that."""
    return min(numel, math.ceil(SAMPLE_ABOVE * numel / max(k, 1)))


def sample_shift(step: int) -> int:
    """The fraction of a turn, in units of 1/``TURN``, by which a step's sample positions are shifted."""
    return step * ROOT % TURN


def sample_rank(numel: int, k: int) -> int:
    """Which value of a sample, counted from the largest, is about the k-th largest of all values."""
    return k if sample_numel(numel, k) == numel else max(1, round(k * sample_numel(numel, k) / numel))


def sample_positions(numel: int, k: int, step: int, device: torch.device) -> torch.Tensor | None:
    """Positions (int64) spread evenly over ``numel`` elements, others in every step; None: look at all elements."""
    wanted = sample_numel(numel, k)
    if wanted >= numel:
        return None
    turns = (torch.arange(wanted, dtype=torch.int64, device=device) * GOLDEN + sample_shift(step)) % TURN
    # turns·numel / TURN without a product of more than 63 bits, for any numel under 2⁴⁸
    return ((turns * (numel >> 16)) >> 15) + ((turns * (numel & 0xFFFF)) >> 31)


def sampled_magnitude(parts: tuple[torch.Tensor, ...], k: int, step: int) -> torch.Tensor:
    """About the k-th largest magnitude of the sum of the parts (float32), from a sample, rounded down to bfloat16.

    0 where fewer than k values are not zero, or k is everything. Never synchronises with the host.
    """
    numel = len(parts[0])
    if k >= numel:
        return torch.zeros((), dtype=parts[0].dtype, device=parts[0].device)
    positions = sample_positions(numel, k, step, parts[0].device)
    seen = [part if positions is None else part[positions] for part in parts]
    total = seen[0] if len(seen) == 1 else seen[0] + seen[1]
    return round_down(kth_magnitude(total, sample_rank(numel, k)))


def round_down(magnitude: torch.Tensor) -> torch.Tensor:
    """A magnitude (float32) with its ``LOW_BITS`` lowest bits set to 0."""
    return (magnitude.view(torch.int32) >> LOW_BITS << LOW_BITS).view(torch.float32)


def next_threshold_bias(bias: torch.Tensor, found: torch.Tensor, rank: int, poisoned: torch.Tensor) -> torch.Tensor:
    """The bias for the next step, from the thresholds (float32 [P]) that all owners found in this one.

    An owner that found 0, because it had less than its share, does not count in the mean and keeps its bias. A
    poisoned step changes no bias.
    """
    votes = found > 0
    logs = torch.where(votes, found, 1.0).log()
    mean = logs.sum() / votes.sum().clamp(min=1)
    moved = BIAS_MEMORY * bias + (1 - BIAS_MEMORY) * (mean - logs[rank])
    return torch.where(votes[rank] & ~poisoned, moved, bias)


def record_step(
    state: BucketState, offered: torch.Tensor, heads: torch.Tensor, rank: int, poisoned: torch.Tensor
) -> None:
    """Record a finished step in its state: counts and the next bias, from the heads of all owners."""
    found = heads[:, 1].contiguous().view(torch.float32)
    state.threshold_bias.copy_(next_threshold_bias(state.threshold_bias, found, rank, poisoned))
    state.offered.copy_(offered)
    state.applied.copy_(heads[:, 0].clamp(min=0).sum())
    state.step += 1
    state.fresh = False


def owner_threshold(
    sums: torch.Tensor, sizes: Sizes, bias: torch.Tensor, step: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold of an owner's share of k among its sums (pairs [m, 2]); and that with its bias, to be applied."""
    if sizes.selects_all:
        zero = torch.zeros_like(bias)
        return zero, zero
    values = sums[:, 0].contiguous().view(torch.float32)
    found = sampled_magnitude((values,), -(-sizes.k // ranks), step)
    return found, found * bias.exp()
