"""Which strategy wins where, and by how much: a scaling in plain words."""

from collections.abc import Sequence
from typing import NamedTuple

from anabranch.report.formatting import count, factor, percent, plain
from anabranch.scaling.result import Curves, NetworkUsed, ScalePoint, Scaling

DDP = "by_bytes"  # whose defaults are those of torch's DistributedDataParallel
WORTH_IT = 1.02  # a gain below this is within the noise of any live step
ENOUGH = 0.95  # of the ideal: where DDP reaches this, nothing needs help


class Gain(NamedTuple):
    """How many times the throughput of another point this one has; least and most within the network's band."""

    middle: float
    low: float
    high: float

    @classmethod
    def over(cls, point: ScalePoint, other: ScalePoint) -> "Gain":
        """Both on the same network: cheap against cheap, dear against dear."""
        per_s = [_throughputs(point), _throughputs(other)]
        ratios = [own / base if base else 1.0 for own, base in zip(*per_s, strict=True)]
        return cls(ratios[0], min(ratios), max(ratios))

    def __str__(self) -> str:
        band = f"{self.low:.2f} to {self.high:.2f} within the band"
        return factor(self.middle) + (f" ({band})" if f"{self.low:.2f}" != f"{self.high:.2f}" else "")


class Row(NamedTuple):
    """The best of each kind at one world size; ``sparse`` is None where all strategies are of one kind.

    ``ddp`` is the first strategy where DDP's is not among them, and ``dense`` the best of all where none is dense.
    """

    world_size: int
    ddp: ScalePoint
    dense: ScalePoint
    sparse: ScalePoint | None

    @property
    def best(self) -> ScalePoint:
        """Whichever has the most throughput; sparse only where that is worth what it may cost in learning."""
        worth_it = self.sparse and Gain.over(self.sparse, self.dense).middle >= WORTH_IT
        return self.sparse if self.sparse and worth_it else self.dense


def rows(scaling: Scaling, curves: Curves) -> list[Row]:
    """Who is best at each world size; among equals the fewest lanes, then buckets, then the first."""
    dense = [s.name for s in scaling.strategies if s.kind == "dense"]
    sparse = [s.name for s in scaling.strategies if s.kind != "dense"]
    if not dense:  # as where only Lean fits: they are held against each other
        dense, sparse = sparse, []
    first = DDP if DDP in curves else next(iter(curves))

    def best(names: Sequence[str], size: int) -> ScalePoint | None:
        points = [curves[name][size] for name in names]
        return min(points, key=lambda p: (-p.speedup, p.lanes, p.buckets), default=None)

    found = []
    for size in scaling.world_sizes:
        ddp = curves[first][size]
        found.append(Row(size, ddp, best(dense, size) or ddp, best(sparse, size)))
    return found


def answer(scaling: Scaling) -> list[str]:
    """Per network: where dense scheduling helps, where sparse wins, where nothing helps, and what is reached."""
    return [f"{network.name}: {' '.join(_sentences(scaling, network))}" for network in scaling.networks]


def _sentences(scaling: Scaling, network: NetworkUsed) -> list[str]:
    table = rows(scaling, scaling.on(network.name))
    base = "DDP's buckets" if table[0].ddp.planner == DDP else plain(table[0].ddp.planner)
    what = "Dense scheduling" if has_dense(scaling) else "Another strategy"
    said = [_dense(table, base, what)]
    if table[0].sparse is not None:
        said.append(_sparse(table))
    said += _nothing(table, base)
    last = table[-1]
    low, high = last.best.efficiencies
    band = f" ({percent(low)} to {percent(high)} within the band)" if percent(low) != percent(high) else ""
    ranks = count(last.world_size, "rank")
    said.append(
        f"At {ranks} {plain(last.best.planner)} is best, with {percent(last.best.efficiency)} efficiency{band}."
    )
    return said


def has_dense(scaling: Scaling) -> bool:
    """Whether any strategy sends all values."""
    return any(strategy.kind == "dense" for strategy in scaling.strategies)


def _dense(table: Sequence[Row], base: str, what: str) -> str:
    gains = {row: Gain.over(row.dense, row.ddp) for row in table}
    helped = [row for row, gain in gains.items() if gain.middle >= WORTH_IT]
    if not helped:
        return f"{what} gains less than {WORTH_IT - 1:.0%} over {base} at any size."
    top = max(helped, key=lambda row: gains[row].middle)
    unsure = [row for row in helped if gains[row].low < WORTH_IT]
    said = (
        f"{what} helps {_where(helped, table)}, most at {top.world_size:,}: "
        f"{plain(top.dense.planner)} is {gains[top]} as fast as {base}."
    )
    return said + _doubt(unsure, table)


def _sparse(table: Sequence[Row]) -> str:
    gains = {row: Gain.over(row.sparse, row.dense) for row in table if row.sparse}
    won = [row for row, gain in gains.items() if gain.middle >= WORTH_IT]
    if not won:
        return f"Sparse gains less than {WORTH_IT - 1:.0%} over the best dense plan at any size."
    top = max(won, key=lambda row: gains[row].middle)
    assert top.sparse is not None
    said = (
        f"Sparse wins {_where(won, table)}, most at {top.world_size:,}: {plain(top.sparse.planner)} is {gains[top]} as "
        "fast as the best dense plan."
    )
    unsure = [row for row in won if gains[row].low < WORTH_IT]
    return said + _doubt(unsure, table)


def _doubt(unsure: Sequence[Row], table: Sequence[Row]) -> str:
    return f" Whether it does {_where(unsure, table)} depends on where in its band the network is." if unsure else ""


def _nothing(table: Sequence[Row], base: str) -> list[str]:
    """Where no strategy gains: because nothing is left to gain, or because nothing takes it away."""
    idle = [row for row in table if Gain.over(row.best, row.ddp).middle < WORTH_IT]
    fine = [row for row in idle if row.ddp.efficiency >= ENOUGH]
    stuck = [row for row in idle if row.ddp.efficiency < ENOUGH]
    said = []
    if fine:
        said.append(f"Nothing needs help {_where(fine, table)}: {base} reach {percent(ENOUGH)} of the ideal and more.")
    if stuck:
        reached = max(row.best.efficiency for row in stuck)
        said.append(
            f"Nothing helps {_where(stuck, table)}: at most {percent(reached)} of the ideal, whatever the plan."
        )
    return said


def _where(some: Sequence[Row], table: Sequence[Row]) -> str:
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


def _throughputs(point: ScalePoint) -> tuple[float, float, float]:
    """Speed-up in the middle, on the cheapest network and on the dearest."""
    at_once = point.speedup * point.iteration_s
    return point.speedup, at_once / (point.iteration_low_s or 1.0), at_once / (point.iteration_high_s or 1.0)
