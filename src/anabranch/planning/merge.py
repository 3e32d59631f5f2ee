"""Planners that merge gradients on one lane: the published MG-WFBP rule, and the exact optimum that beats it.

The optimum is found by dynamic programming over where to cut.

With r[i] the instant at which the i-th gradient is ready, S[i] the bytes of the first i gradients, and T the cost of a
message, the earliest instant at which the first i gradients can have travelled is

    f[0] = 0        f[i] = min over j < i of  max(f[j], r[i]) + T(S[i] − S[j])

because finishing a prefix earlier never delays the rest. T never falls, hence neither does f, which leaves little to
try:

*  of the cuts with f[j] ≤ r[i] (the channel is free when gradient i comes) only the last one matters, since it
   leaves the smallest message;
*  for the others the term is f[j] + T(S[i] − S[j]). On one straight line of T, with slope s, the best cut is the one
   with the least f[j] − s·S[j]; and the cuts whose message falls on that line are a window that only moves forward
   as i grows. So its minimum is kept in a monotone queue, at constant cost per gradient.

That is O(n·K) for n gradients and a curve of K lines. Among all plans that finish at f[n] one with fewest buckets is
then found by the same recurrence in layers, f_c[i] being the optimum with at most c buckets: the least c with
f_c[n] = f[n].

Where sending a message delays all later gradients by d, count in a clock that stops for that long at each launch. With
u_c[i] the earliest instant, on that clock, at which the first i gradients can have travelled in exactly c messages,

    u_0[0] = 0        u_c[i] = min over j < i of  max(u_{c−1}[j], r[i]) + T(S[i] − S[j]) − d

and a plan of c messages finishes at max(u_c[n], r[n]) + c·d. So every c is solved by itself, O(n²) each, until the
delays or the start-ups of more messages alone take longer than the best plan so far.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from anabranch.planning.by_size import by_bytes, in_ready_order, per_tensor, single
from anabranch.planning.costs import SAME, CostLines, Floats, Ints
from anabranch.planning.simulator import finish_s
from anabranch.planning.two_level import best_runs
from anabranch.values.curve import Segment
from anabranch.values.kinds.names import DENSE, is_two_level, two_level
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan, runs
from anabranch.values.trace import TensorSpec, Trace

# On a steeper line S·s is so much larger than f that f − s·S would lose more digits than that.
STEEP = 1e3
MOST_DELAYED = 1024  # gradients, for which all messages that can be are priced: tables of 8 MB


def mgwfbp(trace: Trace, network: Network) -> Plan:
    """The published MG-WFBP rule: wait for the next gradient if the wait is shorter than the start-up it saves.

    From the first gradient on, with τ the instant at which the current bucket could start (all its gradients are ready
    and the channel is free) and r the instant at which the next gradient is ready: merge the next one if r − τ < a. The
    rule assumes a cost of a + b·M; a measured curve is replaced by the straight line nearest to it (``Curve.line``).
    Optimal at each step, not overall: if every layer takes less than a, it ends in one single message.
    """
    start_s, s_per_byte = network.curve("dense").line()
    return published(trace, start_s, s_per_byte, patience_s=start_s)


def optimal(trace: Trace, network: Network, collective: str = "dense") -> Plan:
    """The plan of consecutive buckets on one lane that finishes first; among equals, the one with fewest buckets.

    Exact for every network (any curve that never falls; with delays for up to 1024 gradients), by dynamic programming
    (``best_cuts``). Messages whose stages inside nodes take time are planned by ``two_level.best_runs``, exact for up
    to 128 gradients.

    Several dtypes cannot share a bucket. Each is then planned exactly as if it had the network to itself, and a fixed
    plan replaces the result where the simulator finds that better: good, but not proven best.
    """
    kinds = trace.by_kind()
    in_stages = network.inside is not None and is_two_level(collective)
    plan_part = best_runs if in_stages else _best_flat_runs
    parts = [part for tensors in kinds for part in plan_part(tensors, network, collective)]
    best = using(in_ready_order(trace, parts), collective)
    if len(kinds) == 1:
        return best
    others = [planner(trace, network) for planner in (per_tensor, single, by_bytes, mgwfbp)]
    return min([best, *(using(other, collective) for other in others)], key=lambda plan: finish_s(trace, plan, network))


def _best_flat_runs(tensors: Sequence[TensorSpec], network: Network, collective: str) -> list[Sequence[TensorSpec]]:
    nbytes = [tensor.cost_nbytes(collective) for tensor in tensors]
    segments, delay_s = network.curve(collective).segments(), network.delay_s(collective)
    return runs(tensors, best_cuts([tensor.ready_s for tensor in tensors], nbytes, segments, delay_s))


def using(plan: Plan, collective: str) -> Plan:
    """The same buckets, sent by another collective."""
    if collective == DENSE:
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


def compressed(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The exact plan for ``collective``; buckets that a dense collective sends as fast travel dense.

    The gradients named in ``dense`` are planned separately and always travel dense. With a two-level collective, dense
    messages may be on two levels, too, where the network has a cost for that.
    """
    plain = _dense_kinds(network, collective)
    always_dense = [tensor for tensor in trace.tensors if tensor.name in dense]
    compressible = [tensor for tensor in trace.tensors if tensor.name not in dense]
    buckets: list[Bucket] = []
    if compressible:
        tensors = {tensor.name: tensor for tensor in compressible}
        for bucket in optimal(replace(trace, tensors=tuple(compressible)), network, collective=collective).buckets:
            members = [tensors[name] for name in bucket.names]
            fastest = min((*plain, collective), key=lambda kind: _message_s(members, network, kind))
            buckets.append(replace(bucket, collective=fastest))
    if always_dense:
        buckets += _fastest_of(plain, replace(trace, tensors=tuple(always_dense)), network).buckets
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    return Plan(tuple(sorted(buckets, key=lambda bucket: max(place[name] for name in bucket.names))))


