"""Which magnitude parts the values to send from the rest: exactly, by a sample of the same step, or by a Gaussian.

With error feedback a threshold cannot be steered well by the counts of past steps: raising it by a little empties the
next steps, because everything just below it has been waiting there, and counts swing between 0.2k and 3k. A sample of
the very values to be selected has no past and settles at once: 640 expected values above the threshold give a count
within 12 % (three standard deviations), whatever the gradients did before.

Owners do the same with their sums, and threshold_bias what they find: owner i takes its own share's threshold t_i, times
exp(tilt_i), where the threshold_bias follows mean_j(log t_j) − log t_i slowly. So regions with larger values send more, as under
one global threshold, and the total still follows the step.
"""

import math
from statistics import NormalDist

import torch

SAMPLE_ABOVE = 640  # expected in a sample: a relative deviation of the count of 4 %
TURN = 2**31  # turns are counted in such parts: integers, so that every device finds the same positions
GOLDEN = round(TURN * (math.sqrt(5) - 1) / 2)  # its multiples, mod a turn, are spread evenly whatever their number
ROOT = round(TURN * (math.sqrt(2) - 1))  # how far steps are apart
BIAS_MEMORY = 0.9
# Low bits of a sampled threshold that are 0: 1 % is less than a sample knows, and kernels find it in half the time.
LOW_BITS = 16


def kth_magnitude(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest magnitude, exactly; 0 if there are fewer than k values. Costs a full top-k."""
    if k > len(values):
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.topk(values.abs(), max(k, 1), sorted=False).values.amin()


def sample_numel(numel: int, k: int) -> int:
    """How many values to look at; all of them, if a sample would be as large."""
    return min(numel, math.ceil(SAMPLE_ABOVE * numel / max(k, 1)))


def sample_shift(step: int) -> int:
    """By what part of a turn a step's positions are shifted."""
    return step * ROOT % TURN


def sample_rank(numel: int, k: int) -> int:
    """Which of a sample's values, counted from the largest, is about the k-th largest of all."""
    return k if sample_numel(numel, k) == numel else max(1, round(k * sample_numel(numel, k) / numel))


def sample_positions(numel: int, k: int, step: int, device: torch.device) -> torch.Tensor | None:
    """Places (int64) spread evenly over ``numel`` elements, other ones in every step; None if all must be looked at."""
    wanted = sample_numel(numel, k)
    if wanted >= numel:
        return None
    turns = (torch.arange(wanted, dtype=torch.int64, device=device) * GOLDEN + sample_shift(step)) % TURN
    # turns·numel / TURN without a product of more than 63 bits, for any numel under 2⁴⁸
    return ((turns * (numel >> 16)) >> 15) + ((turns * (numel & 0xFFFF)) >> 31)


def sampled_magnitude(parts: tuple[torch.Tensor, ...], k: int, step: int) -> torch.Tensor:
    """About the k-th largest magnitude of the sum of the parts (float32), from a sample, rounded down to a bfloat16.

    Nothing waits for the host. 0 where fewer than k are not zero, or k is everything.
    """
    numel = len(parts[0])
    if k >= numel:
        return torch.zeros((), dtype=parts[0].dtype, device=parts[0].device)
    positions = sample_positions(numel, k, step, parts[0].device)
    seen = [part if positions is None else part[positions] for part in parts]
    total = seen[0] if len(seen) == 1 else seen[0] + seen[1]
    return coarse(kth_magnitude(total, sample_rank(numel, k)))


def coarse(magnitude: torch.Tensor) -> torch.Tensor:
    """A magnitude (float32), rounded down to ``LOW_BITS`` fewer bits."""
    return (magnitude.view(torch.int32) >> LOW_BITS << LOW_BITS).view(torch.float32)


def gaussian_magnitude(values: torch.Tensor, density: float) -> torch.Tensor:
    """What a Gaussian of the values' mean and deviation exceeds on both sides together with probability ``density``.

    Cheap, and wrong for the heavy-tailed values that gradients are: it is here as a rival.
    """
    if density >= 1:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    spread = values.std(correction=0)
    return values.mean().abs() + spread * NormalDist().inv_cdf(1 - density / 2)


def next_threshold_bias(
    threshold_bias: torch.Tensor, found: torch.Tensor, rank: int, poisoned: torch.Tensor
) -> torch.Tensor:
    """The threshold_bias for the next step, from the thresholds (float32 [P]) that all owners found in this one.

    An owner that found 0, because it had less than its share, neither votes nor tilts; a poisoned step changes nothing.
    """
    votes = found > 0
    logs = torch.where(votes, found, 1.0).log()
    mean = logs.sum() / votes.sum().clamp(min=1)
    moved = BIAS_MEMORY * threshold_bias + (1 - BIAS_MEMORY) * (mean - logs[rank])
    return torch.where(votes[rank] & ~poisoned, moved, threshold_bias)
