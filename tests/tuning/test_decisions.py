"""What to do next, from what was tried. The sequential test is quick where the difference is plain, patient where it is
not, and hardly ever wrong."""

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from anabranch import Bucket, Curve, Network, Plan, TensorSpec, Trace
from anabranch.tuning.decisions import (
    NOISE_FLOOR,
    BlockOfSteps,
    Tried,
    Verb,
    allowed_loss,
    compare,
    drift,
    judge,
    most_gain,
    next_action,
    step_noise,
    terms,
)
from anabranch.tuning.options import DEFAULT_POLICY
from anabranch.tuning.trial import PRICE_OF_FIDELITY, StepTimes, Trial

QUIET = [(1.00, 1.01, 0.99), (1.01, 1.00, 1.00), (0.99, 1.00, 1.01), (1.00, 0.99, 1.01), (1.01, 1.00, 0.99)]


def times(block: BlockOfSteps, factor: float) -> BlockOfSteps:
    return tuple(factor * seconds for seconds in block)


def pairs(factor: float, count: int) -> list[tuple[BlockOfSteps, BlockOfSteps]]:
    return [(block, times(block, factor)) for block in QUIET[:count]]


@pytest.mark.parametrize(
    ("factor", "count", "verdict"),
    [
        (2.3, 1, "not faster"),  # given up after three steps
        (1.1, 1, "not faster"),
        (0.3, 1, "faster"),
        (0.9, 1, "undecided"),  # one pair shows only what is obvious
        (0.9, 2, "faster"),
        (1.0, 1, "undecided"),
        (1.0, 2, "not faster"),  # nothing in two pairs
        (0.985, 2, "undecided"),
        (0.98, 5, "faster"),
        (0.985, 5, "not faster"),  # not clear after the last pair
    ],
)
def test_verdicts_on_a_quiet_machine(factor: float, count: int, verdict: str) -> None:
    found = compare(pairs(factor, count), DEFAULT_POLICY)
    assert found.verdict == verdict
    assert found.gain == pytest.approx(1 - factor)


def test_an_obvious_gain_needs_every_step_to_be_faster() -> None:
    assert compare([((1.0, 1.0, 1.0), (0.5, 0.5, 0.9))], DEFAULT_POLICY).verdict == "faster"
    assert compare([((1.0, 1.0, 1.0), (0.5, 0.5, 1.1))], DEFAULT_POLICY).verdict == "undecided"


def test_a_single_slow_step_changes_nothing() -> None:
    slow = [((1.0, 1.01, 9.0), (0.9, 0.91, 0.9)), ((1.01, 1.0, 1.0), (0.9, 7.0, 0.91))]
    found = compare(slow, DEFAULT_POLICY)
    assert found.verdict == "faster" and found.gain == pytest.approx(0.1, abs=0.02)


def test_pairs_that_contradict_each_other_decide_nothing() -> None:
    """A machine that slows down and recovers: within blocks all is quiet, between pairs nothing is."""
    other = [((2.0, 2.0, 2.0), (1.0, 1.0, 1.0)), ((1.0, 1.0, 1.0), (1.4, 1.4, 1.4))]
    found = compare(other, replace(DEFAULT_POLICY, obvious_gain=0.9))
    assert found.verdict == "undecided" and found.uncertainty > found.gain > 0


def decided(chance: random.Random, factor: float, noise: float) -> tuple[str, int]:
    """Run the test to its end on simulated steps, with noise of single steps and of whole pairs."""
    seen: list[tuple[BlockOfSteps, BlockOfSteps]] = []
    while True:
        common = chance.lognormvariate(0, noise)
        seen.append((
            tuple(common * chance.lognormvariate(0, noise) for _ in range(3)),
            tuple(common * factor * chance.lognormvariate(0, noise) for _ in range(3)),
        ))  # fmt: skip
        verdict = compare(seen, DEFAULT_POLICY).verdict
        if verdict != "undecided":
            return verdict, len(seen)


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.3])
def test_a_layout_that_gains_nothing_is_hardly_ever_kept(noise: float) -> None:
    chance = random.Random(1)
    outcomes = [decided(chance, 1.0, noise) for _ in range(2000)]
    assert sum(verdict == "faster" for verdict, _ in outcomes) / len(outcomes) < 0.02
    assert sum(count for _, count in outcomes) / len(outcomes) < 3.5, "and few pairs are spent on it"


def test_what_bursts_of_other_programs_win_is_doubtful() -> None:
    """Steps take half as long again while another program runs, for about ten steps at a time."""
    chance = random.Random(5)
    busy = False

    def block() -> BlockOfSteps:
        nonlocal busy
        seconds = []
        for _ in range(4):
            busy = busy != (chance.random() < 0.1)
            seconds.append((1.5 if busy else 1.0) * chance.lognormvariate(0, 0.05))
        return tuple(seconds[1:])

    won: list[bool] = []  # whether doubtful
    for _ in range(1000):
        seen: list[tuple[BlockOfSteps, BlockOfSteps]] = []
        while True:
            blocks = block(), block()
            seen.append(blocks if len(seen) % 2 == 0 else (blocks[1], blocks[0]))
            found = compare(seen, DEFAULT_POLICY)
            if found.verdict == "undecided":
                continue
            if found.verdict == "faster":
                won.append(found.doubtful)
            break
    assert len(won) < 100 and won.count(False) < 10, "a doubtful win is no win before it is repeated"


