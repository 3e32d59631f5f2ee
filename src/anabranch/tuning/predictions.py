"""Predictions: how long a step of one layout takes, given a trace and a network."""

from dataclasses import replace

from anabranch import planning as planners
from anabranch.planning.simulator import finish_s
from anabranch.values.errors import NetworkError
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

OF_RECORDED = "computing_of_recorded"  # a key of a trace's meta
LEAST_SHARE = 0.01  # of recorded computing; less, as a file may say, is not believed
MIN_STRETCH = 0.02  # share of computing by which it must take longer than recorded: less is noise


def prediction_s(trace: Trace | None, plan: Plan | None, network: Network | None) -> float | None:
    """As ``predicted_s``; None if the network has no cost for a kind, or the trace no gradient, that a plan names.

    The trace has no gradient of a parameter that was frozen before it was recorded, under a plan that was given.
    """
    if trace is None or network is None:
        return None
    names = {tensor.name for tensor in trace.tensors}
    if plan is not None and any(name not in names for bucket in plan.buckets for name in bucket.names):
        return None
    try:
        return predicted_s(trace, plan, network)
    except NetworkError:
        return None


def predicted_s(trace: Trace, plan: Plan | None, network: Network) -> float:
    """Predicted time from the start of forward to averaged gradients; without a plan, under DDP's own buckets.

    The trace was recorded under those, so that what their messages delay is in it already.
    """
    if plan is None:
        trace = as_recorded(trace)
        plan, network = planners.by_bytes(trace, network), replace(network, delays={})
    return trace.forward_s + finish_s(trace, plan, network)


def computed_faster(trace: Trace, plan: Plan | None, computing_s: float, before_s: float) -> Trace:
    """``trace`` with computing that takes ``computing_s``, as it did under ``plan``, if that is less than recorded.

    Traces are recorded under DDP's own buckets, or in later searches under the layout in force. Sending less, or less
    at once, leaves more of a GPU to the model. ``before_s`` is what the slowest rank then computed. A trace has the
    latest rank at each gradient, which adds up to more where ranks differ, and no plan has made that difference.
    """
    recorded_s = trace.forward_s + trace.backward_s
    if plan is None or not 0 < computing_s < (1 - MIN_STRETCH) * min(recorded_s, before_s):
        return trace
    share = computing_s / recorded_s
    return replace(trace.scaled(share), meta={**trace.meta, OF_RECORDED: share * share_of_recorded(trace)})


def share_of_recorded(trace: Trace) -> float:
    """How long computing takes in this trace, as a share of what was recorded; 1 if it is as recorded."""
    share = trace.meta.get(OF_RECORDED)
    return share if isinstance(share, float) and LEAST_SHARE < share < 1 else 1.0


def as_recorded(trace: Trace) -> Trace:
    """The trace as it was before ``computed_faster``: what it is under DDP's own buckets."""
    return trace if (share := share_of_recorded(trace)) == 1.0 else trace.scaled(1 / share)
