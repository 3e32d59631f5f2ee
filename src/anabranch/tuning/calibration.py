"""A network corrected by what its messages really took while the model was computing.

A network measured on its own is not the one that training meets: beside a running backward pass each message also waits
for kernels to be launched, for a busy host and for a share of the device, and simultaneous messages slow each other
differently. What a planned step took, bucket by bucket, says by how much.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from anabranch.comm.agree import Group, agree_on
from anabranch.curve import Curve
from anabranch.network import Contention, Network
from anabranch.plan import Plan
from anabranch.sim import finish_s
from anabranch.timeline import Timeline
from anabranch.trace import Trace
from anabranch.tuning.trial import Trial

FACTORS = (0.8, 2.0)  # how much slower or faster bytes may have become; beyond, something else is being seen
MOST_ETA = 1.5  # of simultaneous messages: at 1 they gain nothing, beyond they hinder each other
TELLING = 0.05  # a step must depend on contention by so much of itself before it can say anything of it
HALVINGS = 30


def refine(network: Network, trace: Trace, trial: Trial, control: Group) -> Network:
    """The network as this trial has met it, the same on every rank: its costs, or with several lanes its contention.

    A message's cost is the least that any rank saw: the others only waited for later ranks. Unchanged where a rank did
    not see every message. Collective.
    """
    plan = trial.plan
    if plan is None:
        return network
    if plan.lanes > 1:
        ended_s = median(look.finish_s for look in trial.looks)
        return agree_on(Network, contended(network, trace, plan, ended_s), control)
    took_s = bucket_seconds(trial.looks)
    unseen = [-math.inf] * len(plan)
    seconds = torch.tensor(took_s if len(took_s) == len(plan) else unseen, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=control)
    if seconds.isinf().any():
        return network
    return agree_on(Network, refined(network, trace, plan, seconds.tolist()), control)


def bucket_seconds(looks: Sequence[Timeline]) -> list[float]:
    """What each message took from when its lane was free for it: medians over some one-lane steps of one plan.

    On a rank that came early this includes its waiting for the others: the least over all ranks is the cost. Empty
    where not every step shows as many messages.
    """
    steps = []
    for look in looks:
        took, free_s = [], 0.0
        for span in sorted(look.communication, key=lambda span: span.start_s):
            took.append(span.end_s - max(span.start_s, free_s))
            free_s = span.end_s
        steps.append(took)
    if len({len(took) for took in steps}) != 1:
        return []
    return [median(of_steps) for of_steps in zip(*steps, strict=True)]


def refined(network: Network, trace: Trace, plan: Plan, took_s: Sequence[float]) -> Network:
    """``network`` such that its costs fit what the buckets of ``plan`` took: factor · cost + extra seconds each.

    Each kind of collective is fitted by its own buckets, and the others stay as they were.
    """
    nbytes = {tensor.name: tensor.nbytes for tensor in trace.tensors}
    curves, notes = dict(network.curves), {}
    for kind in dict.fromkeys(bucket.collective for bucket in plan.buckets):
        own = [i for i, bucket in enumerate(plan.buckets) if bucket.collective == kind]
        expected = [network.seconds(kind, sum(nbytes[name] for name in plan.buckets[i].names)) for i in own]
        factor, extra_s = _fit(np.array(expected), np.array([took_s[i] for i in own]))
        curves[kind] = _scaled(network.curve(kind), factor, extra_s)
        of = f"{len(own)} bucket{'s' if len(own) != 1 else ''}"
        named = "costs" if kind == "dense" else f"costs of {kind}"
        note = f"{named} × {factor:.2f} + {extra_s * 1e3:.3f} ms per message, from live steps of {of}"
        notes["refined" if kind == "dense" else f"refined_{kind}"] = note
    return replace(network, curves=curves, model=None, meta={**network.meta, **notes})


def contended(network: Network, trace: Trace, plan: Plan, ended_s: float) -> Network:
    """``network`` with the η of simultaneous messages under which ``plan`` ends when it did.

    ``ended_s`` counts from the start of backward. It only moves later as η grows, so halving an interval finds η.
    """

    def at(eta: float) -> Network:
        return replace(network, contention=Contention.law(eta), model=None)

    low, high = 0.0, MOST_ETA
    if finish_s(trace, plan, at(high)) < (1 + TELLING) * finish_s(trace, plan, at(low)):
        return network  # its messages hardly meet: what would be found is noise
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if finish_s(trace, plan, at(middle)) < ended_s else (low, middle)
    note = f"k messages at once take 1 + {low:.2f} (k − 1) times as long each, from live steps on {plan.lanes} lanes"
    return replace(at(low), meta={**network.meta, "refined_contention": note})


def _fit(expected: np.ndarray, took: np.ndarray) -> tuple[float, float]:
    """The factor and the extra seconds that fit best, neither beyond what is plausible."""
    factor, extra_s = 1.0, float(np.median(took - expected))
    if len(expected) >= 4 and np.ptp(expected) > expected.mean() / 2:  # else the two cannot be told apart
        factor = float(np.clip(np.polyfit(expected, took, 1)[0], *FACTORS))
        extra_s = float(np.median(took - factor * expected))
    if extra_s < 0:  # a message costs no less than nothing: all of the difference is in the bytes
        factor, extra_s = float(np.clip(took.sum() / expected.sum(), *FACTORS)), 0.0
    return factor, extra_s


def _scaled(curve: Curve, factor: float, extra_s: float) -> Curve:
    points = tuple(replace(point, seconds=factor * point.seconds + extra_s) for point in curve.points)
    return Curve(points, curve.tail_s_per_byte * factor)
