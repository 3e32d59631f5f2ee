"""TuningPolicy: the constants of a tuner's decisions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TuningPolicy:
    """When a tuner tries, keeps and drops a plan. The defaults suit training; tests pass others.

    settle_steps         steps to wait after a change of layout: DDP rebuilds in the second, and caches warm up
    detailed_steps       steps of each trial, at its end, in which every bucket is timed
    min_gain             share of the step time by which a plan must beat DDP to be kept: less is noise
    lanes_min_gain       least predicted gain, as a share of the step time, for which a second lane is tried
    drift_check_steps    steps between two checks of rank 0 whether to plan again
    max_drift            share by which the step time may change before rank 0 plans again
    late_gradients       warn if the first gradient is ready later than this share of backward: nothing can overlap then
    """

    settle_steps: int = 3
    detailed_steps: int = 3
    min_gain: float = 0.01
    lanes_min_gain: float = 0.02
    drift_check_steps: int = 20
    max_drift: float = 0.10
    late_gradients: float = 0.9


DEFAULT_POLICY = TuningPolicy()
