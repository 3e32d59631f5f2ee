"""Planners that merge gradients on one lane: the published MG-WFBP rule, and the exact optimum that beats it."""

from collections.abc import Sequence
from dataclasses import replace

from anabranch.planning.fixed import by_bytes, in_ready_order, per_tensor, single
from anabranch.planning.optimum import best_cuts
from anabranch.planning.simulator import finish_s
from anabranch.values.network import Network
from anabranch.values.plan import Plan, runs
from anabranch.values.trace import TensorSpec, Trace


def mgwfbp(trace: Trace, network: Network) -> Plan:
    """The published MG-WFBP rule: wait for the next gradient if the wait is shorter than the start-up it saves.

    From the first gradient on, with τ the instant at which the current bucket could start (all its gradients are ready
    and the channel is free) and r the instant at which the next gradient is ready: merge the next one if r − τ < a. The
    rule assumes a cost of a + b·M; a measured curve is replaced by the straight line nearest to it (``Curve.line``).
    Optimal at each step, not overall: if every layer takes less than a, it ends in one single message.
    """
    start_s, s_per_byte = network.curve("dense").line()
    return published(trace, start_s, s_per_byte, patience_s=start_s)


def optimal(trace: Trace, network: Network, cap_nbytes: int | None = None, collective: str = "dense") -> Plan:
    """The plan of consecutive buckets on one lane that finishes first; among equals, the one with fewest buckets.

    Exact for every network (any curve that never falls; with delays for up to 1024 gradients), by dynamic programming
    (``planners.optimum``); with ``cap_nbytes`` exact among plans whose buckets hold at most that much (a larger tensor
    still travels, by itself).

    Several dtypes cannot share a bucket. Each is then planned exactly as if it had the network to itself, and a fixed
    plan replaces the result where the simulator finds that better: good, but not proven best.
    """
    if cap_nbytes is not None and cap_nbytes < 1:
        raise ValueError(f"cap_nbytes is {cap_nbytes}: expected at least 1")
    segments, delay_s = network.curve(collective).segments(), network.delay_s(collective)
    parts: list[Sequence[TensorSpec]] = []
    kinds = trace.by_kind()
    for tensors in kinds:
        nbytes = [tensor.cost_nbytes(collective) for tensor in tensors]
        cuts = best_cuts([tensor.ready_s for tensor in tensors], nbytes, segments, cap_nbytes, delay_s)
        parts += runs(tensors, cuts)
    best = using(in_ready_order(trace, parts), collective)
    if len(kinds) == 1:
        return best
    others = [per_tensor(trace, network)]
    if cap_nbytes is None:
        others += [single(trace, network), by_bytes(trace, network), mgwfbp(trace, network)]
    else:
        others.append(by_bytes(trace, network, cap_nbytes, closes="before"))
    return min([best, *(using(other, collective) for other in others)], key=lambda plan: finish_s(trace, plan, network))


def using(plan: Plan, collective: str) -> Plan:
    """The same buckets, sent by another collective."""
    if collective == "dense":
        return plan
    return Plan(tuple(replace(bucket, collective=collective) for bucket in plan.buckets))


def published(trace: Trace, start_s: float, s_per_byte: float, patience_s: float, lanes: int = 1) -> Plan:
    """The published planners' single pass: merge the next gradient while it is ready before τ + patience_s."""
    parts: list[Sequence[TensorSpec]] = []
    for tensors in trace.by_kind():
        first, free_s, nbytes = 0, 0.0, 0
        for index, tensor in enumerate(tensors):
            nbytes += tensor.nbytes
            begin_s = max(free_s, tensor.ready_s)
            if index + 1 < len(tensors) and tensors[index + 1].ready_s - begin_s < patience_s:
                continue
            parts.append(tensors[first : index + 1])
            first, free_s, nbytes = index + 1, begin_s + start_s + s_per_byte * nbytes, 0
    return in_ready_order(trace, parts, lanes)
