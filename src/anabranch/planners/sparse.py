"""Plans whose larger buckets travel sparsely: which buckets, and with what density where nobody has chosen one."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from anabranch.network import Network
from anabranch.plan import Bucket, Plan
from anabranch.planners.merge import optimal
from anabranch.sim import finish_s
from anabranch.trace import Trace

FREE = 0.02  # how much longer than at the lowest density a step may be predicted to take, as a share


def sparse(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The exact plan for ``collective``, in which buckets that gain nothing by it travel dense.

    The gradients named in ``dense`` are planned apart and travel dense in any case.
    """
    kept = [tensor for tensor in trace.tensors if tensor.name in dense]
    sent = [tensor for tensor in trace.tensors if tensor.name not in dense]
    buckets: list[Bucket] = []
    if sent:
        nbytes = {tensor.name: tensor.nbytes for tensor in sent}
        for bucket in optimal(replace(trace, tensors=tuple(sent)), network, collective=collective).buckets:
            size = sum(nbytes[name] for name in bucket.names)
            gains = network.seconds(collective, size) < network.seconds("dense", size)
            buckets.append(bucket if gains else replace(bucket, collective="dense"))
    if kept:
        buckets += optimal(replace(trace, tensors=tuple(kept)), network).buckets
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    return Plan(tuple(sorted(buckets, key=lambda bucket: max(place[name] for name in bucket.names))))


def densest(trace: Trace, network: Network, collectives: Sequence[str], dense: Collection[str] = ()) -> Plan:
    """Sparse at the lowest density, then each bucket as dense as the backward pass hides.

    ``collectives`` are the same exchange from its lowest density to its highest. Starting from the plan for the lowest,
    buckets move up one density at a time, all of them before any moves twice, as long as the step is predicted to take
    at most ``FREE`` longer than that plan: what the network carries for nothing is not thrown away.
    """
    best = sparse(trace, network, collectives[0], dense)
    limit_s = (trace.forward_s + finish_s(trace, best, network)) * (1 + FREE) - trace.forward_s
    for lower, higher in zip(collectives, [*collectives[1:], "dense"], strict=True):
        for index, bucket in enumerate(best.buckets):
            if bucket.collective == lower:
                moved = replace(bucket, collective=higher)
                tried = Plan((*best.buckets[:index], moved, *best.buckets[index + 1 :]))
                if finish_s(trace, tried, network) <= limit_s:
                    best = tried
    return best


def where_it_gains(trace: Trace, network: Network, collectives: Sequence[str], dense: Collection[str] = ()) -> Plan:
    """The sparse plan for one density, or for a ladder of them; the exact dense plan where that finishes no later."""
    if len(collectives) > 1:
        found = densest(trace, network, collectives, dense)
    else:
        found = sparse(trace, network, collectives[0], dense)
    return min([optimal(trace, network), found], key=lambda plan: finish_s(trace, plan, network))
