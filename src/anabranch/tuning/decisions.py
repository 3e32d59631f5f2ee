"""Decisions: what to do next, given what was tried. Pure functions: they measure nothing and talk to nobody.

Every rank calls them with its own measurements; what they say on rank 0 is carried out.

Whether one layout is faster than another is a sequential test on steps that alternate in blocks (A B B A A B …), so
that both layouts see the same noise: other programs, other inputs, a network that slows down. After each pair of blocks
the test says faster, not faster, or undecided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import exp, inf, log, sqrt
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

from anabranch.tuning.options import TuningPolicy
from anabranch.tuning.trial import PRICE_OF_FIDELITY, Trial, prediction_s
from anabranch.values.kinds.fidelity import error_of_plan
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

Verdict = Literal["not faster", "faster", "undecided"]
BlockOfSteps = Sequence[float]  # seconds of some steps of one layout in a row
Pairs = Sequence[tuple[BlockOfSteps, BlockOfSteps]]  # blocks of the layout in force and of the challenger
Candidate = tuple[str, Plan | None]  # a label and a plan; None: the layout's own buckets

VERDICTS: tuple[Verdict, ...] = ("not faster", "faster", "undecided")
NOISE_FLOOR = 0.002  # share of a step: three equal readings do not mean that there is no noise
GAP_TO_DEVIATION = 1.3  # the median distance of steps from their block's median, to a normal standard deviation
FEW_STEPS_PENALTY = 3.0  # the noise itself is estimated from few steps
FEW_PAIRS_PENALTY = 2.0  # and from few pairs
MEDIAN_PENALTY = 1.25  # a median varies more than a mean


# What a search does next.


class Verb(IntEnum):
    """What a search can do, in this order; candidates are tried as soon as there are any: ``TRY + n`` is number n.

    Plans on one lane show what messages cost, then those on several lanes how messages slow each other.
    """

    START = 0
    PLAN_ON_ONE_LANE = 1
    CALIBRATE_COSTS = 2
    PLAN = 3
    CALIBRATE_CONTENTION = 4
    PLAN_AGAIN = 5
    STOP = 6
    TRY = 7


@dataclass(frozen=True, slots=True)
class Tried:
    """What a search has found out so far.

    best         the layout in force, which candidates must beat
    trials       all trials of this search, that of ``best`` among them
    candidates   layouts that were planned and not yet considered
    done         the last verb that was carried out, TRY apart
    changed      whether calibrating the contention of messages has changed the network
    failed       whether planning has failed
    left_s       what searching may still cost
    is_over      whether no more layouts shall be tried: it was told to hold, or has taken enough steps
    """

    trace: Trace
    network: Network
    best: Trial
    trials: Sequence[Trial]
    candidates: Sequence[Candidate]
    done: Verb
    changed: bool
    failed: bool
    left_s: float
    is_over: bool


class Terms(NamedTuple):
    """On which terms a layout challenges the best one.

    expected        the share of a step that it is predicted to save
    simulated       the same by the simulator alone, which live steps cannot disturb; infinite if it cannot tell
    more_faithful   whether its averages are closer to the exact ones; it may then be a little slower
    min_gain        the share of a step that it must save, below 0 if it may be slower
    """

    expected: float
    simulated: float
    more_faithful: bool
    min_gain: float


def next_action(tried: Tried, policy: TuningPolicy) -> int:
    """What a search does next: a ``Verb``, or ``TRY`` plus the number of the next candidate that is worth a trial."""
    for number, (_, plan) in enumerate(tried.candidates):
        is_new = all(trial.plan != plan for trial in tried.trials)
        if is_new and is_worth(terms(tried, plan, policy).expected, tried.left_s, tried.is_over, policy):
            return Verb.TRY + number
    verb = Verb(tried.done + 1)
    can_plan = not (tried.failed or tried.is_over)
    if verb in (Verb.PLAN_ON_ONE_LANE, Verb.PLAN) and not can_plan:
        verb = Verb(verb + 1)
    if verb == Verb.PLAN_AGAIN and not (can_plan and tried.changed):
        verb = Verb.STOP
    return verb


def is_worth(gain: float, left_s: float, is_over: bool, policy: TuningPolicy) -> bool:
    """Whether a trial with this gain to expect is worth its cost.

    Where the budget is used up, only an obvious gain is: its trial pays for itself at once.
    """
    least = policy.min_predicted_gain if left_s > 0 else policy.obvious_gain
    return gain > least and not is_over


def most_gain(running: Trial) -> float:
    """The largest share of a step that any plan can save: the exposed time of the layout's own buckets."""
    return running.exposed_s / running.step_s if running.plan is None else inf


