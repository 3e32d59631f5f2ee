"""ShardingPlan: which blocks FSDP2 gathers together, which of them it frees after forward, how far it prefetches."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from anabranch.fsdp.planning.trace import ShardedTrace
from anabranch.values.checks import STRICT
from anabranch.values.errors import PlanError


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive blocks whose parameters are gathered in one message, and their gradients reduced in one.

    ``reshard`` is FSDP2's ``reshard_after_forward``: parameters are freed after forward, and gathered again.
    """

    __pydantic_config__: ClassVar = STRICT

    names: tuple[str, ...]
    reshard: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise ValueError("a unit has no names: expected at least one block")
        if not all(self.names):
            raise ValueError("a unit has an empty name: expected the name of a module, such as 'layers.0'")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Units in the order of forward. What is in no block is one more unit, FSDP2's root, and never freed after forward.

    ``prefetch`` units are gathered ahead of the one that computes; 1 is what FSDP2 does by itself.
    """

    __pydantic_config__: ClassVar = STRICT

    units: tuple[Unit, ...]
    prefetch: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        if not self.units:
            raise ValueError("a sharding plan has no units: expected at least one")
        if type(self.prefetch) is not int or self.prefetch < 1:
            raise ValueError(f"prefetch is {self.prefetch}: expected a number of units from 1 on")
        counts = Counter(name for unit in self.units for name in unit.names)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise ValueError(f"{twice} is in {counts[twice]} places of the plan: expected exactly one unit")

    def __len__(self) -> int:
        return len(self.units)

    @classmethod
    def per_block(cls, names: Iterable[str], reshard: bool = True) -> Self:
        """A unit per block, as FSDP2's users make them."""
        return cls(tuple(Unit((name,), reshard) for name in names))

    @classmethod
    def from_cuts(cls, names: Sequence[str], cuts: Iterable[int], reshard: bool = False, prefetch: int = 1) -> Self:
        """Units of consecutive blocks: each cut is the index, in the order of forward, of a block that opens one."""
        edges = [0, *cuts, len(names)]
        if any(high <= low for low, high in itertools.pairwise(edges)):
            raise ValueError(f"cuts are {edges[1:-1]}: expected rising indices between 1 and {len(names) - 1}")
        return cls(tuple(Unit(tuple(names[a:b]), reshard) for a, b in itertools.pairwise(edges)), prefetch)

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks, in the order of forward."""
        return tuple(name for unit in self.units for name in unit.names)

    def described(self) -> str:
        """The plan in a few words."""
        count, freed = len(self), sum(unit.reshard for unit in self.units)
        return f"{count} unit{'s' * (count > 1)}, {freed} freed after forward, {self.prefetch} gathered ahead"

    def check(self, trace: ShardedTrace) -> Self:
        """This plan, if its units are the blocks of ``trace`` in the same order; else PlanError."""
        names = tuple(block.name for block in trace.blocks)
        if self.names != names:
            pairs = itertools.zip_longest(self.names, names)
            planned, found = next((a, b) for a, b in pairs if a != b)
            raise PlanError(
                f"the plan has {planned or 'nothing more'} where the trace has {found or 'nothing more'}: units are "
                "the blocks of the trace, consecutive, in its order; plan for this model"
            )
        return self
