"""What planning a sharded model reads and writes: the trace of a step, a sharding plan, the networks."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from anabranch.values.checks import STRICT, Meta, check_nbytes, check_seconds, frozen_meta, repeated
from anabranch.values.errors import PlanError
from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER, Network


@dataclass(frozen=True, slots=True)
class Block:
    """A module that may be sharded by itself: the bytes of its parameters and gradients, and how long it computes."""

    name: str
    nbytes: int
    gradient_nbytes: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a block has an empty name: expected the name of a module, such as 'layers.0'")
        check_nbytes(f"{self.name}: its parameters", self.nbytes)
        check_nbytes(f"{self.name}: its gradients", self.gradient_nbytes)
        check_seconds(f"{self.name}: forward_s", self.forward_s)
        check_seconds(f"{self.name}: backward_s", self.backward_s)


@dataclass(frozen=True, slots=True)
class ShardedTrace:
    """One step's computation: the blocks in the order of forward, and what lies outside all of them.

    rest_nbytes            of parameters in no block; FSDP2 gathers these first and keeps them for the whole step
    rest_gradient_nbytes   of their gradients, which are reduced last
    before_s               computing before the forward of the first block
    loss_s                 computing between the forward of the last block and its backward
    update_s               from the last gradient to the next step: the optimizer
    """

    __pydantic_config__: ClassVar = STRICT

    blocks: tuple[Block, ...]
    rest_nbytes: int = 0
    rest_gradient_nbytes: int = 0
    before_s: float = 0.0
    loss_s: float = 0.0
    update_s: float = 0.0
    meta: Meta = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "meta", frozen_meta(self.meta))
        if not self.blocks:
            raise ValueError("a sharded trace has no blocks: expected at least one")
        if twice := repeated(block.name for block in self.blocks):
            raise ValueError(f"{twice} is in the trace twice: a block runs once in a step; leave this one to the rest")
        check_nbytes("the rest: its parameters", self.rest_nbytes)
        check_nbytes("the rest: its gradients", self.rest_gradient_nbytes)
        check_nbytes("the whole model", self.nbytes)
        for what in ("before_s", "loss_s", "update_s"):
            check_seconds(what, getattr(self, what))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters together."""
        return self.rest_nbytes + sum(block.nbytes for block in self.blocks)

    @property
    def compute_s(self) -> float:
        """A step that never waits."""
        blocks_s = sum(block.forward_s + block.backward_s for block in self.blocks)
        return self.before_s + blocks_s + self.loss_s + self.update_s

    @property
    def times(self) -> tuple[float, ...]:
        """All durations, in an order that ``with_times`` understands."""
        return (self.before_s, self.loss_s, self.update_s,
                *(s for block in self.blocks for s in (block.forward_s, block.backward_s)))  # fmt: skip

    def with_times(self, times: Iterable[float]) -> Self:
        """The same model with other durations, such as those of the slowest rank."""
        before_s, loss_s, update_s, *of_blocks = times
        pairs = zip(self.blocks, of_blocks[::2], of_blocks[1::2], strict=True)
        blocks = tuple(replace(block, forward_s=f, backward_s=b) for block, f, b in pairs)
        return replace(self, blocks=blocks, before_s=before_s, loss_s=loss_s, update_s=update_s)


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive blocks whose parameters are gathered in one message, and their gradients reduced in one.

    ``reshard`` is FSDP2's ``reshard_after_forward``: parameters are freed after forward, and gathered again.
    """

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
        if twice := repeated(self.names):
            raise ValueError(f"{twice} is in {self.names.count(twice)} places of the plan: expected exactly one unit")

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


@dataclass(frozen=True, slots=True)
class Links:
    """The networks of a sharded step.

    inside     among the ranks that share one copy of the model: gathers and reduce-scatters
    between    among the ranks with the same shard, one in each node: what is averaged between nodes; None for one copy
    kind       of the exchange between nodes, as ``between`` prices it: "dense", "int8", …
    overlaps   messages travel while the rank computes, as on GPUs; on CPUs FSDP2 waits for each of them
    """

    inside: Network
    between: Network | None = None
    kind: str = "dense"
    overlaps: bool = True

    def gather_s(self, nbytes: int) -> float:
        """To give all ranks inside ``nbytes`` of parameters."""
        return self._half_s(ALL_GATHER, nbytes)

    def reduce_s(self, nbytes: int) -> float:
        """To give each rank inside its shard of the sum of ``nbytes`` of gradients."""
        return self._half_s(REDUCE_SCATTER, nbytes)

    def average_s(self, nbytes: int) -> float:
        """To average between nodes this rank's shard of ``nbytes`` of gradients."""
        if self.between is None or not nbytes:
            return 0.0
        return self.between.seconds(self.kind, -(-nbytes // self.inside.world_size))

    def _half_s(self, collective: str, nbytes: int) -> float:
        """As measured; else half an all-reduce, which is a reduce-scatter and a gather."""
        if not nbytes or self.inside.world_size == 1:
            return 0.0
        if collective in self.inside.curves:
            return self.inside.seconds(collective, nbytes)
        return self.inside.allreduce_s(nbytes) / 2
