"""SearchBudget: what searching for a plan has cost, and what it may cost."""

from dataclasses import dataclass

from anabranch.tuning.policy import TuningPolicy

MIN_FIRST_SEARCH_S = 0.3  # a search that measures the network cannot cost much less, however short steps are


@dataclass(slots=True)
class SearchBudget:
    """The account of one tuner. Every rank keeps one, and rank 0's decides.

    A search costs the pauses in which ranks measure or agree, changes of buckets, and what its steps take longer than
    those of the layout in force.
    """

    policy: TuningPolicy
    spent_s: float = 0.0
    trained_s: float = 0.0  # wall-clock time since the first step
    step_s: float = 0.0  # of the layout that was profiled first
    set_up_s: float = 0.0  # part of ``spent_s`` that is not held against the search: any use has to pay it once

    def charge(self, seconds: float) -> None:
        """Count a cost; a negative one counts as none, so that a fast trial does not pay for a slow one."""
        self.spent_s += max(0.0, seconds)

    @property
    def allowed_s(self) -> float:
        """What all searching may have cost until now: a share of training so far, or a first search if that is more."""
        first_s = max(self.policy.first_search_steps * self.step_s, MIN_FIRST_SEARCH_S)
        return max(first_s, self.policy.search_share * self.trained_s) + self.set_up_s

    @property
    def left_s(self) -> float:
        """What searching may still cost now."""
        return self.allowed_s - self.spent_s

    def summary(self) -> str:
        """A sentence for ``explain()``."""
        share = self.spent_s / self.trained_s if self.trained_s > 0 else 0.0
        return (
            f"Searching has cost {self.spent_s:.2f} s, {share:.1%} of training so far; allowed are "
            f"{self.allowed_s:.2f} s."
        )
