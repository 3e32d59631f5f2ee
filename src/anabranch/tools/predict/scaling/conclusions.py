"""Which strategy wins at which world size, and by how much, in sentences."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anabranch.tools.predict.scaling.result import DDP_DEFAULT, Curves, NetworkUsed, ScalePoint, Scaling
from anabranch.values.kinds.names import COMPRESSED

WORTH_IT = 1.02  # a smaller gain is within the noise of a measured step
ENOUGH = 0.95  # efficiency of DDP from which on no other strategy is needed


class Gain(NamedTuple):
    """Throughput of one point over that of another: in the middle of the network's band, and least and most in it."""

    middle: float
    low: float
    high: float

    @classmethod
    def over(cls, point: ScalePoint, other: ScalePoint) -> "Gain":
        """Both points are compared on the same network: lowest cost with lowest, highest with highest."""
        speedups = (
            (one.speedup, alone_s / (one.iteration_low_s or 1.0), alone_s / (one.iteration_high_s or 1.0))
            for one, alone_s in ((point, point.speedup * point.iteration_s), (other, other.speedup * other.iteration_s))
        )
        ratios = [own / base if base else 1.0 for own, base in zip(*speedups, strict=True)]
        return cls(ratios[0], min(ratios), max(ratios))

    def __str__(self) -> str:
        band = f"{self.low:.2f} to {self.high:.2f} within the band"
        middle = f"{self.middle:.2f}×" if self.middle < 100 else f"{self.middle:.0f}×"
        return middle + (f" ({band})" if f"{self.low:.2f}" != f"{self.high:.2f}" else "")


class BestAtSize(NamedTuple):
    """The best strategy of each kind at one world size.

    ddp         the strategy that gains are relative to: DDP's default buckets, or the first strategy if those are not
                among them
    dense       the best of those that send every value in full, or of all where there is none
    quantised   the best of those that round every value, the most faithful of equals; None where there is none
    sparse      the best of those that send some values; None where there is none
    """

    world_size: int
    ddp: ScalePoint
    dense: ScalePoint
    quantised: ScalePoint | None
    sparse: ScalePoint | None

    @property
    def best(self) -> ScalePoint:
        """The point of highest throughput; a less faithful one only if it gains enough, as it may cost accuracy."""
        return _worth_it([self.dense, *filter(None, [self.quantised, self.sparse])])


def best_at_sizes(scaling: Scaling, curves: Curves) -> list[BestAtSize]:
    """The best strategies at each world size; ties go to the fewest lanes, then the fewest buckets, then the first."""
    names: dict[str, list[str]] = {"dense": [], "quantised": [], "sparse": []}
    for strategy in scaling.strategies:
        names[strategy.sends].append(strategy.name)
    if not names["dense"]:  # as where only Lean fits in memory: the others are compared with each other
        names = {"dense": [*names["quantised"], *names["sparse"]], "quantised": [], "sparse": []}
    first = DDP_DEFAULT if DDP_DEFAULT in curves else next(iter(curves))

    def best(sent: str, size: int) -> ScalePoint | None:
        points = [curves[name][size] for name in names[sent]]
        return min(points, key=lambda p: (-p.speedup, p.lanes, p.buckets), default=None)

    found = []
    for size in scaling.world_sizes:
        ddp = curves[first][size]
        rounded = [curves[name][size] for name in sorted(names["quantised"], key=_coarseness)]
        quantised = _worth_it(rounded) if rounded else None
        found.append(BestAtSize(size, ddp, best("dense", size) or ddp, quantised, best("sparse", size)))
    return found


def _coarseness(name: str) -> int:
    """The place of a strategy that rounds among the kinds, which begin with the most faithful."""
    return next((place for place, kind in enumerate(COMPRESSED) if kind in name), len(COMPRESSED))


def _worth_it(points: Sequence[ScalePoint]) -> ScalePoint:
    """Of points from the most to the least faithful the last that gains enough over the one chosen before it."""
    chosen = points[0]
    for point in points[1:]:
        if Gain.over(point, chosen).middle >= WORTH_IT:
            chosen = point
    return chosen


