"""What a layout is predicted to save, compared with the best so far, and what it loses."""

from math import inf

from anabranch.tuning.candidates import prediction_s
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.trial import Trial
from anabranch.values.kinds.fidelity import error_of_plan
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace


def simulated_gain(trace: Trace, plan: Plan | None, best: Plan | None, network: Network) -> float:
    """The share of the best layout's simulated step that this one saves: live steps cannot disturb it."""
    predicted_s = prediction_s(trace, plan, network)
    best_s = prediction_s(trace, best, network)
    return inf if predicted_s is None or best_s is None else 1 - predicted_s / best_s


def expected_gain(trace: Trace, plan: Plan | None, best: Trial, network: Network, policy: TuningPolicy) -> float:
    """The share of the step time that this layout is predicted to save, compared with the best so far."""
    predicted_s = prediction_s(trace, plan, network)
    best_s = prediction_s(trace, best.plan, network)
    if predicted_s is None or best_s is None:
        return inf
    if plan is None:  # never slower than DDP: its own buckets are tried even where they are predicted to be close
        return policy.max_drift + 1 - predicted_s / best_s
    # Messages in live steps cost more than measured ones until a trial has shown by how much.
    reference_s = best_s if any(name.startswith("refined") for name in network.meta) else max(best_s, best.step_s)
    return 1 - predicted_s / reference_s


def error_of_layout(trace: Trace, plan: Plan | None) -> float:
    """How lossy a layout is; the layout's own buckets are exact."""
    return 0.0 if plan is None else error_of_plan(trace, plan)
