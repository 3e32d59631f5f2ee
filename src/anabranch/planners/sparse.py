"""Plans with compressed buckets: which are sparse or quantised, and at which density if several are allowed."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from anabranch.network import Network
from anabranch.plan import Bucket, Plan
from anabranch.planners.merge import optimal
from anabranch.sim import finish_s
from anabranch.trace import Trace

FREE = 0.02  # share by which a predicted step may be longer than at the lowest density


def sparse(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The exact plan for ``collective``; buckets that the dense collective sends as fast travel dense.

    The gradients named in ``dense`` are planned separately and always travel dense.
    """
    always_dense = [tensor for tensor in trace.tensors if tensor.name in dense]
    compressible = [tensor for tensor in trace.tensors if tensor.name not in dense]
    buckets: list[Bucket] = []
    if compressible:
        nbytes = {tensor.name: tensor.nbytes for tensor in compressible}
        for bucket in optimal(replace(trace, tensors=tuple(compressible)), network, collective=collective).buckets:
            size = sum(nbytes[name] for name in bucket.names)
            gains = network.seconds(collective, size) < network.seconds("dense", size)
            buckets.append(bucket if gains else replace(bucket, collective="dense"))
    if always_dense:
        buckets += optimal(replace(trace, tensors=tuple(always_dense)), network).buckets
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    return Plan(tuple(sorted(buckets, key=lambda bucket: max(place[name] for name in bucket.names))))


def densest(trace: Trace, network: Network, collectives: Sequence[str], dense: Collection[str] = ()) -> Plan:
    """The plan for the lowest density, in which each bucket is then raised to the highest density that stays hidden.

    ``collectives`` are the same exchange from its lowest density to its highest. Buckets move up one density at a time,
    all of them before any moves twice, while the predicted step is at most ``FREE`` longer than at the lowest density.
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


def sparse_if_faster(trace: Trace, network: Network, collectives: Sequence[str], dense: Collection[str] = ()) -> Plan:
    """The plan for one kind, or for a ladder of densities; the exact dense plan if that finishes no later."""
    if len(collectives) > 1:
        found = densest(trace, network, collectives, dense)
    else:
        found = sparse(trace, network, collectives[0], dense)
    return min([optimal(trace, network), found], key=lambda plan: finish_s(trace, plan, network))
