"""Estimates of the time left while a benchmark runs, in a line now and then."""

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic

FIRST_LINE_S = 5.0
INTERVAL_S = 15.0  # between two lines

# The length of a search in units of the steps before its first trial. How long it really is depends on how many layouts
# are predicted to gain, and on the noise of steps.
USUAL_TRIALS, MOST_TRIALS = 6, 9

FEWEST_STEPS = 3  # say how long a step takes: the first one may compile the model

Say = Callable[[str], None]
Clock = Callable[[], float]


class SearchProgress:
    """The progress of one DataParallel that profiles, plans, tries and chooses; ``step_done`` after every step.

    It says at most one line per ``INTERVAL_S``: the median step so far, times the number of steps that a search usually
    has left; and ``chosen`` says what it took. ``trial_steps`` is the length of a trial with the steps in which its
    layout settles.
    """

    def __init__(self, name: str, trial_steps: int, say: Say, clock: Clock = monotonic) -> None:
        self._name = name
        self._trial_steps = trial_steps
        self._say = say
        self._clock = clock
        self._steps_s: list[float] = []
        self._last_step_at_s = self._begun_s = clock()
        self._next_line_at_s = self._last_step_at_s + FIRST_LINE_S

    def step_done(self) -> None:
        """Count a step, and say how long the search will still take if the last line is old enough."""
        now_s = self._clock()
        self._steps_s.append(now_s - self._last_step_at_s)
        self._last_step_at_s = now_s
        if now_s >= self._next_line_at_s:
            self._next_line_at_s = now_s + INTERVAL_S
            self._say(f"{self._name}: {self._line()}")

    def chosen(self, step_s: float, compile_s: Sequence[float] = ()) -> None:
        """Say the chosen layout's step, and what the search took; ``compile_s``: the steps in which torch compiled."""
        took_s, count = self._last_step_at_s - self._begun_s, len(self._steps_s)
        compiling = f", of which {' + '.join(f'{each_s:.1f}' for each_s in compile_s)} s compiling" if compile_s else ""
        self._say(f"{self._name}: {step_s * 1e3:.1f} ms a step, chosen in {took_s:.1f} s and {count} steps{compiling}")

    def _line(self) -> str:
        done, step_s = len(self._steps_s), median(self._steps_s)
        usual, most = USUAL_TRIALS * self._trial_steps, MOST_TRIALS * self._trial_steps
        if done < FEWEST_STEPS:
            return f"choosing, step {done} of about {usual}"
        if done < usual:
            return f"choosing, step {done} of about {usual}; {time_left(step_s * (usual - done))}"
        if done < most:
            return f"choosing, step {done}, more than usual; at most {time_left(step_s * (most - done))}"
        return f"choosing, step {done}, far more than usual; the time left is not known"


class RaceProgress:
    """The progress of a race of ``rounds`` rounds; ``turn_done`` after every contestant's turn.

    It says a line per contestant in the first round, and then a line per round with everyone's median step so far: what
    was measured is not lost if the race is ended early.
    """

    def __init__(self, name: str, contestants: int, rounds: int, say: Say, clock: Clock = monotonic) -> None:
        self._name = name
        self._contestants = contestants
        self._rounds = rounds
        self._say = say
        self._clock = clock
        self._begun_s = clock()
        self._turns: dict[str, list[float]] = {}  # seconds of a step by contestant

    def turn_done(self, contestant: str, step_s: float) -> None:
        """Count a turn, and say how long the rest of the race will take if a line is due."""
        self._turns.setdefault(contestant, []).append(step_s)
        turns = sum(map(len, self._turns.values()))
        left = self._contestants * self._rounds - turns
        left_s = (self._clock() - self._begun_s) / turns * left
        number, place = divmod(turns - 1, self._contestants)
        if not number:
            what = f", {place + 1} of {self._contestants} contestants, {contestant}: {step_s * 1e3:.1f} ms a step"
        elif place == self._contestants - 1:
            steps = [f"{name} {median(turns_s) * 1e3:.1f}" for name, turns_s in self._turns.items()]
            what = f": {'; '.join(steps)} ms a step"
        else:
            return
        self._say(f"{self._name}: round {number + 1} of {self._rounds}{what}; {time_left(left_s)}")


def time_left(left_s: float) -> str:
    """about 40 s left; in minutes where it is long."""
    return f"about {left_s:.0f} s left" if left_s < 120 else f"about {left_s / 60:.0f} min left"