def compressed_if_faster(trace: Trace, network: Network, collective: str, dense: Collection[str] = ()) -> Plan:
    """The plan for ``collective``; the exact dense plan if that finishes no later."""
    plain = _fastest_of(_dense_kinds(network, collective), trace, network)
    return min([plain, compressed(trace, network, collective, dense)], key=lambda plan: finish_s(trace, plan, network))


def _dense_kinds(network: Network, collective: str) -> list[str]:
    """How dense messages may travel beside those of ``collective``."""
    kinds = [DENSE, two_level(DENSE)]
    return kinds if is_two_level(collective) and kinds[1] in network.curves else kinds[:1]


def _fastest_of(kinds: Sequence[str], trace: Trace, network: Network) -> Plan:
    """Of the exact plans of one kind each the one that finishes first."""
    plans = [optimal(trace, network, collective=kind) for kind in kinds]
    return min(plans, key=lambda plan: finish_s(trace, plan, network))


def _message_s(tensors: Sequence[TensorSpec], network: Network, kind: str) -> float:
    """What one message takes by itself, in all of its stages."""
    inside_s = network.inside_s(kind, sum(tensor.nbytes for tensor in tensors))
    return network.seconds(kind, sum(tensor.cost_nbytes(kind) for tensor in tensors)) + sum(inside_s)


def best_cuts(
    ready_s: Sequence[float], nbytes: Sequence[int], segments: Sequence[Segment], delay_s: float = 0.0
) -> list[int]:
    """Where to open new buckets, so that the last one finishes first, with as few buckets as that allows.

    ``delay_s``: by how much each message delays the gradients after it. Beyond ``MOST_DELAYED`` gradients it counts as
    a part of the message, which is not exact.
    """
    if delay_s and len(ready_s) > MOST_DELAYED:
        segments, delay_s = [one._replace(seconds=one.seconds + delay_s) for one in segments], 0.0
    problem = _Problem(ready_s, nbytes, segments)
    return problem.delayed(delay_s) if delay_s else problem.fewest(problem.earliest())


