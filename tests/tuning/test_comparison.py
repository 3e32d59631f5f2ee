"""The sequential test: quick where the difference is plain, patient where it is not, and hardly ever wrong."""

import random
from dataclasses import replace

import pytest

from anabranch.tuning.comparison import NOISE_FLOOR, Block, compare, drift, step_noise
from anabranch.tuning.policy import DEFAULT_POLICY

QUIET = [(1.00, 1.01, 0.99), (1.01, 1.00, 1.00), (0.99, 1.00, 1.01), (1.00, 0.99, 1.01), (1.01, 1.00, 0.99)]


def times(block: Block, factor: float) -> Block:
    return tuple(factor * seconds for seconds in block)


def pairs(factor: float, count: int) -> list[tuple[Block, Block]]:
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
    seen: list[tuple[Block, Block]] = []
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

    def block() -> Block:
        nonlocal busy
        seconds = []
        for _ in range(4):
            busy = busy != (chance.random() < 0.1)
            seconds.append((1.5 if busy else 1.0) * chance.lognormvariate(0, 0.05))
        return tuple(seconds[1:])

    won: list[bool] = []  # whether doubtful
    for _ in range(1000):
        seen: list[tuple[Block, Block]] = []
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
