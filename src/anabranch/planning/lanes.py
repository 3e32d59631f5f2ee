"""Planners for simultaneous messages: the published ASC-WFBP rule, and a search whose objective is the simulator."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

from anabranch.planning.by_size import by_bytes
from anabranch.planning.merge import mgwfbp, optimal, published, using
from anabranch.planning.simulator import SimulatedMessage, ends_s
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace

# Factors on the real costs, with which the exact one-lane plan is made for further candidates. A higher start-up cost
# gives fewer buckets and a lower cost per byte later ones: lanes hide each other's start-up and share the link.
START_FACTORS = (0.5, 1.0, 4.0)
BYTE_FACTORS = (0.1, 0.3, 1.0)

# Numbers of buckets of equal size, which no other candidate has: best where lanes do not slow each other.
EQUAL_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def asc(trace: Trace, network: Network, lanes: int = 2) -> Plan:
    """The published rule for simultaneous communication (ASC-WFBP): merge only what need not wait.

    The next gradient joins a bucket if it is ready before the bucket could start. The buckets go to ``lanes`` lanes in
    turn. When a bucket could start is computed as if there were one lane, as published, and with the straight line
    nearest to the curve. The rule ignores how much lanes slow each other.
    """
    _check(lanes)
    start_s, s_per_byte = network.curve("dense").line()
    return published(trace, start_s, s_per_byte, patience_s=0.0, lanes=lanes)


def lanes(trace: Trace, network: Network, lanes: int = 4, polish: int = 300, collective: str = "dense") -> Plan:
    """Merging and 1 … ``lanes`` lanes together: the best of many candidates in the simulator, improved by small moves.

    Every message is of the kind ``collective``, at its prices.

    Candidates are the published rules and the exact one-lane optimum under several scaled costs, dealt to every number
    of lanes; the best is then improved in at most ``polish`` trials (``LaneSearch``). Never worse than
    ``optimal``; ties go to fewer lanes, then fewer buckets. Not proven best: benchmarks/ has its gap to brute force.
    Relies on the network's contention; a network that was not measured assumes that one message fills the link.
    """
    _check(lanes)
    search = LaneSearch(trace, network, collective)
    for layout in dict.fromkeys(map(search.layout, _candidates(trace, network, collective))):
        for count in range(1, lanes + 1):
            search.offer(dealt(layout, count))
    search.polish(polish, lanes)
    return using(plan_of(search.best, trace), collective)


def _candidates(trace: Trace, network: Network, collective: str) -> Iterator[Plan]:
    yield optimal(trace, network, collective=collective)
    yield mgwfbp(trace, network)
    for parts in EQUAL_PARTS:
        yield by_bytes(trace, network, cap_nbytes=max(1, trace.nbytes // parts))
    start_s, s_per_byte = network.curve(collective).line()
    for start_factor, byte_factor in product(START_FACTORS, BYTE_FACTORS):
        a, b = start_factor * start_s, byte_factor * s_per_byte
        yield optimal(trace, Network.linear(network.world_size, a, b))
        yield published(trace, a, b, patience_s=a)
        yield published(trace, a, b, patience_s=0.0)


def _check(lanes: int) -> None:
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}: expected at least 1")


class Run(NamedTuple):
    """Gradients ``low`` … ``high − 1`` of one dtype, in ready order, on a lane."""

    kind: int
    low: int
    high: int
    lane: int


# A plan in numbers: its runs in launch order, which is the order in which they are complete.
LaneLayout = tuple[Run, ...]


def dealt(layout: LaneLayout, lanes: int) -> LaneLayout:
    """The same buckets on ``lanes`` lanes in turn."""
    return tuple(run._replace(lane=index % lanes) for index, run in enumerate(layout))


def plan_of(layout: LaneLayout, trace: Trace) -> Plan:
    """The layout in names, its lanes numbered without gaps in order of first use."""
    parts = trace.by_kind()
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(run.lane for run in layout))}
    return Plan(tuple(
        Bucket(tuple(t.name for t in parts[run.kind][run.low : run.high]), lanes[run.lane]) for run in layout
    ))  # fmt: skip


class LaneSearch:
    """Local search over layouts with the simulator as objective; keeps the best one offered so far.

    Best is the least finish, then the fewest lanes, then the fewest buckets.

    ``collective``: the kind of all messages.
    """

    def __init__(self, trace: Trace, network: Network, collective: str = "dense") -> None:
        self._contention = network.contention
        self._curve, self._delay_s = network.curve(collective), network.delay_s(collective)
        self._backward_s = trace.backward_s
        parts = trace.by_kind()
        place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
        self._place = [[place[t.name] for t in part] for part in parts]
        self._where = {t.name: (kind, i) for kind, part in enumerate(parts) for i, t in enumerate(part)}
        self._ready_s = [[t.ready_s for t in part] for part in parts]
        self._total = [list(accumulate((t.cost_nbytes(collective) for t in part), initial=0)) for part in parts]
        self._own_total = [list(accumulate((t.nbytes for t in part), initial=0)) for part in parts]
        self._inside_s = partial(network.inside_s, collective)
        self._seen: set[LaneLayout] = set()
        self.best: LaneLayout = ()  # empty before the first offer
        self._best_score = (inf, 0, 0)

    def layout(self, plan: Plan) -> LaneLayout:
        """A plan, whose buckets are consecutive within each dtype, in numbers."""
        firsts = [(*self._where[bucket.names[0]], bucket) for bucket in plan.buckets]
        return tuple(Run(kind, low, low + len(bucket.names), bucket.lane) for kind, low, bucket in firsts)

    def offer(self, layout: LaneLayout) -> bool:
        """Simulate a layout; true if it is the best so far."""
        if layout in self._seen:
            return False
        self._seen.add(layout)
        queue: list[SimulatedMessage] = []
        # A lower bound first: no message ends before it is ready and has travelled by itself. The last message is the
        # likeliest to be too late, so most layouts are rejected after a few messages. The margin is for rounding.
        too_late_s = self._best_score[0] * (1 + 1e-12)
        start_s = self._curve.start_s
        launched = len(layout)
        for kind, low, high, lane in reversed(layout):
            launched -= 1
            cost_s = self._curve.seconds(self._total[kind][high] - self._total[kind][low])
            inside_s = self._inside_s(self._own_total[kind][high] - self._own_total[kind][low])
            ready_s = self._ready_s[kind][high - 1] + launched * self._delay_s
            if ready_s + cost_s + sum(inside_s) > too_late_s:
                return False
            queue.append(SimulatedMessage(ready_s, lane, start_s, cost_s - start_s, *inside_s))
        queue.reverse()
        computed_s = self._backward_s + len(queue) * self._delay_s
        finish_s = max(computed_s, *ends_s(queue, self._contention))
        score = (finish_s, len({run.lane for run in layout}), len(layout))
        if score >= self._best_score:
            return False
        self.best, self._best_score = layout, score
        return True

    def polish(self, trials: int, lanes: int) -> None:
        """Try small changes of the best layout, starting over from every improvement, at most ``trials`` in all."""
        left, improved = iter(range(trials)), True
        while improved:
            unseen = (layout for layout in self._neighbours(self.best, lanes) if layout not in self._seen)
            improved = any(self.offer(layout) for _, layout in zip(left, unseen, strict=False))

    def _neighbours(self, layout: LaneLayout, lanes: int) -> Iterator[LaneLayout]:
        """Late buckets first, since what is sent last is what is exposed."""
        used = min(lanes, 1 + max(run.lane for run in layout) + 1)
        for index in reversed(range(len(layout))):
            run = layout[index]
            for lane in range(used):
                if lane != run.lane:
                    yield self._replaced(layout, {index: [run._replace(lane=lane)]})
            following = next((k for k in range(index + 1, len(layout)) if layout[k].kind == run.kind), None)
            if following is not None:
                after = layout[following]
                for cut in self._shifts(run, after):
                    yield self._replaced(
                        layout, {index: [run._replace(high=cut)], following: [after._replace(low=cut)]}
                    )
                merged = Run(run.kind, run.low, after.high, after.lane)
                yield self._replaced(layout, {index: [], following: [merged]})
            middle = self._middle(run)
            if run.low < middle < run.high:
                for lane in range(used):
                    halves = [run._replace(high=middle), run._replace(low=middle, lane=lane)]
                    yield self._replaced(layout, {index: halves})

    def _replaced(self, layout: LaneLayout, changes: dict[int, list[Run]]) -> LaneLayout:
        runs = [new for index, run in enumerate(layout) for new in changes.get(index, [run])]
        return tuple(sorted(runs, key=lambda run: self._place[run.kind][run.high - 1]))

    @staticmethod
    def _shifts(run: Run, after: Run) -> Iterator[int]:
        """Other places for the cut between two neighbours: one gradient away, a quarter, a half of a bucket away."""
        for share in (0, 4, 2):
            step = max(1, (run.high - run.low) // share if share else 1)
            if run.high - step > run.low:
                yield run.high - step
            step = max(1, (after.high - after.low) // share if share else 1)
            if run.high + step < after.high:
                yield run.high + step

    def _middle(self, run: Run) -> int:
        """The cut that halves a run's bytes."""
        total = self._total[run.kind]
        half = (total[run.low] + total[run.high]) / 2
        return min(range(run.low + 1, run.high), key=lambda cut: abs(total[cut] - half), default=run.low)