class _Problem(CostLines):
    """Ready times, prefix sums and cost curve as arrays, for both recurrences."""

    def __init__(self, ready_s: Sequence[float], nbytes: Sequence[int], segments: Sequence[Segment]) -> None:
        super().__init__(segments)
        self.n = len(ready_s)
        self.ready = np.array([0.0, *ready_s])
        self.total = np.concatenate(([0], np.cumsum(np.array(nbytes, dtype=np.int64))))

    def earliest(self) -> float:
        """f[n], by the recurrence with monotone queues, in plain numbers: faster than arrays at this grain."""
        ready, total = self.ready.tolist(), self.total.tolist()
        lines = list(zip(self.at.tolist(), self.seconds.tolist(), self.slope.tolist(), strict=True))
        ends = [*self.at.tolist()[1:], math.inf]
        queues: list[deque[int]] = [deque() for _ in lines]  # cuts j, rising, and with them f[j] − s·S[j]
        entered = [0] * len(lines)  # the next cut to enter each queue
        f = [0.0]
        free = 0
        for i in range(1, self.n + 1):
            now, sent = ready[i], total[i]
            while free + 1 < i and f[free + 1] <= now:
                free += 1
            size = sent - total[free]
            start, seconds, slope = lines[bisect_right(lines, size, key=itemgetter(0)) - 1]
            best = now + seconds + slope * (size - start)
            oldest = free + 1
            longest = sent - total[oldest] if oldest < i else -1
            for k, (start, seconds, slope) in enumerate(lines):
                if longest < start:
                    break
                queue = queues[k]
                j = max(entered[k], oldest)
                while j < i and sent - total[j] >= start:
                    # f[q] − s·S[q] ≥ f[j] − s·S[j], written as differences, which lose no digits.
                    while queue and f[queue[-1]] - f[j] >= slope * (total[queue[-1]] - total[j]):
                        queue.pop()
                    queue.append(j)
                    j += 1
                entered[k] = j
                while queue and (queue[0] < oldest or sent - total[queue[0]] >= ends[k]):
                    queue.popleft()
                if queue:
                    best = min(best, f[queue[0]] + (seconds + slope * (sent - total[queue[0]] - start)))
            f.append(best)
        return f[-1]

    def fewest(self, finish: float) -> list[int]:
        """The cuts of a plan with fewest buckets among those that finish by ``finish``."""
        layers = [np.full(self.n + 1, math.inf)]
        layers[0][0] = 0.0
        windows = self._windows()
        while layers[-1][-1] > finish * (1 + SAME):
            layers.append(self._one_more_bucket(layers[-1], windows))
        cuts: list[int] = []
        i = self.n
        for before in reversed(layers[:-1]):
            candidates = np.maximum(before[:i], self.ready[i]) + self.cost(self.total[i] - self.total[:i])
            # Of equally good cuts the latest, which leaves the shorter last message.
            i = int(i - 1 - np.argmin(candidates[::-1]))
            if i == 0:
                break
            cuts.append(i)
        return cuts[::-1]

    def delayed(self, delay_s: float) -> list[int]:
        """The cuts of the plan that finishes first, with fewest buckets, if each delays the gradients after it."""
        size = np.arange(self.n + 1)
        earlier = size[:, None] < size[None, :]  # [j, i]
        cost = np.where(earlier, self.table(np.diff(self.total)), math.inf)
        layer = np.where(size == 0, 0.0, math.inf)
        layers: list[Ints] = []  # for each c: where the last message of the first i gradients begins
        best, chosen = math.inf, 0
        start_s, transfers_s = self.seconds[0], self._least_transfers_s()
        while len(layers) < self.n:
            messages = len(layers) + 1
            if max(self.ready[-1] + messages * delay_s, self.ready[1] + messages * start_s + transfers_s) >= best:
                break
            ends = np.maximum(layer[:, None], self.ready[None, :]) + cost - delay_s
            layers.append(ends.argmin(axis=0))
            layer = ends.min(axis=0)
            finish = max(layer[-1], self.ready[-1]) + len(layers) * delay_s
            if finish < best * (1 - SAME):
                best, chosen = finish, len(layers)
        cuts, i = [], self.n
        for before in reversed(layers[:chosen]):
            i = int(before[i])
            cuts.append(i)
        return cuts[-2::-1]

    def _least_transfers_s(self) -> float:
        """Seconds for all bytes without start-ups, at the best rate that the curve offers any message."""
        sizes = np.array([*(size for size in self.at[1:] if size < self.total[-1]), self.total[-1]])
        rates = (self.cost(sizes) - self.seconds[0]) / np.maximum(sizes, 1)
        return float(rates.min() * self.total[-1])

    def _windows(self) -> list[tuple[Ints, Ints, Ints]]:
        """Per line of T: the ends i that have cuts on it, and their first and last-plus-one cut."""
        high = np.arange(self.n + 1)
        result = []
        for beyond in [*self.at[1:], self.total[-1] + 1]:
            low = np.searchsorted(self.total, self.total - beyond, side="right")
            some = np.flatnonzero(low < high)
            result.append((some, low[some], high[some]))
            high = np.minimum(low, high)
        return result

    def _one_more_bucket(self, f: Floats, windows: list[tuple[Ints, Ints, Ints]]) -> Floats:
        """f_{c+1} from f_c, for all i at once; the queues' windows become range minima."""
        last = np.maximum(np.arange(self.n + 1) - 1, 0)
        free = np.minimum(np.searchsorted(f, self.ready, side="right") - 1, last)
        best = np.minimum(f, self.ready + self.cost(self.total - self.total[free]))
        for k, (ends, low, high) in enumerate(windows):
            queued = np.maximum(low, free[ends] + 1)
            some = np.flatnonzero(queued < high)
            if some.size:
                here = ends[some]
                best[here] = np.minimum(best[here], self._least(f, k, here, queued[some], high[some]))
        best[0] = 0.0
        return best

    def _least(self, f: Floats, k: int, ends: Ints, low: Ints, high: Ints) -> Floats:
        """min over j in [low, high) of f[j] + T(S[i] − S[j]) on line k, for each i of ``ends``; no range is empty."""
        slope, total, origin = self.slope[k], self.total, self.total[low.min()]
        if slope * (total[high.max() - 1] - origin) <= STEEP * self.ready[-1]:
            key = _range_min(f - slope * (total - origin), low, high, np.minimum)
            return np.asarray(key + (self.seconds[k] + slope * (total[ends] - origin - self.at[k])))

        def better(a: Ints, b: Ints) -> Ints:  # on a steep line f − s·S would cancel: compare differences
            return np.where(f[a] - f[b] <= slope * (total[a] - total[b]), a, b)

        with np.errstate(invalid="ignore"):  # two cuts that cannot be reached: inf − inf, and either will do
            cut = _range_min(np.arange(self.n + 1), low, high, better)
        return np.asarray(f[cut] + (self.seconds[k] + slope * (total[ends] - total[cut] - self.at[k])))


def _range_min(values: Any, low: Ints, high: Ints, least: Callable[[Any, Any], Any]) -> Any:
    """The least of values[low:high] for many non-empty ranges, from the least of all windows of 1, 2, 4, … values."""
    level = np.frexp((high - low).astype(np.float64))[1] - 1
    result = np.empty(len(low), dtype=values.dtype)
    window = values
    for power in range(int(level.max()) + 1):
        chosen = np.flatnonzero(level == power)
        if chosen.size:
            result[chosen] = least(window[low[chosen]], window[high[chosen] - (1 << power)])
        window = least(window[: -(1 << power)], window[1 << power :])
    return result
