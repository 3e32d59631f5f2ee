"""Plans with buckets of one compressed kind, beside dense ones; ``ladder.py`` chooses between several kinds."""

from collections.abc import Collection
from dataclasses import replace

from anabranch.planning.merge import optimal
from anabranch.planning.simulator import finish_s
from anabranch.values.kinds.names import DENSE
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace


def compressed(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The exact plan for ``collective``; buckets that the dense collective sends as fast travel dense.

    The gradients named in ``dense`` are planned separately and always travel dense.
    """
    always_dense = [tensor for tensor in trace.tensors if tensor.name in dense]
    compressible = [tensor for tensor in trace.tensors if tensor.name not in dense]
    buckets: list[Bucket] = []
    if compressible:
        tensors = {tensor.name: tensor for tensor in compressible}
        for bucket in optimal(replace(trace, tensors=tuple(compressible)), network, collective=collective).buckets:
            seconds, dense_s = (
                network.seconds(kind, sum(tensors[name].cost_nbytes(kind) for name in bucket.names))
                for kind in (collective, DENSE)
            )
            gains = seconds < dense_s
            buckets.append(bucket if gains else replace(bucket, collective=DENSE))
    if always_dense:
        buckets += optimal(replace(trace, tensors=tuple(always_dense)), network).buckets
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    return Plan(tuple(sorted(buckets, key=lambda bucket: max(place[name] for name in bucket.names))))


def compressed_if_faster(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The plan for ``collective``; the exact dense plan if that finishes no later."""
    plans = [optimal(trace, network), compressed(trace, network, collective, dense)]
    return min(plans, key=lambda plan: finish_s(trace, plan, network))
