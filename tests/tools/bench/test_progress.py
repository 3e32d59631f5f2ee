"""Estimates of the time left: from the step times seen, rarely, and honest when a search takes longer."""

from collections.abc import Callable

from anabranch.tools.bench.progress import (
    INTERVAL_S,
    MOST_TRIALS,
    USUAL_TRIALS,
    RaceProgress,
    SearchProgress,
    time_left,
)


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def searched(steps: int, step_s: Callable[[int], float], trial_steps: int = 13) -> list[tuple[float, str]]:
    """The lines of a search of so many steps, with when they were said."""
    clock = FakeClock()
    lines: list[tuple[float, str]] = []
    progress = SearchProgress("resnet50", trial_steps, lambda line: lines.append((clock.now_s, line)), clock)
    for step in range(steps):
        clock.now_s += step_s(step)
        progress.step_done()
    return lines


def test_the_time_left_follows_from_the_median_step_and_the_usual_number_of_steps() -> None:
    usual = USUAL_TRIALS * 13
    # One long step, as when the network is measured, does not change what the other steps will take.
    lines = searched(40, lambda step: 20.0 if step == 3 else 0.5)
    assert lines[0][1] == f"resnet50: choosing, step 4 of about {usual}; about {0.5 * (usual - 4):.0f} s left"
    assert lines[1][1] == f"resnet50: choosing, step 34 of about {usual}; about {0.5 * (usual - 34):.0f} s left"
    assert len(lines) == 2


def test_a_first_step_that_compiles_says_nothing_about_the_others() -> None:
    lines = searched(30, lambda step: 60.0 if step == 0 else 0.6)
    assert lines[0][1] == f"resnet50: choosing, step 1 of about {USUAL_TRIALS * 13}"
    assert lines[1][1].endswith(f"{time_left(0.6 * (USUAL_TRIALS * 13 - 26))}")


def test_lines_are_rare() -> None:
    lines = searched(2500, lambda step: 0.01)
    instants = [at_s for at_s, _ in lines]
    assert len(lines) == 2 and instants[1] - instants[0] >= INTERVAL_S
    assert searched(100, lambda step: 0.01) == []  # over before anyone would ask


def test_a_search_that_takes_longer_says_so() -> None:
    lines = [line for _, line in searched(MOST_TRIALS * 13 + 60, lambda step: 1.0)]
    longer = [line for line in lines if "more than usual; at most about" in line]
    assert longer and lines[-1].endswith("far more than usual; the time left is not known")


def test_a_race_has_a_line_per_contestant_and_then_per_round() -> None:
    clock = FakeClock()
    lines: list[str] = []
    progress = RaceProgress("resnet50", 2, 3, lines.append, clock)
    for turn in range(6):
        clock.now_s += 10.0
        progress.turn_done("AB"[turn % 2], 0.25)
    assert lines == [
        "resnet50: round 1 of 3, 1 of 2 contestants, A: 250.0 ms a step; about 50 s left",
        "resnet50: round 1 of 3, 2 of 2 contestants, B: 250.0 ms a step; about 40 s left",
        "resnet50: round 2 of 3: A 250.0; B 250.0 ms a step; about 20 s left",
        "resnet50: round 3 of 3: A 250.0; B 250.0 ms a step; about 0 s left",
    ]


def test_a_search_says_what_it_took() -> None:
    clock = FakeClock()
    lines: list[str] = []
    progress = SearchProgress("resnet50, DataParallel", 13, lines.append, clock)
    for step_s in (1.5, 0.25, 1.0):
        clock.now_s += step_s
        progress.step_done()
    progress.chosen(0.25)
    progress.chosen(0.25, [1.5, 1.0])
    assert lines == [
        "resnet50, DataParallel: 250.0 ms a step, chosen in 2.8 s and 3 steps",
        "resnet50, DataParallel: 250.0 ms a step, chosen in 2.8 s and 3 steps, of which 1.5 + 1.0 s compiling",
    ]


def test_long_times_are_in_minutes() -> None:
    assert time_left(119.4) == "about 119 s left" and time_left(600.0) == "about 10 min left"
