"""The numbers that describe a trace, network, plan or timeline, by name, as --json prints them."""

import re
from collections.abc import Mapping
from typing import Any

from anabranch.tools.predict.scaling.compression import sent_nbytes
from anabranch.tools.report.documents import PlannedBucket
from anabranch.values.curve import Curve
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import TensorSpec, Trace

SMALL_NBYTES = 64 << 10  # below this size a message costs little more than its start-up, on common networks
SAMPLE_NBYTES = tuple(1 << power for power in range(10, 31, 4))
BUCKET_NUMBER = re.compile(r"bucket (\d{1,9})\b", re.ASCII)

Figures = dict[str, Any]


def small_tensors(trace: Trace) -> list[TensorSpec]:
    """The gradients whose message would cost little more than its start-up."""
    return [tensor for tensor in trace.tensors if tensor.nbytes < SMALL_NBYTES]


def samples(curve: Curve) -> list[tuple[int, float, float]]:
    """(nbytes, seconds, spread_s) at each measured point; of a formula, which has none, at some usual sizes."""
    if len(curve.points) > 1:
        return [(point.nbytes, point.seconds, point.spread_s) for point in curve.points]
    return [(nbytes, curve.seconds(nbytes), 0.0) for nbytes in SAMPLE_NBYTES]


def ratio(before_s: float, after_s: float) -> float | None:
    """How many times as fast; None where ``after_s`` is 0."""
    return before_s / after_s if after_s > 0 else None


def trace_figures(trace: Trace) -> Figures:
    """Totals of a trace."""
    small = small_tensors(trace)
    return {
        "tensors": len(trace),
        "nbytes": trace.nbytes,
        "forward_s": trace.forward_s,
        "backward_s": trace.backward_s,
        "small_below_nbytes": SMALL_NBYTES,
        "small_tensors": len(small),
        "small_nbytes": sum(tensor.nbytes for tensor in small),
    }


def network_figures(network: Network) -> Figures:
    """The cost of messages of some sizes by collective, and the slowdown of k simultaneous messages."""
    return {
        "world_size": network.world_size,
        "collectives": {
            kind: [
                {"nbytes": n, "seconds": s, "spread_s": spread_s, "bits_per_s": 8 * n / s if s else None}
                for n, s, spread_s in samples(curve)
            ]
            for kind, curve in network.curves.items()
        },
        "slowdowns": {str(k): network.contention.slowdown(k) for k in range(1, 5)},
    }


def plan_figures(plan: Plan) -> Figures:
    """Size and identity of a plan."""
    return {
        "fingerprint": plan.fingerprint,
        "buckets": len(plan),
        "lanes": plan.lanes,
        "tensors": sum(len(bucket.names) for bucket in plan.buckets),
    }


def timeline_figures(timeline: Timeline) -> Figures:
    """The durations of the step; ``finish_s`` counts from the start of backward."""
    return {
        "forward_s": max(0.0, -min(span.start_s for span in timeline.spans)),
        "backward_s": max(span.end_s for span in timeline.compute),
        "finish_s": timeline.finish_s,
        "communication_s": timeline.communication_s,
        "exposed_s": timeline.exposed_s,
        "overlap": timeline.overlap,
        "iteration_s": timeline.iteration_s,
    }


def bucket_number(span: str) -> int | None:
    """The number of the bucket that a span of a lane shows; None where its name has none."""
    found = BUCKET_NUMBER.match(span)
    return int(found[1]) if found else None


def planned_buckets(
    buckets: Mapping[int, Bucket], timeline: Timeline | None = None, trace: Trace | None = None
) -> tuple[PlannedBucket, ...]:
    """Buckets by number, with when they were on their lane in ``timeline``; sizes where ``trace`` has all gradients."""
    tensors = {tensor.name: tensor for tensor in trace.tensors} if trace is not None else {}
    spans = {bucket_number(span.name): span for span in timeline.messages} if timeline else {}
    stages = {span.name: (span.start_s, span.end_s) for span in timeline.communication} if timeline else {}
    said = timeline.meta.get("world_size") if timeline else None
    ranks = said if isinstance(said, int) and said >= 1 else None
    rows = []
    for index, bucket in buckets.items():
        members = [tensors[name] for name in bucket.names if name in tensors]
        known = len(members) == len(bucket.names)
        span = spans.get(index)
        row = PlannedBucket(
            index=index,
            lane=bucket.lane,
            collective=bucket.collective,
            tensors=len(bucket.names),
            nbytes=sum(tensor.nbytes for tensor in members) if known else None,
            ready_s=max(tensor.ready_s for tensor in members) if known else None,
            start_s=span.start_s if span else None,
            end_s=span.end_s if span else None,
            names=bucket.names,
            sent_nbytes=sent_nbytes(bucket.collective, members, ranks) if known and ranks else None,
            scatter=stages.get(f"{span.name}, scatter") if span else None,
            gather=stages.get(f"{span.name}, gather") if span else None,
        )
        rows.append(row)
    return tuple(rows)
