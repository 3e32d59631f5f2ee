"""The sharding plan whose step is fastest, within a bound on memory.

Units are consecutive blocks. Where parameters may all be kept, freeing any of them only adds messages, and gathering
farther ahead only starts them earlier, so that just the cuts are open; under a bound on memory, so are the units to
free and how far to prefetch. Where units must have one block each, only those two are. If there are few such plans,
each is simulated. Otherwise a search starts from even cuts into many numbers of units, and moves, merges, halves,
keeps and frees while the simulated step becomes shorter.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from math import inf
from typing import NamedTuple

from anabranch.fsdp.planning.sharded_step import UnitCost, host_order, merged, peak_nbytes, peak_of, rest_of, walk
from anabranch.values.errors import PlanError
from anabranch.values.sharded import Links, ShardedTrace, ShardingPlan, Unit

FEW = 5000  # plans, all of which are simulated
TRIALS = 2000  # plans that a search simulates at most
STARTS = 3  # the best of the even cuts, from which a search starts
MIB = 1 << 20


class Candidate(NamedTuple):
    """A plan in numbers: unit i is blocks edges[i] … edges[i + 1] − 1."""

    edges: tuple[int, ...]
    reshard: tuple[bool, ...]
    prefetch: int


Score = tuple[float, int, int]  # seconds, then bytes, then units: less is better
NEVER: Score = (inf, 0, 0)


def plan(
    trace: ShardedTrace, links: Links, memory_nbytes: int | None = None, *, per_block: bool = False
) -> ShardingPlan:
    """The fastest plan of all whose ``peak_nbytes`` is at most ``memory_nbytes``; of equally fast ones, the smallest.

    ``per_block``: of those with a unit per block. PlanError if even such a plan, each unit freed after forward, needs
    more.
    """
    scores = _Scores(trace, links, memory_nbytes, per_block)
    count, names = len(trace), [block.name for block in trace.blocks]
    least = Candidate(tuple(range(count + 1)), (True,) * count, 1)  # as FSDP2's users make them
    kept = Candidate(least.edges, (False,) * count, count)
    bounded = memory_nbytes is not None
    candidates: Iterable[Candidate] = _all(count, bounded)
    if (2 * 3 ** (count - 1) * count if bounded else 2 ** (count - 1)) > FEW:
        starts = sorted({least, kept, *_starts(trace, bounded)}, key=scores.of)
        candidates = [_climbed(start, scores, TRIALS // STARTS) for start in starts[:STARTS]]
    best = min((least, *candidates), key=scores.of)
    if scores.of(best) == NEVER:
        needed = peak_nbytes(trace, ShardingPlan.per_block(names))
        raise PlanError(
            f"memory_nbytes is {memory_nbytes}: a unit per block, each freed after forward, needs {needed} "
            f"({needed / MIB:.0f} MiB) for gathered parameters and gradients; allow as much, or divide blocks"
        )
    best = scores.slimmed(best)
    pieces = zip(pairwise(best.edges), best.reshard, strict=True)
    return ShardingPlan(tuple(Unit(tuple(names[a:b]), reshard) for (a, b), reshard in pieces), best.prefetch)


class _Scores:
    """Simulates candidates, each once."""

    def __init__(self, trace: ShardedTrace, links: Links, memory_nbytes: int | None, per_block: bool) -> None:
        self._trace, self._links, self._memory_nbytes = trace, links, memory_nbytes
        self._min_units = len(trace) if per_block else 1
        self._rest = UnitCost.of(rest_of(trace), links)
        self._units: dict[tuple[int, int], UnitCost] = {}
        self._known: dict[Candidate, Score] = {}

    def of(self, candidate: Candidate) -> Score:
        if candidate not in self._known:
            self._known[candidate] = self._simulated(candidate)
        return self._known[candidate]

    def slimmed(self, best: Candidate) -> Candidate:
        """The same units with the shortest prefetch that is as fast."""
        candidates = (best._replace(prefetch=prefetch) for prefetch in range(1, best.prefetch + 1))
        return next(candidate for candidate in candidates if self.of(candidate)[0] <= self.of(best)[0])

    def _simulated(self, candidate: Candidate) -> Score:
        if len(candidate.reshard) < self._min_units:
            return NEVER
        actions = list(host_order(candidate.reshard, candidate.prefetch))
        costs = [*(self._unit(low, high) for low, high in pairwise(candidate.edges)), self._rest]
        peak = peak_of([cost.sums for cost in costs], actions)
        if self._memory_nbytes is not None and peak > self._memory_nbytes:
            return NEVER
        finish = walk(costs, self._trace, actions, self._links.overlaps)
        return float(f"{finish.step_s:.10g}"), peak, len(candidate.reshard)  # rounding is no gain

    def _unit(self, low: int, high: int) -> UnitCost:
        if (low, high) not in self._units:
            self._units[low, high] = UnitCost.of(merged(self._trace.blocks[low:high]), self._links)
        return self._units[low, high]


def _all(count: int, bounded: bool) -> Iterator[Candidate]:
    """Every candidate of ``count`` blocks that can be the best."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            edges, units = (0, *inner, count), cuts + 1
            if not bounded:
                yield Candidate(edges, (False,) * units, units)
                continue
            for reshard in product((False, True), repeat=units):
                for prefetch in range(1, units + 1):
                    yield Candidate(edges, reshard, prefetch)