def answer(scaling: Scaling) -> list[str]:
    """A text per network: where dense scheduling helps, where compression wins, where nothing does; the efficiency."""
    return [f"{network.name}: {' '.join(_sentences(scaling, network))}" for network in scaling.networks]


def _sentences(scaling: Scaling, network: NetworkUsed) -> list[str]:
    table = best_at_sizes(scaling, scaling.on(network.name))
    base = "DDP's buckets" if table[0].ddp.planner == DDP_DEFAULT else table[0].ddp.planner
    what = "Dense scheduling" if has_dense(scaling) else "Another strategy"
    said = [_gains(f"{what} helps", {row.world_size: (row.dense, row.ddp) for row in table}, base)]
    for verb, kind in (("Rounding wins", "quantised"), ("Sparse wins", "sparse")):
        pairs = {row.world_size: (point, row.dense) for row in table if (point := getattr(row, kind)) is not None}
        if pairs:
            said.append(_gains(verb, pairs, "the best dense plan"))
    said += _nothing(table, base)
    last = table[-1]
    low, high = last.best.efficiencies
    band = f" ({_percent(low)} to {_percent(high)} within the band)" if _percent(low) != _percent(high) else ""
    ranks = f"{last.world_size:,} rank{'s' * (last.world_size != 1)}"
    said.append(f"At {ranks} {last.best.planner} is best, with {_percent(last.best.efficiency)} efficiency{band}.")
    return said


def has_dense(scaling: Scaling) -> bool:
    """Whether any strategy sends every value in full."""
    return any(strategy.kind == "dense" for strategy in scaling.strategies)


def _gains(verb: str, pairs: Mapping[int, tuple[ScalePoint, ScalePoint]], base: str) -> str:
    """At which world sizes the first point of a pair gains over the second one, which is called ``base``."""
    sizes, gains = list(pairs), {size: Gain.over(*pair) for size, pair in pairs.items()}
    won = [size for size in sizes if gains[size].middle >= WORTH_IT]
    if not won:
        return f"{verb.rpartition(' ')[0]} gains less than {WORTH_IT - 1:.0%} over {base} at any size."
    top = max(won, key=lambda size: gains[size].middle)
    said = f"{verb} {_where(won, sizes)}, most at {top:,}: {pairs[top][0].planner} is {gains[top]} as fast as {base}."
    if unsure := [size for size in won if gains[size].low < WORTH_IT]:
        said += f" Whether it does {_where(unsure, sizes)} depends on where in its band the network is."
    return said


def _nothing(table: Sequence[BestAtSize], base: str) -> list[str]:
    """Where no strategy gains: because DDP is close to the ideal, or because no strategy comes closer than DDP."""
    sizes = [row.world_size for row in table]
    idle = [row for row in table if Gain.over(row.best, row.ddp).middle < WORTH_IT]
    said = []
    if fine := [row.world_size for row in idle if row.ddp.efficiency >= ENOUGH]:
        said.append(f"Nothing needs help {_where(fine, sizes)}: {base} reach {_percent(ENOUGH)} of the ideal and more.")
    if stuck := {row.world_size: row.best.efficiency for row in idle if row.ddp.efficiency < ENOUGH}:
        reached = _percent(max(stuck.values()))
        said.append(f"Nothing helps {_where(list(stuck), sizes)}: at most {reached} of the ideal, whatever the plan.")
    return said


def _where(sizes: Sequence[int], everywhere: Sequence[int]) -> str:
    """from 4 to 256 ranks, or at 4, 8 and 2,048 ranks."""
    if sizes == everywhere and len(sizes) > 1:
        return f"at every size from {sizes[0]:,} to {sizes[-1]:,} ranks"
    start = everywhere.index(sizes[0])
    if len(sizes) > 2 and everywhere[start : start + len(sizes)] == sizes:
        return f"from {sizes[0]:,} to {sizes[-1]:,} ranks"
    shown = [f"{size:,}" for size in sizes]
    return f"at {' and '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))} ranks"


def _percent(share: float) -> str:
    return f"{max(share, 0.0):.1%}"  # rounding noise below zero is zero