def terms(tried: Tried, plan: Plan | None, policy: TuningPolicy) -> Terms:
    """The terms on which this layout challenges the best one."""
    trace, network, best = tried.trace, tried.network, tried.best
    predicted_s, best_s = (prediction_s(trace, one, network) for one in (plan, best.plan))
    expected = simulated = inf
    if predicted_s is not None and best_s is not None:
        expected = simulated = 1 - predicted_s / best_s
        if plan is not None and not any(name.startswith("refined") for name in network.meta):
            # Messages in live steps cost more than measured ones until a trial has shown by how much.
            expected = 1 - predicted_s / max(best_s, best.step_s)
    if plan is None:  # never slower than DDP: its own buckets are tried even where they are predicted to be close
        expected += policy.max_drift
    more_faithful = _error_of_layout(trace, plan) < _error_of_layout(trace, best.plan)
    if more_faithful and expected >= -PRICE_OF_FIDELITY:
        expected += PRICE_OF_FIDELITY + policy.min_predicted_gain
    min_gain = allowed_loss(best, tried.trials) if more_faithful else policy.min_gain
    return Terms(expected, simulated, more_faithful, min_gain)


def allowed_loss(best: Trial, trials: Sequence[Trial]) -> float:
    """The least gain over ``best``, mostly below 0, with which a more faithful plan replaces it.

    It may be a little slower than the fastest of all trials, but not slower than the layout's own buckets.
    """
    fastest_s = min(trial.step_s for trial in trials)
    own_s = min((trial.step_s for trial in trials if trial.plan is None), default=inf)
    return 1 - min(fastest_s * (1 + PRICE_OF_FIDELITY), own_s) / best.step_s


def _error_of_layout(trace: Trace, plan: Plan | None) -> float:
    """How lossy a layout is; the layout's own buckets are exact."""
    return 0.0 if plan is None else error_of_plan(trace, plan)


# Whether a challenger stays.


class Comparison(NamedTuple):
    """The result after some pairs: the gain is the share of the step time that the challenger saves.

    ``doubtful``: a burst of other programs could look the same. It may slow down one block; of several pairs it seldom
    slows down the same layout's blocks.
    """

    verdict: Verdict
    gain: float
    uncertainty: float
    doubtful: bool = False


def judge(pairs: Pairs, policy: TuningPolicy, end_now: bool = False, in_doubt: bool = False) -> Comparison:
    """Compare, and say which layout stays, or that both run once more.

    ``end_now``: the likelier one stays, since the search is over or its budget used up. ``in_doubt``: the challenger
    stays unless it is clearly slower than ``min_gain`` allows.
    """
    found, min_gain = compare(pairs, policy), policy.min_gain
    verdict = found.verdict
    if verdict == "undecided" and end_now:
        least = max(min_gain, found.uncertainty / 2) if min_gain > 0 else min_gain
        verdict = "faster" if found.gain > least else "not faster"
    if in_doubt and verdict == "not faster" and found.gain >= min_gain:
        verdict = "faster"
    return found._replace(verdict=verdict)


def compare(pairs: Pairs, policy: TuningPolicy) -> Comparison:
    """Compare a challenger with the layout in force, given pairs of blocks (in force, challenger)."""
    ratios = [log(median(ours) / median(theirs)) for theirs, ours in pairs]  # below 0: the challenger is faster
    mean = fmean(ratios)
    width = policy.confidence * _standard_error(pairs, ratios)
    gain = 1 - exp(mean)
    uncertainty = exp(mean) * width
    doubtful = len(pairs) == 1 or gain < 2 * uncertainty
    return Comparison(_verdict(pairs, gain, uncertainty, policy), gain, uncertainty, doubtful)


def in_words(found: Comparison, pairs: Pairs) -> str:
    """The result of a comparison that is over."""
    if found.verdict == "faster":  # or more faithful, and not much slower
        ratio = median(s for theirs, _ in pairs for s in theirs) / median(s for _, ours in pairs for s in ours)
        return f"{ratio:.2f}× as fast"
    steps_run = sum(len(ours) for _, ours in pairs)
    return f"{'slower' if found.gain < 0 else 'not clearly faster'}, given up after {steps_run} steps"


def step_noise(blocks: Sequence[BlockOfSteps]) -> float:
    """How much steps of a block differ, as a share of the step time; robust against single slow steps."""
    gaps = []
    for block in blocks:
        middle = log(median(block))
        apart = sorted(abs(log(seconds) - middle) for seconds in block)
        gaps += apart[len(block) % 2 :]  # in a block of odd length one step is the median itself
    return max(NOISE_FLOOR, GAP_TO_DEVIATION * median(gaps)) if gaps else NOISE_FLOOR


def _verdict(pairs: Pairs, gain: float, uncertainty: float, policy: TuningPolicy) -> Verdict:
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


def _standard_error(pairs: Pairs, ratios: Sequence[float]) -> float:
    """Of the mean ratio: from the noise within blocks, or between pairs if that is larger."""
    blocks = [block for pair in pairs for block in pair]
    differences = sum(len(block) - 1 for block in blocks)
    noise = step_noise(blocks) * (1 + FEW_STEPS_PENALTY / max(1, differences))
    within = sqrt(sum(1 / len(theirs) + 1 / len(ours) for theirs, ours in pairs)) / len(pairs)
    between = 0.0
    if len(ratios) > 1:
        between = stdev(ratios) / sqrt(len(ratios)) * (1 + FEW_PAIRS_PENALTY / (len(ratios) - 1))
    return max(MEDIAN_PENALTY * noise * within, between)


# When to search again.


def drift(
    usual: Sequence[BlockOfSteps], recent: Sequence[BlockOfSteps], policy: TuningPolicy
) -> tuple[float, float] | None:
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