def _starts(trace: ShardedTrace, bounded: bool) -> Iterator[Candidate]:
    """Even cuts, by bytes and by time, into few to many units; all kept, all freed, and the last ones kept."""
    count = len(trace)
    weights = (
        [block.nbytes + 1.0 for block in trace.blocks],
        [b.forward_s + b.backward_s + 1e-9 for b in trace.blocks],
    )
    numbers = sorted({min(count, round(1.3**power)) for power in range(40)})
    for weight, units in product(weights, numbers):
        edges = _even(weight, units)
        units = len(edges) - 1
        if not bounded:
            yield Candidate(edges, (False,) * units, units)
            continue
        for kept, prefetch in product({0, units // 3, 2 * units // 3, units}, {1, 2, units}):
            yield Candidate(edges, (True,) * (units - kept) + (False,) * kept, prefetch)


def _even(weights: Sequence[float], units: int) -> tuple[int, ...]:
    """Edges that divide the blocks into parts of about the same weight; parts without any block are left out."""
    total = list(accumulate(weights, initial=0.0))
    inner = {bisect_left(total, total[-1] * part / units) for part in range(1, units)}
    return tuple(sorted({0, *inner, len(weights)}))


def _climbed(candidate: Candidate, scores: _Scores, trials: int) -> Candidate:
    """Small changes, each kept if it is better, until none is or ``trials`` are spent."""
    improved = True
    while improved and trials > 0:
        improved = False
        for other in _neighbours(candidate):
            trials -= 1
            if scores.of(other) < scores.of(candidate):
                candidate, improved = other, True
                break
            if trials <= 0:
                break
    return candidate


def _neighbours(candidate: Candidate) -> Iterator[Candidate]:
    edges, reshard, prefetch = candidate
    units = len(reshard)
    for other in (prefetch - 1, prefetch + 1, 2 * prefetch):
        if 1 <= other <= units:
            yield candidate._replace(prefetch=other)
    for i in range(units):
        if any(reshard):  # where nothing is freed, nothing needs to be
            yield candidate._replace(reshard=(*reshard[:i], not reshard[i], *reshard[i + 1 :]))
        low, high = edges[i], edges[i + 1]
        if i:
            for far in (1, 2, 4):
                for edge in (low - far, low + far):
                    if edges[i - 1] < edge < high:
                        yield candidate._replace(edges=(*edges[:i], edge, *edges[i + 1 :]))
            merged = reshard[i - 1] or reshard[i]
            fewer = (*reshard[: i - 1], merged, *reshard[i + 1 :])
            yield Candidate((*edges[:i], *edges[i + 1 :]), fewer, max(1, min(prefetch, units - 1)))
        for middle in {low + 1, (low + high) // 2, high - 1}:
            if low < middle < high:
                more = (*reshard[:i], reshard[i], *reshard[i:])
                yield Candidate((*edges[: i + 1], middle, *edges[i + 1 :]), more, prefetch + (prefetch == units))
