"""Is one layout faster than another? A sequential test on blocks of steps that were run in turns.

Steps of the two layouts alternate in blocks (A B B A A B …), so that both see the same noise: other programs, other
inputs, a network that slows down. After each pair of blocks the test says faster, not faster, or not yet.
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

from anabranch.tuning.policy import TuningPolicy

Verdict = Literal["faster", "not faster", "undecided"]
Block = Sequence[float]  # seconds of some steps of one layout in a row

NOISE_FLOOR = 0.002  # share of a step: three equal readings do not mean that there is no noise
GAP_TO_DEVIATION = 1.3  # the median distance of steps from their block's median, to a normal standard deviation
FEW_STEPS_PENALTY = 3.0  # the noise itself is estimated from few steps
FEW_PAIRS_PENALTY = 2.0  # and from few pairs
MEDIAN_PENALTY = 1.25  # a median varies more than a mean


class Comparison(NamedTuple):
    """The result after some pairs: the gain is the share of the step time that the challenger saves.

    ``doubtful``: a burst of other programs could look the same. It may slow down one block; of several pairs it seldom
    slows down the same layout's blocks.
    """

    verdict: Verdict
    gain: float
    uncertainty: float
    doubtful: bool = False


def compare(pairs: Sequence[tuple[Block, Block]], policy: TuningPolicy) -> Comparison:
    """Compare a challenger with the layout in force, given pairs of blocks (in force, challenger)."""
    ratios = [log(median(ours) / median(theirs)) for theirs, ours in pairs]  # below 0: the challenger is faster
    mean = fmean(ratios)
    width = policy.confidence * _standard_error(pairs, ratios)
    gain = 1 - exp(mean)
    uncertainty = exp(mean) * width
    doubtful = len(pairs) == 1 or gain < 2 * uncertainty
    return Comparison(_verdict(pairs, gain, uncertainty, policy), gain, uncertainty, doubtful)


def step_noise(blocks: Sequence[Block]) -> float:
    """How much steps of a block differ, as a share of the step time; robust against single slow steps."""
    gaps = []
    for block in blocks:
        middle = log(median(block))
        apart = sorted(abs(log(seconds) - middle) for seconds in block)
        gaps += apart[len(block) % 2 :]  # in a block of odd length one step is the median itself
    return max(NOISE_FLOOR, GAP_TO_DEVIATION * median(gaps)) if gaps else NOISE_FLOOR


def drift(usual: Sequence[Block], recent: Sequence[Block], policy: TuningPolicy) -> tuple[float, float] | None:
    """The step time before and now, if every recent block differs from the usual ones by more than noise; else None."""
    usual, recent = [block for block in usual if block], [block for block in recent if block]
    if not usual or not recent:
        return None
    before_s, now_s = median(map(median, usual)), median(map(median, recent))
    noise = MEDIAN_PENALTY * step_noise(usual) / sqrt(min(map(len, recent)))
    between = GAP_TO_DEVIATION * median(abs(log(median(block) / before_s)) for block in usual)
    limit = policy.max_drift + policy.confidence * max(noise, between)
    changes = [log(median(block) / before_s) for block in recent]
    return (before_s, now_s) if min(changes) > limit or max(changes) < -limit else None


def _verdict(pairs: Sequence[tuple[Block, Block]], gain: float, uncertainty: float, policy: TuningPolicy) -> Verdict:
    if gain + uncertainty < policy.min_gain:
        return "not faster"
    clear = gain > policy.min_gain and gain - uncertainty > min(0.0, policy.min_gain)
    if len(pairs) == 1:
        (theirs, ours), *_ = pairs
        obvious = clear and gain > policy.obvious_gain and max(ours) < min(theirs)
        return "faster" if obvious else "undecided"
    if clear:
        return "faster"
    return "not faster" if gain < policy.min_gain or len(pairs) >= policy.max_pairs else "undecided"


def _standard_error(pairs: Sequence[tuple[Block, Block]], ratios: Sequence[float]) -> float:
    """Of the mean ratio: from the noise within blocks, or between pairs if that is larger."""
    blocks = [block for pair in pairs for block in pair]
    differences = sum(len(block) - 1 for block in blocks)
    noise = step_noise(blocks) * (1 + FEW_STEPS_PENALTY / max(1, differences))
    within = sqrt(sum(1 / len(theirs) + 1 / len(ours) for theirs, ours in pairs)) / len(pairs)
    between = 0.0
    if len(ratios) > 1:
        between = stdev(ratios) / sqrt(len(ratios)) * (1 + FEW_PAIRS_PENALTY / (len(ratios) - 1))
    return max(MEDIAN_PENALTY * noise * within, between)
