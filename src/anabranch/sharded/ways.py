"""Ways to shard a model, by the names that commands have for them: fsdp2, fsdp2:reshard, fsdp2:planned, hsdp, …"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anabranch.sharded.plan import ShardingPlan

KEPT, RESHARD, PLANNED = "", "reshard", "planned"
TITLES: Mapping[str, str] = {
    KEPT: "a unit per block, kept after forward",
    RESHARD: "a unit per block, freed after forward",
    PLANNED: "planned units",
}


@dataclass(frozen=True, slots=True)
class ShardedWay:
    """One of ``WAYS``.

    nodes   the model is sharded inside each node, and averaged between nodes (HSDP); else over all ranks (FSDP2)
    units   KEPT or RESHARD after forward, a unit per block; or PLANNED
    """

    nodes: bool
    units: str

    @property
    def name(self) -> str:
        """In commands."""
        family = "hsdp" if self.nodes else "fsdp2"
        return f"{family}:{self.units}" if self.units else family

    @property
    def title(self) -> str:
        """In tables."""
        return f"{'HSDP' if self.nodes else 'FSDP2'}, {TITLES[self.units]}"

    def per_block(self, names: Iterable[str]) -> ShardingPlan:
        """A unit per block, freed after forward if this way says so."""
        return ShardingPlan.per_block(names, reshard=self.units == RESHARD)


def way_of(name: str, known: Iterable[str] | None = None) -> ShardedWay:
    """The way of this name, which must be among ``known``; by default, any of WAYS."""
    expected = list(WAYS if known is None else known)
    if name not in expected:
        raise ValueError(f"--sharded is {name!r}: expected one of {', '.join(expected)}")
    return WAYS[name]


WAYS: Mapping[str, ShardedWay] = {
    way.name: way for way in (ShardedWay(nodes, units) for nodes in (False, True) for units in TITLES)
}
UNPLANNED = tuple(name for name, way in WAYS.items() if way.units != PLANNED)  # of which no trace has to be known


def help_of(names: Iterable[str]) -> str:
    """These ways in the words of a command's help."""
    return "; ".join(f"{name} ({WAYS[name].title})" for name in names)
