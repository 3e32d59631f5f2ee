"""A network corrected by what its messages really took while the model was computing.

A network measured on its own is too good: beside a running backward pass each message also waits for kernels to be
launched, for a busy host and for a share of the device. What a planned step took, bucket by bucket, says by how much.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anabranch.curve import Curve
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.timeline import Timeline
from anabranch.trace import Trace

FACTORS = (0.8, 2.0)  # how much slower or faster bytes may have become; beyond, something else is being seen


def bucket_seconds(timeline: Timeline) -> list[float]:
    """What each message of a one-lane timeline took from when the lane was free for it.

    On a rank that came early this includes its waiting for the others: the least over all ranks is the cost.
    """
    took, free_s = [], 0.0
    for span in sorted(timeline.communication, key=lambda span: span.start_s):
        took.append(span.end_s - max(span.start_s, free_s))
        free_s = span.end_s
    return took


def refined(network: Network, trace: Trace, plan: Plan, took_s: Sequence[float]) -> Network:
    """``network`` such that its costs fit what the buckets of ``plan`` took: factor · cost + extra seconds each."""
    nbytes = {tensor.name: tensor.nbytes for tensor in trace.tensors}
    expected = [network.seconds(b.collective, sum(nbytes[name] for name in b.names)) for b in plan.buckets]
    factor, extra_s = _fit(np.array(expected), np.array(took_s))
    curves = {kind: _scaled(curve, factor, extra_s) for kind, curve in network.curves.items()}
    note = f"costs × {factor:.2f} + {extra_s * 1e3:.3f} ms per message, from a live step of {len(plan)} buckets"
    return replace(network, curves=curves, model=None, meta={**network.meta, "refined": note})


def _fit(expected: np.ndarray, took: np.ndarray) -> tuple[float, float]:
    """The factor and the extra seconds that fit best, neither beyond what is plausible."""
    factor = 1.0
    if len(expected) >= 4 and np.ptp(expected) > expected.mean() / 2:  # else the two cannot be told apart
        factor = float(np.polyfit(expected, took, 1)[0])
    factor = min(max(factor, FACTORS[0]), FACTORS[1])
    return factor, max(0.0, float(np.median(took - factor * expected)))


def _scaled(curve: Curve, factor: float, extra_s: float) -> Curve:
    points = tuple(replace(point, seconds=factor * point.seconds + extra_s) for point in curve.points)
    return Curve(points, curve.tail_s_per_byte * factor)
