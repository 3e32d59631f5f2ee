"""Progress of a benchmark, as single lines: ranks print to pipes, where no bar can move."""

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic

INTERVAL_S = 15.0  # between two lines of a search

Say = Callable[[str], None]
Clock = Callable[[], float]


class SearchProgress:
    """The progress of one DataParallel that profiles, plans, tries and chooses; ``step_done`` after every step."""

    def __init__(self, name: str, say: Say, clock: Clock = monotonic) -> None:
        self._name, self._say, self._clock = name, say, clock
        self._begun_s = self._last_line_at_s = clock()
        self._steps = 0

    def step_done(self) -> int:
        """Count a step, say so if the last line is old enough, and return the count."""
        self._steps, now_s = self._steps + 1, self._clock()
        if now_s - self._last_line_at_s >= INTERVAL_S:
            self._last_line_at_s = now_s
            self._say(f"{self._name}: choosing, {self._steps} steps in {now_s - self._begun_s:.0f} s")
        return self._steps

    def chosen(self, step_s: float, compile_s: Sequence[float] = ()) -> None:
        """Say the chosen layout's step, and what the search took; ``compile_s``: the steps in which torch compiled."""
        took_s = self._clock() - self._begun_s
        compiling = f", of which {' + '.join(f'{each_s:.1f}' for each_s in compile_s)} s compiling" if compile_s else ""
        self._say(
            f"{self._name}: {step_s * 1e3:.1f} ms a step, chosen in {took_s:.1f} s and {self._steps} steps{compiling}"
        )


class RaceProgress:
    """The progress of a race of ``rounds`` rounds; ``turn_done`` after every contestant's turn.

    It says a line per contestant in the first round, and then a line per round with everyone's median step so far: what
    was measured is not lost if the race is ended early.
    """

    def __init__(self, name: str, contestants: int, rounds: int, say: Say, clock: Clock = monotonic) -> None:
        self._name, self._contestants, self._rounds, self._say, self._clock = name, contestants, rounds, say, clock
        self._begun_s = clock()
        self._turns: dict[str, list[float]] = {}  # seconds of a step by contestant

    def turn_done(self, contestant: str, step_s: float) -> None:
        """Count a turn, and say how long the rest of the race will take if a line is due."""
        self._turns.setdefault(contestant, []).append(step_s)
        turns = sum(map(len, self._turns.values()))
        number, place = divmod(turns - 1, self._contestants)
        if not number:
            what = f", {place + 1} of {self._contestants} contestants, {contestant}: {step_s * 1e3:.1f} ms a step"
        elif place == self._contestants - 1:
            steps = [f"{name} {median(turns_s) * 1e3:.1f}" for name, turns_s in self._turns.items()]
            what = f": {'; '.join(steps)} ms a step"
        else:
            return
        left_s = (self._clock() - self._begun_s) / turns * (self._contestants * self._rounds - turns)
        self._say(f"{self._name}: round {number + 1} of {self._rounds}{what}; about {left_s:.0f} s left")
