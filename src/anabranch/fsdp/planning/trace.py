"""ShardedTrace: what the blocks of a model compute and weigh, in the order in which a step needs their parameters."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from anabranch.values.checks import STRICT, Meta, check_nbytes, check_positive, check_seconds, frozen_meta


@dataclass(frozen=True, slots=True)
class Block:
    """A module that may be sharded by itself: the bytes of its parameters and gradients, and how long it computes."""

    __pydantic_config__: ClassVar = STRICT

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
        counts = Counter(block.name for block in self.blocks)
        if twice := next((name for name, count in counts.items() if count > 1), None):
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

    def scaled(self, factor: float) -> Self:
        """The same model computing ``factor`` times as long (another GPU, another batch size)."""
        check_positive("factor", factor)
        blocks = (
            replace(block, forward_s=block.forward_s * factor, backward_s=block.backward_s * factor)
            for block in self.blocks
        )
        outside = {what: getattr(self, what) * factor for what in ("before_s", "loss_s", "update_s")}
        return replace(self, blocks=tuple(blocks), **outside)

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
