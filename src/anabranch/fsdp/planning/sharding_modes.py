"""Modes of sharding a model, by the names that commands use: fsdp2, fsdp2:reshard, fsdp2:planned, hsdp@int8, …"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from anabranch.values.kinds.names import COMPRESSED, DENSE, density_of
from anabranch.values.sharded import ShardingPlan

KEPT, RESHARD, PLANNED = "", "reshard", "planned"
TITLES: Mapping[str, str] = {
    KEPT: "a unit per block, kept after forward",
    RESHARD: "a unit per block, freed after forward",
    PLANNED: "planned units",
}


@dataclass(frozen=True, slots=True)
class ShardingMode:
    """One of ``SHARDING_MODES``, or one of them with another exchange between nodes.

    nodes      the model is sharded inside each node, and averaged between nodes (HSDP); else over all ranks (FSDP2)
    units      KEPT or RESHARD after forward, a unit per block; or PLANNED
    exchange   between nodes: dense, as stock HSDP does, or the kind of ``ab.replicate``, such as "int8", "oktopk:0.01"
    """

    nodes: bool
    units: str
    exchange: str = DENSE

    @property
    def name(self) -> str:
        """The name in commands."""
        family = "hsdp" if self.nodes else "fsdp2"
        return f"{family}{':' * bool(self.units)}{self.units}{f'@{self.exchange}' * (self.exchange != DENSE)}"

    @property
    def title(self) -> str:
        """The name in tables."""
        between = f", {self.exchange} between nodes" if self.exchange != DENSE else ""
        return f"{'HSDP' if self.nodes else 'FSDP2'}, {TITLES[self.units]}{between}"

    def per_block(self, names: Iterable[str]) -> ShardingPlan:
        """A unit per block, freed after forward in the mode RESHARD."""
        return ShardingPlan.per_block(names, reshard=self.units == RESHARD)


def sharding_mode(name: str, known: Iterable[str] | None = None) -> ShardingMode:
    """The mode of this name; without its exchange it must be among ``known``, by default all SHARDING_MODES."""
    plain, at, exchange = name.partition("@")
    expected = list(SHARDING_MODES if known is None else known)
    if plain not in expected:
        raise ValueError(f"--sharded is {name!r}: expected one of {', '.join(expected)}")
    mode = SHARDING_MODES[plain]
    if not at:
        return mode
    if not mode.nodes or not (exchange in COMPRESSED or density_of(exchange)):
        raise ValueError(
            f"--sharded is {name!r}: expected, for another exchange between nodes, hsdp and one of "
            f"{', '.join(COMPRESSED)}, or oktopk with a density, such as hsdp@int8 or hsdp:reshard@oktopk:0.01"
        )
    return replace(mode, exchange=exchange)


SHARDING_MODES: Mapping[str, ShardingMode] = {
    mode.name: mode for mode in (ShardingMode(nodes, units) for nodes in (False, True) for units in TITLES)
}
UNPLANNED = tuple(name for name, mode in SHARDING_MODES.items() if mode.units != PLANNED)  # they need no trace


def help_of(names: Iterable[str]) -> str:
    """These modes in the words of a command's help."""
    listed = "; ".join(f"{name} ({SHARDING_MODES[name].title})" for name in names)
    return f"{listed}; hsdp@int8 and the like, with another exchange between nodes (ab.replicate)"
