"""Naive twins of the clever parts: slow, literal, and shared with no code under test but the nouns themselves."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from anabranch import Contention, Curve, Trace

SAME = 1e-12  # relatively: two finishes this close are one, the rest is rounding


class Best(NamedTuple):
    """The least finish, and the fewest buckets with which it is reached."""

    finish_s: float
    buckets: int


class Task(NamedTuple):
    """A message as the simulator's twin sees it."""

    ready_s: float
    lane: int
    start_s: float
    transfer_s: float
    scatter_s: float = 0.0
    gather_s: float = 0.0


# ---------------------------------------------------------------------------------------------------- one lane


def fifo(ready_s: Sequence[float], cost_s: Sequence[float]) -> list[float]:
    """end[i] = max(end[i−1], ready[i]) + cost[i]: one channel, one message at a time, in order."""
    ends: list[float] = []
    for ready, cost in zip(ready_s, cost_s, strict=True):
        ends.append(max(ends[-1] if ends else 0.0, ready) + cost)
    return ends


def all_cuts(n: int) -> Iterator[tuple[int, ...]]:
    """The inner cuts of all 2^(n−1) ways to part n tensors into consecutive runs."""
    for count in range(n):
        yield from combinations(range(1, n), count)


def finish_of(trace: Trace, curve: Curve, cuts: Sequence[int]) -> float:
    """When the last bucket has travelled, by the recurrence."""
    edges = [0, *cuts, len(trace)]
    ready = [trace.tensors[high - 1].ready_s for _, high in pairwise(edges)]
    cost = [curve.seconds(sum(t.nbytes for t in trace.tensors[low:high])) for low, high in pairwise(edges)]
    return fifo(ready, cost)[-1]


def allowed(trace: Trace, cuts: Sequence[int], cap_nbytes: int | None) -> bool:
    """Whether every bucket holds one tensor or at most the cap."""
    parts = [trace.tensors[low:high] for low, high in pairwise([0, *cuts, len(trace)])]
    return cap_nbytes is None or all(len(p) == 1 or sum(t.nbytes for t in p) <= cap_nbytes for p in parts)


def brute_force(trace: Trace, curve: Curve, cap_nbytes: int | None = None) -> Best:
    """The lexicographically least (finish, buckets) of all partitions."""
    found = [
        Best(finish_of(trace, curve, cuts), len(cuts) + 1)
        for cuts in all_cuts(len(trace))
        if allowed(trace, cuts, cap_nbytes)
    ]
    finish = min(best.finish_s for best in found)
    return Best(finish, min(best.buckets for best in found if best.finish_s <= finish * (1 + SAME)))


def naive_dp(trace: Trace, curve: Curve, cap_nbytes: int | None = None) -> Best:
    """f_c[i] = min over j < i of max(f_{c−1}[j], r[i]) + T(S[i] − S[j]), every j of every i tried, layer by layer."""
    n = len(trace)
    nbytes = [t.nbytes for t in trace.tensors]
    ready = np.array([t.ready_s for t in trace.tensors])
    cost = np.full((n, n), np.inf)  # cost[i, j]: a message of tensors j … i
    for i in range(n):
        size = 0
        for j in range(i, -1, -1):
            size += nbytes[j]
            if cap_nbytes is None or size <= cap_nbytes or j == i:
                cost[i, j] = curve.seconds(size)
    exactly = np.full(n + 1, np.inf)
    exactly[0] = 0.0
    by_buckets = []
    for _ in range(n):
        after = np.min(np.maximum(exactly[None, :-1], ready[:, None]) + cost, axis=1)
        exactly = np.concatenate(([np.inf], after))
        by_buckets.append(float(after[-1]))
    finish = min(by_buckets)
    return Best(finish, 1 + next(c for c, f in enumerate(by_buckets) if f <= finish * (1 + SAME)))


# ------------------------------------------------------------------------------------------------ published rules


