"""TuningPolicy: the constants of a tuner's decisions; SearchBudget: what searching has cost, and what it may cost."""

from dataclasses import dataclass, fields

MIN_FIRST_SEARCH_S = 0.3  # a search that measures the network cannot cost much less, however short steps are


@dataclass(frozen=True, slots=True)
class TuningPolicy:
    """When a tuner tries, keeps and drops a plan, and what that may cost. The defaults suit training.

    warmup_steps         steps of training before anything is timed: DDP rebuilds in the second, and caches warm up
    settle_steps         steps that do not count after a change of buckets
    trial_steps          steps of one block: a plan and the layout in force run in turns, a block each
    max_pairs            pairs of blocks after which a plan that is not clearly faster is given up
    min_gain             share of the step time by which a plan must beat the layout in force: less is not worth it
    min_predicted_gain   predicted gain below which nothing is measured or tried
    lanes_min_gain       the same for a second lane
    obvious_gain         gain that one pair of blocks shows well enough, if every step of the plan was faster
    confidence           standard errors by which a gain must differ from zero, and a drift from noise
    first_search_steps   what the first search may cost, in steps of training; at least 0.3 s
    max_search_steps     steps after which a search tries no more plans; graphs are still compiled for the best one
    search_share         what all searching may cost once training has been long enough, as a share of training so far
    drift_check_steps    steps between two checks of rank 0 whether to plan again
    max_drift            share by which the step time may change, beyond its noise, before rank 0 plans again
    cut_share            what a cut of a compiled graph is taken to cost, as a share of a step, before it is measured;
                         on ResNet-50 (H200, float32) it was 1.2 %
    recompilations       how often a compiled model may be compiled once more after planning, to try other cuts
    late_gradients       warn if the first gradient is ready later than this share of backward: nothing can overlap then
    """

    warmup_steps: int = 3
    settle_steps: int = 1
    trial_steps: int = 3
    max_pairs: int = 5
    min_gain: float = 0.01
    min_predicted_gain: float = 0.02
    lanes_min_gain: float = 0.02
    obvious_gain: float = 0.25
    confidence: float = 3.0
    first_search_steps: int = 30
    max_search_steps: int = 1000
    search_share: float = 0.01
    drift_check_steps: int = 20
    max_drift: float = 0.10
    cut_share: float = 0.01
    recompilations: int = 1
    late_gradients: float = 0.9

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = 0 if name == "recompilations" else 1
            if field.type is int and (not isinstance(value, int) or value < least):
                raise ValueError(f"TuningPolicy {name} is {value!r}: expected a whole number, at least {least}")
            if field.type is float and (not isinstance(value, int | float) or value != value):
                raise ValueError(f"TuningPolicy {name} is {value!r}: expected a share, such as 0.01 for 1 %")
        if self.confidence < 0:
            raise ValueError(
                f"TuningPolicy confidence is {self.confidence!r}: expected a number from 0 on, such as 3.0"
            )


DEFAULT_POLICY = TuningPolicy()


def check_policy(policy: object) -> None:
    """ValueError unless ``DataParallel(policy=...)`` can take this."""
    if not isinstance(policy, TuningPolicy):
        raise ValueError(
            f"policy is a {type(policy).__name__}: expected a TuningPolicy, such as TuningPolicy(min_gain=0.02)"
        )


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
    def searching_s(self) -> float:
        """What searching has cost, set-up apart."""
        return self.spent_s - self.set_up_s

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
