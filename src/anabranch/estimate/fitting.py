"""The largest batch that fits in memory for each strategy of a scaling study."""

from collections.abc import Mapping
from typing import NamedTuple

from anabranch.estimate.estimator import MemoryEstimator
from anabranch.footprint.account import DDP, FRAGMENTATION, OKTOPK, WAYS, Setting, Way
from anabranch.scaling.compression import Compression
from anabranch.scaling.result import Kind
from anabranch.sparse.naming import density_of


class Fitting(NamedTuple):
    """The largest batch per rank of each strategy that fits with at least one sample, and what that assumes.

    ``assumptions`` also names the strategies that were left out because not even one sample fits.
    """

    batches: Mapping[str, int]
    assumptions: list[str]


def largest_batches(
    estimator: MemoryEstimator,
    kinds: Mapping[str, Kind],
    limit_nbytes: int,
    ranks: int,
    optimizer_name: str,
    sharded: Setting | None = None,
) -> Fitting:
    """The batch of each strategy of ``kinds`` (``scaling.strategy_kinds``) in ``limit_nbytes`` per rank.

    ``optimizer_name`` is the word for the estimator's optimizer in the assumptions. ``sharded`` is the setting of
    strategies that shard the model: the fewer ranks, the more each of them holds.
    """
    largest: dict[tuple[str, float], int] = {}
    batches: dict[str, int] = {}
    for name, kind in kinds.items():
        mode, density = _mode(name, kind)
        if (mode, density) not in largest:
            setting = sharded if sharded is not None and kind == "sharded" else Setting(ranks=ranks, density=density)
            largest[mode, density] = estimator.largest_batch(mode, setting, limit_nbytes)
        batches[name] = largest[mode, density]
    assumptions = [
        *(f"memory: {said}" for said in estimator.assumptions),
        f"memory: {optimizer_name} as the optimizer",
        f"memory: {FRAGMENTATION:.0%} of it is lost between torch's blocks",
    ]
    if sharded is not None:
        inside = f" in nodes of {sharded.ranks_per_node}" if sharded.ranks_per_node else ""
        assumptions.append(f"memory: of sharded models at {sharded.ranks} ranks{inside}; with more, shards are smaller")
    if left_out := [name for name, batch in batches.items() if not batch]:
        assumptions.append(f"left out, since not even one sample fits: {', '.join(left_out)}")
    batches = {name: batch for name, batch in batches.items() if batch}
    shown = {"dense" if kinds[name] == "dense" else name: batch for name, batch in batches.items()}
    assumptions.append(f"batch per rank: {', '.join(f'{name} {batch:,}' for name, batch in shown.items())}")
    return Fitting(batches, assumptions)


def _mode(name: str, kind: Kind) -> tuple[str, float]:
    """The mode whose memory a strategy needs, and the highest density that it may choose; 1 if it has none."""
    if kind in ("dense", "sharded"):
        return (DDP if kind == "dense" else name), 1.0
    compression = Compression.named(name)
    density = max((density_of(kind) or 0.0 for kind in compression.kinds), default=0.0)
    way = Way(OKTOPK if density else compression.kinds[0], compression.lean)
    return next(mode for mode, known in WAYS.items() if known == way), density or 1.0
