"""Ways to shard a model, by the names that commands have for them: fsdp2, fsdp2:reshard, fsdp2:planned, hsdp@int8, …"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from anabranch.fsdp.planning.plan import ShardingPlan
from anabranch.values.kinds.names import COMPRESSED, DENSE

KEPT, RESHARD, PLANNED = "", "reshard", "planned"
TITLES: Mapping[str, str] = {
    KEPT: "a unit per block, kept after forward",
    RESHARD: "a unit per block, freed after forward",
    PLANNED: "planned units",
}

SPARSE = re.compile(r"oktopk:(0?\.0*[1-9]\d*|1)")  # a share of the elements: above 0, and 1 at most


@dataclass(frozen=True, slots=True)
class ShardedWay:
    """One of ``WAYS``, or one of them with another exchange between nodes.

    nodes      the model is sharded inside each node, and averaged between nodes (HSDP); else over all ranks (FSDP2)
    units      KEPT or RESHARD after forward, a unit per block; or PLANNED
    exchange   between nodes: dense, as stock HSDP does, or the kind of ``ab.replicate``, such as "int8", "oktopk:0.01"
    """

    nodes: bool
    units: str
    exchange: str = DENSE

    @property
    def name(self) -> str:
        """In commands."""
        family = "hsdp" if self.nodes else "fsdp2"
        return f"{family}{':' * bool(self.units)}{self.units}{f'@{self.exchange}' * (self.exchange != DENSE)}"

    @property
    def title(self) -> str:
        """In tables."""
        between = f", {self.exchange} between nodes" if self.exchange != DENSE else ""
        return f"{'HSDP' if self.nodes else 'FSDP2'}, {TITLES[self.units]}{between}"

    def per_block(self, names: Iterable[str]) -> ShardingPlan:
        """A unit per block, freed after forward if this way says so."""
        return ShardingPlan.per_block(names, reshard=self.units == RESHARD)


def way_of(name: str, known: Iterable[str] | None = None) -> ShardedWay:
    """The way of this name, which must be among ``known`` but for its exchange; by default, any of WAYS."""
    plain, at, exchange = name.partition("@")
    expected = list(WAYS if known is None else known)
    if plain not in expected:
        raise ValueError(f"--sharded is {name!r}: expected one of {', '.join(expected)}")
    way = WAYS[plain]
    if not at:
        return way
    if not way.nodes or not (exchange in COMPRESSED or SPARSE.fullmatch(exchange)):
        raise ValueError(
            f"--sharded is {name!r}: expected, for another exchange between nodes, hsdp and one of "
            f"{', '.join(COMPRESSED)}, or oktopk with a density, such as hsdp@int8 or hsdp:reshard@oktopk:0.01"
        )
    return replace(way, exchange=exchange)


WAYS: Mapping[str, ShardedWay] = {
    way.name: way for way in (ShardedWay(nodes, units) for nodes in (False, True) for units in TITLES)
}
UNPLANNED = tuple(name for name, way in WAYS.items() if way.units != PLANNED)  # of which no trace has to be known


def help_of(names: Iterable[str]) -> str:
    """These ways in the words of a command's help."""
    listed = "; ".join(f"{name} ({WAYS[name].title})" for name in names)
    return f"{listed}; hsdp@int8 and the like, with another exchange between nodes (ab.replicate)"
