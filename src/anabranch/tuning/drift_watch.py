"""DriftWatch: whether steps take longer or shorter than they did when a layout was chosen."""

from anabranch.observe.step_timer import StepTimer
from anabranch.tuning.comparison import drift
from anabranch.tuning.policy import TuningPolicy

USUAL_WINDOWS, RECENT_WINDOWS = 5, 2  # a drift is a difference between the first windows and the last ones


class DriftWatch:
    """Looks at the step times of one layout, a window of steps at a time."""

    def __init__(self, timer: StepTimer, policy: TuningPolicy) -> None:
        self.windows_seen = 0
        self._timer = timer
        self._policy = policy
        self._windows: list[tuple[float, ...]] = []  # seconds of steps: the first ones and the last ones

    def look(self) -> tuple[float, float] | None:
        """Take the last steps as the next window; the step time before and now, if it has drifted, else None."""
        clock = self._timer.clock
        marks = self._timer.last_steps(self._policy.drift_check_steps)
        settled = [step for step in marks if clock.settled(step.averaged)]
        self._windows.append(tuple(clock.elapsed_s(step.forward, step.averaged) for step in settled))
        del self._windows[USUAL_WINDOWS:-RECENT_WINDOWS]
        self.windows_seen += 1
        return drift(self._windows[:-RECENT_WINDOWS], self._windows[-RECENT_WINDOWS:], self._policy)
