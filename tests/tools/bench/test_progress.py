"""Lines of progress: rare, and with the time that is left of a race."""

from collections.abc import Callable

from anabranch.tools.bench.progress import INTERVAL_S, RaceProgress, SearchProgress


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def searched(steps: int, step_s: Callable[[int], float]) -> list[tuple[float, str]]:
    """The lines of a search of this many steps, with when they were said."""
    clock = FakeClock()
    lines: list[tuple[float, str]] = []
    progress = SearchProgress("resnet50", lambda line: lines.append((clock.now_s, line)), clock)
    for step in range(steps):
        clock.now_s += step_s(step)
        progress.step_done()
    return lines


def test_a_search_says_how_many_steps_it_has_run() -> None:
    lines = [line for _, line in searched(40, lambda step: 20.0 if step == 3 else 0.5)]
    assert lines == [
        "resnet50: choosing, 4 steps in 22 s",
        "resnet50: choosing, 34 steps in 36 s",
    ]


def test_lines_are_rare() -> None:
    instants = [at_s for at_s, _ in searched(4000, lambda step: 0.01)]
    assert len(instants) == 2 and instants[1] - instants[0] >= INTERVAL_S
    assert searched(100, lambda step: 0.01) == []  # over before anyone would ask


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
    progress = SearchProgress("resnet50, DataParallel", lines.append, clock)
    for step_s in (1.5, 0.25, 1.0):
        clock.now_s += step_s
        progress.step_done()
    progress.chosen(0.25)
    progress.chosen(0.25, [1.5, 1.0])
    assert lines == [
        "resnet50, DataParallel: 250.0 ms a step, chosen in 2.8 s and 3 steps",
        "resnet50, DataParallel: 250.0 ms a step, chosen in 2.8 s and 3 steps, of which 1.5 + 1.0 s compiling",
    ]