def comm_start(tc: dict[int, float], r: dict[int, float]) -> dict[int, float]:
    """tau_c[L] = r[L];  tau_c[l] = max(tau_c[l+1] + tc[l+1], r[l]): algorithms.md §1.3."""
    last = max(r)
    tau_c = {last: r[last]}
    for layer in range(last - 1, 0, -1):
        tau_c[layer] = max(tau_c[layer + 1] + tc[layer + 1], r[layer])
    return tau_c


def published_groups(
    tb: Sequence[float], p: Sequence[int], a: float, b: float, *, rule: str = "mgwfbp"
) -> list[list[int]]:
    """PLAN_MGWFBP of algorithms.md §1.5, line by line in its O(L²) form; layers 1 … L, groups in backward order.

    ``tb`` and ``p`` are in forward order (layer 1 first). Rule "asc" is §2.3: merge iff r[l−1] < tau_c[l].
    """
    last = len(tb)
    size = dict(enumerate(p, start=1))
    r = {last: tb[last - 1]}
    for layer in range(last - 1, 0, -1):
        r[layer] = r[layer + 1] + tb[layer - 1]
    tc = {layer: a + b * size[layer] if size[layer] else 0.0 for layer in size}
    tau_c = comm_start(tc, r)
    merged = set()
    for layer in range(last, 1, -1):
        wait = r[layer - 1] - tau_c[layer]
        if wait < a if rule == "mgwfbp" else wait < 0:
            merged.add(layer)
            tc[layer] = 0.0
            size[layer - 1] += size[layer]
            size[layer] = 0
            tc[layer - 1] = a + b * size[layer - 1]
            tau_c = comm_start(tc, r)
    groups: list[list[int]] = [[]]
    for layer in range(last, 0, -1):
        groups[-1].append(layer)
        if layer not in merged and layer > 1:
            groups.append([])
    return groups


# ------------------------------------------------------------------------------------------- simultaneous messages


def slowdown(contention: Contention, k: int) -> Fraction:
    """The documented law, written anew: the table, its last step beyond it, and never more than the link's cap."""
    table = [Fraction(s) for s in contention.slowdowns]
    step = table[-1] - table[-2] if len(table) > 1 else Fraction(1)
    while len(table) < k:
        table.append(table[-1] + step)
    each = table[k - 1]
    return each if contention.link_cap is None else max(each, k / Fraction(contention.link_cap))


class _Flow:
    """One message of the exact simulator: what of each of its stages is still to come, and when they began and ended.

    The stages are those of its lane: "scatter", "link" (a start-up, then the transfer) and "gather".
    """

    def __init__(self, task: Task, launch_s: Fraction) -> None:
        self.launch_s, self.lane = launch_s, task.lane
        self.start_left, self.transfer_left = Fraction(task.start_s), Fraction(task.transfer_s)
        self.inside_left = {"scatter": Fraction(task.scatter_s), "gather": Fraction(task.gather_s)}
        self.begun: dict[str, Fraction] = {}
        self.ended: dict[str, Fraction] = {}

    def is_in(self, stage: str) -> bool:
        return stage in self.begun and stage not in self.ended

    @property
    def moving(self) -> bool:
        return self.is_in("link") and self.start_left == 0

    def interval(self, stage: str) -> tuple[float, float]:
        return float(self.begun[stage]), float(self.ended[stage])


STAGES = ("scatter", "link", "gather")


def fluid(tasks: Sequence[Task], contention: Contention) -> list[tuple[float, float]]:
    """When each message is on its link, by the simulator's twin."""
    return [flow.interval("link") for flow in _flows(tasks, contention)]


def fluid_stages(tasks: Sequence[Task], contention: Contention) -> list[tuple[tuple[float, float], ...]]:
    """When each message is in each of its stages, by the simulator's twin."""
    return [tuple(flow.interval(stage) for stage in STAGES) for flow in _flows(tasks, contention)]


