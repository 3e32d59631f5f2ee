"""Which strategy wins at which world size, and by how much, in sentences."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anabranch.tools.predict.scaling.named_planners import DDP_DEFAULT
from anabranch.tools.predict.scaling.result import Curves, NetworkUsed, ScalePoint, Scaling
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
        pairs = zip(_speedups(point), _speedups(other), strict=True)
        ratios = [own / base if base else 1.0 for own, base in pairs]
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
    said = [_dense(table, base, what)]
    if table[0].quantised is not None:
        said.append(_compressed("Rounding", {row: row.quantised for row in table if row.quantised}))
    if table[0].sparse is not None:
        said.append(_compressed("Sparse", {row: row.sparse for row in table if row.sparse}))
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


def _dense(table: Sequence[BestAtSize], base: str, what: str) -> str:
    gains = {row: Gain.over(row.dense, row.ddp) for row in table}
    helped = [row for row, gain in gains.items() if gain.middle >= WORTH_IT]
    if not helped:
        return f"{what} gains less than {WORTH_IT - 1:.0%} over {base} at any size."
    top = max(helped, key=lambda row: gains[row].middle)
    unsure = [row for row in helped if gains[row].low < WORTH_IT]
    said = (
        f"{what} helps {_where(helped, table)}, most at {top.world_size:,}: "
        f"{top.dense.planner} is {gains[top]} as fast as {base}."
    )
    return said + _doubt(unsure, table)


def _compressed(what: str, points: Mapping[BestAtSize, ScalePoint]) -> str:
    """Where these points, one for every size, win over the best dense plan."""
    table = list(points)
    gains = {row: Gain.over(point, row.dense) for row, point in points.items()}
    won = [row for row, gain in gains.items() if gain.middle >= WORTH_IT]
    if not won:
        return f"{what} gains less than {WORTH_IT - 1:.0%} over the best dense plan at any size."
    top = max(won, key=lambda row: gains[row].middle)
    said = (
        f"{what} wins {_where(won, table)}, most at {top.world_size:,}: {points[top].planner} is {gains[top]} as fast "
        "as the best dense plan."
    )
    unsure = [row for row in won if gains[row].low < WORTH_IT]
    return said + _doubt(unsure, table)


def _doubt(unsure: Sequence[BestAtSize], table: Sequence[BestAtSize]) -> str:
    return f" Whether it does {_where(unsure, table)} depends on where in its band the network is." if unsure else ""


def _nothing(table: Sequence[BestAtSize], base: str) -> list[str]:
    """Where no strategy gains: because DDP is close to the ideal, or because no strategy comes closer than DDP."""
    idle = [row for row in table if Gain.over(row.best, row.ddp).middle < WORTH_IT]
    fine = [row for row in idle if row.ddp.efficiency >= ENOUGH]
    stuck = [row for row in idle if row.ddp.efficiency < ENOUGH]
    said = []
    if fine:
        said.append(f"Nothing needs help {_where(fine, table)}: {base} reach {_percent(ENOUGH)} of the ideal and more.")
    if stuck:
        reached = max(row.best.efficiency for row in stuck)
        said.append(
            f"Nothing helps {_where(stuck, table)}: at most {_percent(reached)} of the ideal, whatever the plan."
        )
    return said


def _where(some: Sequence[BestAtSize], table: Sequence[BestAtSize]) -> str:
    """from 4 to 256 ranks, or at 4, 8 and 2,048 ranks."""
    sizes = [row.world_size for row in some]
    everywhere = [row.world_size for row in table]
    if sizes == everywhere and len(sizes) > 1:
        return f"at every size from {sizes[0]:,} to {sizes[-1]:,} ranks"
    start = everywhere.index(sizes[0])
    if len(sizes) > 2 and everywhere[start : start + len(sizes)] == sizes:
        return f"from {sizes[0]:,} to {sizes[-1]:,} ranks"
    shown = [f"{size:,}" for size in sizes]
    return f"at {' and '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))} ranks"


def _speedups(point: ScalePoint) -> tuple[float, float, float]:
    """Speed-up in the middle of the band, at its lowest cost and at its highest."""
    single_rank_s = point.speedup * point.iteration_s
    return (
        point.speedup,
        single_rank_s / (point.iteration_low_s or 1.0),
        single_rank_s / (point.iteration_high_s or 1.0),
    )


def _percent(share: float) -> str:
    return f"{max(share, 0.0):.1%}"  # rounding noise below zero is zero