@pytest.mark.parametrize(("factor", "noise", "share"), [(0.9, 0.01, 0.99), (0.95, 0.01, 0.9), (0.5, 0.1, 0.95)])
def test_a_real_gain_is_found(factor: float, noise: float, share: float) -> None:
    chance = random.Random(2)
    outcomes = [decided(chance, factor, noise)[0] for _ in range(500)]
    assert outcomes.count("faster") / len(outcomes) > share


def test_noise_is_robust_and_never_zero() -> None:
    assert step_noise([]) == step_noise([(1.0,)]) == step_noise([(1.0, 1.0, 1.0)]) == NOISE_FLOOR
    chance = random.Random(3)
    blocks = [tuple(chance.lognormvariate(0, 0.1) for _ in range(3)) for _ in range(400)]
    assert step_noise(blocks) == pytest.approx(0.1, rel=0.2)
    assert step_noise([*blocks, *[(1.0, 1.0, 50.0)] * 40]) == pytest.approx(0.1, rel=0.3)


WINDOW = tuple(1.0 + 0.01 * (i % 5) for i in range(20))


def test_a_drift_is_more_than_the_limit_in_both_last_windows() -> None:
    usual, slow = [WINDOW] * 3, times(WINDOW, 1.3)
    found = drift(usual, [slow, slow], DEFAULT_POLICY)
    assert found == pytest.approx((1.02, 1.02 * 1.3))
    assert drift(usual, [times(WINDOW, 0.7)] * 2, DEFAULT_POLICY) is not None
    assert drift(usual, [slow, WINDOW], DEFAULT_POLICY) is None, "it is over"
    assert drift(usual, [slow, times(WINDOW, 0.7)], DEFAULT_POLICY) is None
    assert drift(usual, [times(WINDOW, 1.05)] * 2, DEFAULT_POLICY) is None
    assert drift([], [slow], DEFAULT_POLICY) is None and drift([()], [slow], DEFAULT_POLICY) is None


def test_a_drift_within_the_noise_is_none() -> None:
    chance = random.Random(4)
    windows = [tuple(chance.lognormvariate(0, 0.5) for _ in range(20)) for _ in range(7)]
    assert drift(windows[:5], [times(window, 1.3) for window in windows[5:]], DEFAULT_POLICY) is None
    assert drift(windows[:5], [times(window, 4.0) for window in windows[5:]], DEFAULT_POLICY) is not None


SLOW = (0.100, 0.101, 0.102)


@pytest.mark.parametrize(("share", "in_doubt"), [(0.95, "faster"), (1.0, "faster"), (1.1, "not faster")])
def test_a_challenger_that_is_to_stay_in_doubt_must_look_slower_to_lose(share: float, in_doubt: str) -> None:
    ours = times(SLOW, share)
    loud = [(SLOW, times(ours, 1.2 if number % 2 else 0.8)) for number in range(4)]  # after as many as there may be
    assert judge([*loud, (SLOW, ours)], DEFAULT_POLICY).verdict == "not faster"
    assert judge([*loud, (SLOW, ours)], DEFAULT_POLICY, in_doubt=True).verdict == in_doubt


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.0, "not faster")])
def test_a_comparison_that_must_end_takes_what_is_likelier(factor: float, verdict: str) -> None:
    pair = pairs(factor, 1)
    assert judge(pair, DEFAULT_POLICY).verdict == "undecided"
    assert judge(pair, DEFAULT_POLICY, end_now=True).verdict == verdict
    assert judge(pairs(0.995, 1), replace(DEFAULT_POLICY, min_gain=-0.01), end_now=True).verdict == "faster"


# ------------------------------------------------------------------------------------------- what a search does next

TRACE = Trace(tuple(TensorSpec(f"t{i}", 1 << 16, 4, 1e-3 * (i + 1), "float32") for i in range(8)), 5e-3)
NETWORK = Network(4, {"dense": Curve.linear(1e-4, 5e-9), "int8": Curve.linear(1e-4, 1.3e-9)})
NAMES = tuple(tensor.name for tensor in TRACE.tensors)
ONE = Plan((Bucket(NAMES),))
TWO = Plan((Bucket(NAMES[:4]), Bucket(NAMES[4:])))
INT8 = Plan((Bucket(NAMES[:4], collective="int8"), Bucket(NAMES[4:], collective="int8")))


def trial(step_s: float, plan: Plan | None, exposed_s: float = 0.01) -> Trial:
    return Trial("", plan, (StepTimes(step_s, exposed_s, step_s),))


OWN = trial(0.1, None)


def tried(*candidates: Plan | None, **changes: Any) -> Tried:
    """A search that began with the layout's own buckets, and now has these candidates."""
    usual = Tried(TRACE, NETWORK, OWN, [OWN], [("", plan) for plan in candidates], Verb.PLAN, False, False, 1.0, False)
    return replace(usual, **changes)


