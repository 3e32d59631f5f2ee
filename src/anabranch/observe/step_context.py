"""StepContext: what observers may know about a step besides its marks."""

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.values.plan import Plan


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step that is running, or that ends now.

    number            the first step of a training is 1; with a loaded ``comm_state_dict`` counting continues
    plan              the plan that this step runs; None under DDP's own buckets
    stage             what the tuner is doing, in words
    predicted_s       the simulator's prediction for this plan; None before there is a trace and a network
    communication_s   communication time in a trial of this plan; None if there was none
    """

    number: int
    plan: Plan | None
    stage: str
    predicted_s: float | None
    communication_s: float | None


CurrentStep = Callable[[], StepContext]
