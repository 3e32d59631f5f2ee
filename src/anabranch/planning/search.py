"""Local search over layouts (which run of gradients is a bucket, on which lane) with the simulator as objective."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple, Self

from anabranch.planning.simulator.iteration import Message, schedule
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace


class Run(NamedTuple):
    """Gradients ``low`` … ``high − 1`` of one dtype, in ready order, on a lane."""

    kind: int
    low: int
    high: int
    lane: int


class Layout(NamedTuple):
    """A plan in numbers: its runs in launch order, which is the order in which they are complete."""

    runs: tuple[Run, ...]

    def dealt(self, lanes: int) -> Self:
        """The same buckets on ``lanes`` lanes in turn."""
        return type(self)(tuple(run._replace(lane=index % lanes) for index, run in enumerate(self.runs)))

    def plan(self, trace: Trace) -> Plan:
        """The layout in names, its lanes numbered without gaps in order of first use."""
        parts = trace.by_kind()
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(run.lane for run in self.runs))}
        return Plan(tuple(
            Bucket(tuple(t.name for t in parts[run.kind][run.low : run.high]), lanes[run.lane]) for run in self.runs
        ))  # fmt: skip


class Search:
    """Keeps the best layout offered so far: least finish, then fewest lanes, then fewest buckets.

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
        self._total = [[0] for _ in parts]
        for total, part in zip(self._total, parts, strict=True):
            for tensor in part:
                total.append(total[-1] + tensor.cost_nbytes(collective))
        self._seen: set[Layout] = set()
        self._best: tuple[tuple[float, int, int], Layout] | None = None

    def layout(self, plan: Plan) -> Layout:
        """A plan, whose buckets are consecutive within each dtype, in numbers."""
        runs = []
        for bucket in plan.buckets:
            kind, low = self._where[bucket.names[0]]
            runs.append(Run(kind, low, low + len(bucket.names), bucket.lane))
        return Layout(tuple(runs))

    @property
    def best(self) -> Layout:
        """The best layout so far."""
        if self._best is None:
            raise ValueError("nothing was offered to the search yet")
        return self._best[1]

    def offer(self, layout: Layout) -> bool:
        """Simulate a layout; true if it is the best so far."""
        if layout in self._seen:
            return False
        self._seen.add(layout)
        queue: list[Message] = []
        # A lower bound first: no message ends before it is ready and has travelled by itself. The last message is the
        # likeliest to be too late, so most layouts are rejected after a few messages. The margin is for rounding.
        too_late_s = inf if self._best is None else self._best[0][0] * (1 + 1e-12)
        start_s = self._curve.start_s
        launched = len(layout.runs)
        for kind, low, high, lane in reversed(layout.runs):
            launched -= 1
            cost_s = self._curve.seconds(self._total[kind][high] - self._total[kind][low])
            ready_s = self._ready_s[kind][high - 1] + launched * self._delay_s
            if ready_s + cost_s > too_late_s:
                return False
            queue.append(Message(ready_s, lane, start_s, cost_s - start_s))
        queue.reverse()
        computed_s = self._backward_s + len(queue) * self._delay_s
        finish_s = max(computed_s, *(end_s for _, end_s in schedule(queue, self._contention)))
        score = (finish_s, len({run.lane for run in layout.runs}), len(layout.runs))
        if self._best is not None and score >= self._best[0]:
            return False
        self._best = (score, layout)
        return True

    def polish(self, trials: int, lanes: int) -> None:
        """Try small changes of the best layout, starting over from every improvement, at most ``trials`` in all."""
        improved = True
        while improved and trials > 0:
            improved = False
            for layout in self._neighbours(self.best, lanes):
                if layout in self._seen:
                    continue
                trials -= 1
                if self.offer(layout):
                    improved = True
                    break
                if trials <= 0:
                    break

    def _neighbours(self, layout: Layout, lanes: int) -> Iterator[Layout]:
        """Late buckets first, since what is sent last is what is exposed."""
        runs = layout.runs
        for index in reversed(range(len(runs))):
            run = runs[index]
            used = min(lanes, 1 + max(other.lane for other in runs) + 1)
            for lane in range(used):
                if lane != run.lane:
                    yield self._replaced(layout, {index: [run._replace(lane=lane)]})
            following = next((k for k in range(index + 1, len(runs)) if runs[k].kind == run.kind), None)
            if following is not None:
                after = runs[following]
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

    def _replaced(self, layout: Layout, changes: dict[int, list[Run]]) -> Layout:
        runs = [new for index, run in enumerate(layout.runs) for new in changes.get(index, [run])]
        return Layout(tuple(sorted(runs, key=lambda run: self._place[run.kind][run.high - 1])))

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