def test_a_search_plans_on_one_lane_calibrates_plans_on_several_and_once_more() -> None:
    verbs, state = [Verb.START], tried(done=Verb.START, changed=True)
    while verbs[-1] != Verb.STOP:
        verbs.append(Verb(next_action(replace(state, done=verbs[-1]), DEFAULT_POLICY)))
    assert verbs == sorted(set(Verb) - {Verb.TRY})
    assert next_action(tried(done=Verb.CALIBRATE_CONTENTION), DEFAULT_POLICY) == Verb.STOP, "nothing has changed"


def test_a_search_that_is_over_or_has_failed_calibrates_and_plans_no_more() -> None:
    for state in (tried(TWO, is_over=True, changed=True), tried(failed=True, changed=True)):
        verbs = [Verb.START]
        while verbs[-1] != Verb.STOP:
            verbs.append(Verb(next_action(replace(state, done=verbs[-1]), DEFAULT_POLICY)))
        assert verbs == [Verb.START, Verb.CALIBRATE_COSTS, Verb.CALIBRATE_CONTENTION, Verb.STOP]


def test_the_first_candidate_that_is_worth_it_is_tried() -> None:
    assert next_action(tried(TWO, INT8), DEFAULT_POLICY) == Verb.TRY
    best = trial(0.019, TWO)  # about as fast as it is predicted to be
    seen = tried(TWO, ONE, INT8, best=best, trials=[OWN, best])
    assert next_action(seen, DEFAULT_POLICY) == Verb.TRY + 2, "one was tried, one is predicted to be slower"
    assert next_action(replace(seen, candidates=seen.candidates[:2]), DEFAULT_POLICY) == Verb.CALIBRATE_CONTENTION


def test_without_budget_only_an_obvious_gain_is_tried() -> None:
    quick = trial(0.0215, None)  # of which a plan is predicted to save a little
    for left_s, verb in ((1.0, Verb.TRY), (-1.0, Verb.CALIBRATE_CONTENTION)):
        assert next_action(tried(TWO, best=quick, trials=[quick], left_s=left_s), DEFAULT_POLICY) == verb
    assert next_action(tried(TWO, left_s=-1.0), DEFAULT_POLICY) == Verb.TRY


def test_the_layouts_own_buckets_are_tried_even_where_they_are_predicted_to_be_close() -> None:
    best = trial(0.01, INT8)
    again = tried(None, best=best, trials=[best], done=Verb.START)
    assert terms(again, None, DEFAULT_POLICY).simulated < 0
    assert next_action(again, replace(DEFAULT_POLICY, max_drift=0.5)) == Verb.TRY


def test_a_layout_that_cannot_be_predicted_is_tried() -> None:
    unknown = Plan((Bucket(NAMES, collective="bf16"),))
    assert next_action(tried(unknown), DEFAULT_POLICY) == Verb.TRY
    assert terms(tried(unknown), unknown, DEFAULT_POLICY).simulated == inf


def test_a_plan_that_is_more_faithful_may_be_a_little_slower() -> None:
    best = trial(0.0184, INT8)
    state = tried(TWO, best=best, trials=[OWN, best], network=replace(NETWORK, meta={"refined": ""}))
    equal = Network(4, dict.fromkeys(("dense", "int8"), Curve.linear(1e-4, 1.3e-9)), meta={"refined": ""})
    state = replace(state, network=equal)
    found = terms(state, TWO, DEFAULT_POLICY)
    assert found.more_faithful and found.simulated == pytest.approx(0.0, abs=1e-9)
    assert found.min_gain == pytest.approx(-PRICE_OF_FIDELITY)
    assert next_action(state, DEFAULT_POLICY) == Verb.TRY
    assert not terms(replace(state, best=trial(0.02, TWO)), INT8, DEFAULT_POLICY).more_faithful


def test_what_fidelity_may_cost_does_not_add_up_and_never_loses_to_ddp() -> None:
    own, fastest, slower = trial(0.2, None), trial(0.1, INT8), trial(0.1005, INT8)
    assert allowed_loss(fastest, [own, fastest]) == pytest.approx(-PRICE_OF_FIDELITY)
    # after one such step only the rest of it is left
    assert allowed_loss(slower, [own, fastest, slower]) == pytest.approx(1 - 0.101 / 0.1005)
    assert allowed_loss(fastest, [trial(0.1004, None), fastest]) == pytest.approx(-0.004)
    assert allowed_loss(fastest, [fastest]) == pytest.approx(-PRICE_OF_FIDELITY)


def test_no_plan_gains_more_than_what_the_layouts_own_buckets_leave_exposed() -> None:
    assert most_gain(trial(0.1, None, 0.03)) == pytest.approx(0.3)
    assert most_gain(trial(0.1, TWO, 0.03)) == inf


def test_every_action_has_a_number_that_one_byte_can_send() -> None:
    actions = [*Verb, *(Verb.TRY + number for number in range(1, 30))]
    assert len(set(actions)) == len(Verb) + 29
    assert all(0 <= action < 256 for action in actions)
