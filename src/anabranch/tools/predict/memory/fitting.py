"""The largest batch that fits in memory for each strategy of a scaling study."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from anabranch.planning.footprint import FRAGMENTATION, Setting, TrainingMode
from anabranch.tools.predict.memory.estimator import MemoryEstimator
from anabranch.tools.predict.memory.training_modes import DDP, OUR_MODES
from anabranch.tools.predict.scaling.compression import Compression
from anabranch.tools.predict.scaling.result import Kind
from anabranch.values.kinds.names import COMPRESSED, OKTOPK, density_of
from anabranch.values.kinds.options import OkTopk


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
    largest_batch = cache(estimator.largest_batch)  # several strategies have the same memory
    modes = {name: _mode(name, kind, ranks, sharded) for name, kind in kinds.items()}
    batches = {name: largest_batch(mode, setting, limit_nbytes) for name, (mode, setting) in modes.items()}
    lost = f"{FRAGMENTATION:.0%} of it is lost between torch's blocks"
    assumptions = [f"memory: {said}" for said in (*estimator.assumptions, f"{optimizer_name} as the optimizer", lost)]
    if sharded is not None:
        inside = f" in nodes of {sharded.ranks_per_node}" if sharded.ranks_per_node else ""
        assumptions.append(f"memory: of sharded models at {sharded.ranks} ranks{inside}; with more, shards are smaller")
    if left_out := [name for name, batch in batches.items() if not batch]:
        assumptions.append(f"left out, since not even one sample fits: {', '.join(left_out)}")
    batches = {name: batch for name, batch in batches.items() if batch}
    shown = {"dense" if kinds[name] == "dense" else name: batch for name, batch in batches.items()}
    assumptions.append(f"batch per rank: {', '.join(f'{name} {batch:,}' for name, batch in shown.items())}")
    return Fitting(batches, assumptions)


def _mode(name: str, kind: Kind, ranks: int, sharded: Setting | None) -> tuple[str, Setting]:
    """The mode whose memory a strategy needs, at the highest density that it may choose; at 1 if it has none."""
    if kind == "sharded":
        return name, sharded or Setting(ranks=ranks, density=1.0)
    if kind == "dense":
        return DDP, Setting(ranks=ranks, density=1.0)
    compression = Compression.named(name)
    density = max((density_of(kind) or 0.0 for kind in compression.kinds), default=0.0)
    # A residual, of all values, outweighs messages, of two buckets. Without one, the first kind has the largest ones.
    residual = [kind for kind in compression.kinds if kind in COMPRESSED and TrainingMode(kind).keeps_residual]
    training = TrainingMode(OKTOPK if density else [*residual, *compression.kinds][0], compression.lean)
    setting = Setting(ranks=ranks, density=density or 1.0, options=OkTopk(wire=compression.wire))
    return next(mode for mode, known in OUR_MODES.items() if known == training), setting
