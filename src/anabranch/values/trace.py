"""Trace: which gradient becomes ready when, in backward order."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Self

from anabranch.values.checks import STRICT, Meta, check_nbytes, check_positive, check_seconds, frozen_meta, repeated
from anabranch.values.kinds.names import is_dense


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One gradient: its size, and how long after the start of backward it is ready.

    ``dtype`` separates gradients that cannot share a message; traces without it are told apart by
    ``itemsize`` alone. ``spread_s`` is the interquartile range of ``ready_s`` over the recorded steps.
    """

    name: str
    numel: int
    itemsize: int
    ready_s: float
    dtype: str = ""
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor has an empty name: every gradient needs one")
        if self.numel < 0 or self.itemsize < 1:
            raise ValueError(
                f"{self.name}: {self.numel} elements of {self.itemsize} bytes: expected numel ≥ 0, itemsize ≥ 1"
            )
        check_nbytes(self.name, self.nbytes)
        check_seconds(f"{self.name}: ready_s", self.ready_s)
        check_seconds(f"{self.name}: spread_s", self.spread_s)

    @property
    def nbytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.numel * self.itemsize

    def cost_nbytes(self, collective: str) -> int:
        """The size at which the curve of a collective gives this gradient's cost.

        Curves of compressed kinds are those of float32 gradients. Of a 16-bit one with as many elements they send as
        much, and compute as long.
        """
        return 2 * self.nbytes if self.itemsize == 2 and not is_dense(collective) else self.nbytes

    @property
    def kind(self) -> tuple[str, int]:
        """What two gradients must share to travel in one bucket."""
        return (self.dtype, self.itemsize)


@dataclass(frozen=True, slots=True)
class Trace:
    """One step's computation: forward time, then gradients in the order in which they become ready.

    Time zero is the start of backward. ``meta`` says where and how it was measured.
    """

    __pydantic_config__: ClassVar = STRICT

    tensors: tuple[TensorSpec, ...]
    forward_s: float
    meta: Meta = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "meta", frozen_meta(self.meta))
        check_seconds("forward_s", self.forward_s)
        if not self.tensors:
            raise ValueError("a trace has no tensors: expected at least one gradient")
        for before, after in pairwise(self.tensors):
            if after.ready_s < before.ready_s:
                raise ValueError(
                    f"{after.name} is ready at {after.ready_s} s, before {before.name} at {before.ready_s} s: "
                    "list the tensors in ready order"
                )
        if twice := repeated(tensor.name for tensor in self.tensors):
            raise ValueError(f"{twice} is in the trace twice: names must be unique")
        check_nbytes("the whole trace", self.nbytes)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def backward_s(self) -> float:
        """Duration of backward: the instant at which the last gradient is ready."""
        return self.tensors[-1].ready_s

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_kind(self) -> list[Sequence[TensorSpec]]:
        """The tensors apart by dtype, each part in ready order, the part that is ready first in front."""
        if len({(tensor.dtype, tensor.itemsize) for tensor in self.tensors}) == 1:
            return [self.tensors]  # as most traces are; planners ask for this hundreds of times
        parts: dict[tuple[str, int], list[TensorSpec]] = {}
        for tensor in self.tensors:
            parts.setdefault(tensor.kind, []).append(tensor)
        return list(parts.values())

    def scaled(self, factor: float) -> Self:
        """The same model computing ``factor`` times as long (another GPU, another batch size)."""
        check_positive("factor", factor)
        tensors = tuple(replace(t, ready_s=t.ready_s * factor, spread_s=t.spread_s * factor) for t in self.tensors)
        return replace(self, tensors=tensors, forward_s=self.forward_s * factor)