def _flows(tasks: Sequence[Task], contention: Contention) -> list[_Flow]:
    """The simulator's twin: exact fractions, what is left of each message, no clock of work and no tolerance."""
    launch, flows = Fraction(0), []
    for task in tasks:
        launch = max(launch, Fraction(task.ready_s))
        flows.append(_Flow(task, launch))
    now = Fraction(0)
    while any("gather" not in flow.ended for flow in flows):
        changed = False
        for index, flow in enumerate(flows):
            before = [other for other in flows[:index] if other.lane == flow.lane]
            for stage, last in zip(STAGES, ("", *STAGES), strict=False):
                may_begin = stage not in flow.begun and all(stage in other.ended for other in before)
                if stage == "gather" and not flow.inside_left["gather"]:
                    may_begin = "gather" not in flow.begun  # it gathers nothing, and need not wait
                if may_begin and (last in flow.ended if last else flow.launch_s <= now):
                    flow.begun[stage], changed = now, True
                left = flow.start_left + flow.transfer_left if stage == "link" else flow.inside_left[stage]
                if flow.is_in(stage) and left == 0:
                    flow.ended[stage], changed = now, True
        if changed:
            continue
        moving = [flow for flow in flows if flow.moving]
        speed = 1 / slowdown(contention, len(moving)) if moving else Fraction(0)
        starting = [flow for flow in flows if flow.is_in("link") and not flow.moving]
        inside = [(flow, stage) for flow in flows for stage in ("scatter", "gather") if flow.is_in(stage)]
        steps = [flow.transfer_left / speed for flow in moving] + [flow.start_left for flow in starting]
        steps += [flow.inside_left[stage] for flow, stage in inside]
        steps += [flow.launch_s - now for flow in flows if flow.launch_s > now]
        step = min(steps)
        now += step
        for flow in moving:
            flow.transfer_left -= step * speed
        for flow in starting:
            flow.start_left -= step
        for flow, stage in inside:
            flow.inside_left[stage] -= step
    return flows


def work_done(tasks: Sequence[Task], intervals: Sequence[tuple[float, float]], contention: Contention) -> list[float]:
    """Per message, ∫ dt / slowdown(k(t)) over its transfer, k(t) read off the intervals alone.

    Work is conserved iff that is each message's ``transfer_s``. The slowdown is this module's own, so that a fault
    in the simulator's contention shows.
    """
    moving = [(begin + task.start_s, end) for task, (begin, end) in zip(tasks, intervals, strict=True)]
    edges = sorted({edge for interval in moving for edge in interval})
    done = [0.0] * len(tasks)
    for low, high in pairwise(edges):
        inside = [i for i, (begin, end) in enumerate(moving) if begin <= low and end >= high]
        for i in inside:
            done[i] += (high - low) / float(slowdown(contention, len(inside)))
    return done


def lane_choices(buckets: int, lanes: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of buckets to at most ``lanes`` lanes, up to their names: a new lane is the next number."""
    if buckets == 0:
        yield ()
        return
    for rest in lane_choices(buckets - 1, lanes):
        for lane in range(min(lanes, 1 + max(rest, default=-1) + 1)):
            yield (*rest, lane)


# ------------------------------------------------------------------------------------------------- two levels


def two_level_s(
    nbytes: float, nodes: int, per_node: int, inside: tuple[float, float], across: tuple[float, float]
) -> float:
    """An all-reduce on full nodes, round by round; links are (latency, seconds per byte), and adding costs nothing.

    Each rank passes on a piece to its neighbour in every round of a ring. Across nodes, ``per_node`` rings run at once
    through each node's one card.
    """
    share, total_s = nbytes / per_node, 0.0
    for _round in range(per_node - 1):  # reduce-scatter inside
        total_s += inside[0] + share * inside[1]
    for _round in range(2 * (nodes - 1)):  # every rank's share once around for the sum, once for the result
        total_s += across[0] + per_node * (share / nodes) * across[1]
    for _round in range(per_node - 1):  # all-gather inside
        total_s += inside[0] + share * inside[1]
    return total_s
