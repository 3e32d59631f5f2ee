"""One training step, event by event, under the runtime's launch rule and the network's costs, and nothing else.

Launch rule: bucket i is launched when its gradients are all there and bucket i−1 has been launched. A lane carries
its buckets one at a time, in launch order. A message first spends the start-up cost of its curve, using no
bandwidth, and then transfers; while k messages transfer at once, each advances at 1/slowdown(k) of full speed.

On one lane this is the recurrence  end[i] = max(end[i−1], ready[i]) + T(bytes[i]).

A two-level message passes three stages of its lane: scatter inside the node, the lane's link between nodes as above,
and gather inside. Each stage carries one message at a time, in launch order, so that stages of successive messages
overlap. A flat message only uses the link; it keeps its place behind the scatters before it, and waits for no gather.
On one lane, with scatter and gather costs s and g:

    scattered[i] = max(scattered[i−1], ready[i]) + s[i]
    between[i] = max(between[i−1], scattered[i]) + T(bytes[i])
    gathered[i] = max(gathered[i−1], between[i]) + g[i]

Where sending a message delays computing (``Network.delays``), all that is computed after its launch is later by that.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from anabranch.values.kinds.names import is_dense
from anabranch.values.network import Contention, Network
from anabranch.values.plan import Plan, bucket_label
from anabranch.values.timeline import COMPUTE, Interval, Span, Timeline, inside_track, lane_track
from anabranch.values.trace import Trace


class SimulatedMessage(NamedTuple):
    """A bucket as the event loop sees it; ``transfer_s`` is what the transfer takes with the link to itself.

    ``scatter_s`` and ``gather_s`` are what it takes inside nodes; a flat message has none.
    """

    ready_s: float
    lane: int
    start_s: float
    transfer_s: float
    scatter_s: float = 0.0
    gather_s: float = 0.0


def simulate(trace: Trace, plan: Plan, network: Network) -> Timeline:
    """The predicted timeline of one step of ``trace`` under ``plan`` on ``network``. Deterministic."""
    plan.check(trace)
    spans = [Span(COMPUTE, "forward", -trace.forward_s, 0.0)] if trace.forward_s > 0 else []
    busy_until = 0.0
    late_s = _late_s(trace, plan, network)
    for tensor, late in zip(trace.tensors, late_s, strict=False):
        spans.append(Span(COMPUTE, f"backward {tensor.name}", busy_until, tensor.ready_s + late))
        busy_until = tensor.ready_s + late
    if late_s[-1] > late_s[-2]:
        spans.append(Span(COMPUTE, "sending", busy_until, trace.backward_s + late_s[-1]))
    queue = messages(trace, plan, network)
    between = schedule(queue, network.contention)
    stages = zip(scatters(queue), between, gathers(queue, between), strict=True)
    for index, (bucket, (scatter, link, gather)) in enumerate(zip(plan.buckets, stages, strict=True)):
        label = bucket_label(index, bucket.collective, bucket.names)
        spans.append(Span(lane_track(bucket.lane), label, *link))
        for name, (start_s, end_s) in (("scatter", scatter), ("gather", gather)):
            if end_s > start_s:
                spans.append(Span(inside_track(bucket.lane), f"{label}, {name}", start_s, end_s))
    return Timeline(tuple(spans), {"source": "simulated", "world_size": network.world_size})


def finish_s(trace: Trace, plan: Plan, network: Network) -> float:
    """``simulate(...).finish_s`` without building the timeline: what planners and sweeps minimise."""
    delays_s = sum(network.delay_s(bucket.collective) for bucket in plan.buckets) if network.delays else 0.0
    return max(trace.backward_s + delays_s, *ends_s(messages(trace, plan, network), network.contention))


def messages(trace: Trace, plan: Plan, network: Network) -> list[SimulatedMessage]:
    """The buckets of ``plan`` with their ready times and costs."""
    tensors = {tensor.name: tensor for tensor in trace.tensors}
    result, late_s = [], 0.0
    for bucket in plan.buckets:
        curve = network.curve(bucket.collective)
        members = [tensors[name] for name in bucket.names]
        cost_s = curve.seconds(sum(tensor.cost_nbytes(bucket.collective) for tensor in members))
        ready_s = late_s + max(tensor.ready_s for tensor in members)
        inside_s = network.inside_s(bucket.collective, sum(tensor.nbytes for tensor in members))
        result.append(SimulatedMessage(ready_s, bucket.lane, curve.start_s, cost_s - curve.start_s, *inside_s))
        late_s += network.delay_s(bucket.collective)
    return result


def _late_s(trace: Trace, plan: Plan, network: Network) -> list[float]:
    """By how much each gradient, and then the end of backward, is late because of the messages launched before it."""
    if not network.delays:
        return [0.0] * (len(trace) + 1)
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    added_s, launched = [0.0] * (len(trace) + 1), 0
    for bucket in plan.buckets:
        launched = max(launched, 1 + max(place[name] for name in bucket.names))
        added_s[launched] += network.delay_s(bucket.collective)
    return list(accumulate(added_s))


def undelayed(trace: Trace, plan: Plan, network: Network) -> Trace:
    """A trace that was recorded under ``plan``, without what its messages delayed."""
    tensors, least_s = [], 0.0
    for tensor, late_s in zip(trace.tensors, _late_s(trace, plan, network), strict=False):
        least_s = max(least_s, tensor.ready_s - late_s)  # in the recorded order, whatever the delays are
        tensors.append(replace(tensor, ready_s=least_s))
    return replace(trace, tensors=tuple(tensors))


def ends_s(queue: Sequence[SimulatedMessage], contention: Contention) -> list[float]:
    """When each message is over, its gather included."""
    return [end_s for _, end_s in gathers(queue, schedule(queue, contention))]


def scatters(queue: Sequence[SimulatedMessage]) -> list[Interval]:
    """When each message is in the scatter stage of its lane, which a flat one leaves at once."""
    intervals, launch_s = [], 0.0
    free_s = dict.fromkeys((message.lane for message in queue), 0.0)
    for message in queue:
        launch_s = max(launch_s, message.ready_s)
        begin_s = max(launch_s, free_s[message.lane])
        free_s[message.lane] = begin_s + message.scatter_s
        intervals.append((begin_s, free_s[message.lane]))
    return intervals


def gathers(queue: Sequence[SimulatedMessage], between: Sequence[Interval]) -> list[Interval]:
    """When each message is in the gather stage of its lane, given when it is on the link; a flat one is over then."""
    intervals = []
    free_s = dict.fromkeys((message.lane for message in queue), 0.0)
    for message, (_, arrived_s) in zip(queue, between, strict=True):
        begin_s = end_s = arrived_s
        if message.gather_s:
            begin_s = max(arrived_s, free_s[message.lane])
            end_s = free_s[message.lane] = begin_s + message.gather_s
        intervals.append((begin_s, end_s))
    return intervals


def schedule(queue: Sequence[SimulatedMessage], contention: Contention) -> list[Interval]:
    """When each message is on the link of its lane, from when until when.

    The next event is always the earliest one: no tolerance decides an order.
    All transfers of an instant advance at one speed, so a clock of work done at that speed (``work_s``) says when
    each is over: a transfer that begins at work w is done at work w + transfer_s, whatever starts or ends in between.
    """
    lanes = 1 + max(message.lane for message in queue)
    if lanes == 1:
        return _one_by_one(queue)
    slowdown = [contention.slowdown(k) for k in range(lanes + 1)]
    queued: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]  # per lane: (when it comes to the link, index)
    for index, (message, (_, scattered_s)) in enumerate(zip(queue, scatters(queue), strict=True)):
        queued[message.lane].append((scattered_s, index))
    for line in queued:
        line.reverse()  # pop() then takes the next one

    begun, ended = [0.0] * len(queue), [0.0] * len(queue)
    current = [-1] * lanes  # the message on each lane
    known_s = [line[-1][0] if line else inf for line in queued]  # when it arrives, or has started up
    done_work_s = [inf] * lanes  # the work at which its transfer is over
    now, work_s, transferring, unfinished = 0.0, 0.0, 0, len(queue)
    while unfinished:
        soonest_s, least_work_s = min(known_s), min(done_work_s)
        over_s = now + (least_work_s - work_s) * slowdown[transferring]
        if over_s <= soonest_s:  # a message has arrived; its lane turns to the next one
            lane = done_work_s.index(least_work_s)
            transferring -= 1
            now, work_s = over_s, least_work_s if transferring else 0.0  # from zero again: no digits lost
            done_work_s[lane] = inf
            unfinished -= 1
            ended[current[lane]] = now
            current[lane] = -1
            if queued[lane]:
                known_s[lane] = max(now, queued[lane][-1][0])
            continue
        work_s += (soonest_s - now) / slowdown[transferring] if transferring else 0.0
        now = soonest_s
        lane = known_s.index(soonest_s)
        if current[lane] < 0:  # the lane is free and its next bucket has been launched
            current[lane] = queued[lane].pop()[1]
            begun[current[lane]] = now
            known_s[lane] = now + queue[current[lane]].start_s
        else:  # start-up is over, the transfer begins
            known_s[lane] = inf
            done_work_s[lane] = work_s + queue[current[lane]].transfer_s
            transferring += 1
    return list(zip(begun, ended, strict=True))


def _one_by_one(queue: Sequence[SimulatedMessage]) -> list[Interval]:
    """One lane: end[i] = max(end[i−1], scattered[i]) + start-up + transfer, which needs no events."""
    intervals, scattered_s, end_s = [], 0.0, 0.0
    for message in queue:
        scattered_s = max(scattered_s, message.ready_s) + message.scatter_s
        begin_s = max(end_s, scattered_s)
        end_s = begin_s + message.start_s + message.transfer_s
        intervals.append((begin_s, end_s))
    return intervals


def lower_bound_s(trace: Trace, network: Network, lanes: int = 1) -> float:
    """No plan of dense messages on up to ``lanes`` lanes finishes backward and communication sooner than this.

    The last gradient must still travel after backward. And all bytes must pass after the first gradient is ready: on
    each lane one message after another, start-up included, at the best rate that the curve offers any message; and
    their transfers together at the best rate that up to ``lanes`` simultaneous ones reach. Messages may be flat or on
    two levels: what either needs at least is the least of both.
    """
    kinds, nbytes, last = list(filter(is_dense, network.curves)), trace.nbytes, trace.tensors[-1].nbytes
    curves = [network.curve(kind) for kind in kinds]
    aggregate = max(k / network.contention.slowdown(k) for k in range(1, lanes + 1))
    one_by_one_s = min(curve.least_s_per_byte(nbytes) for curve in curves) * nbytes / lanes
    transfers_s = min(curve.least_transfer_s_per_byte(nbytes) for curve in curves) * nbytes / max(1.0, aggregate)
    together_s = min(curve.start_s for curve in curves) + transfers_s
    last_s = trace.backward_s + min(network.seconds(kind, last) + sum(network.inside_s(kind, last)) for kind in kinds)
    return max(last_s, trace.tensors[0].ready_s + max(one_by_one_s, together_s))
