"""Nodes: which ranks of a process group share a machine, and with it a network card."""

from dataclasses import dataclass
from typing import Self

from anabranch.values.checks import repeated


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of a process group, node by node; every node has the same number of ranks.

    The ranks of one place are those that come first in their nodes, or second, and so on.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        every = [rank for node in self.ranks for rank in node]
        if sorted(every) != list(range(len(every))) or repeated(map(str, every)):
            raise ValueError(f"nodes have the ranks {every}: expected each from 0 to {len(every) - 1} once")
        if len({len(node) for node in self.ranks}) != 1:
            raise ValueError(f"nodes have {[len(node) for node in self.ranks]} ranks: expected as many in each")

    @classmethod
    def of_size(cls, ranks: int, per_node: int) -> Self:
        """Nodes of ``per_node`` consecutive ranks each."""
        return cls(tuple(tuple(range(low, low + per_node)) for low in range(0, ranks, per_node)))

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return len(self.ranks[0])

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place, node by node."""
        return tuple(zip(*self.ranks, strict=True))

    def place_of(self, rank: int) -> int:
        """The place of a rank in its node."""
        return next(node.index(rank) for node in self.ranks if rank in node)

    def __str__(self) -> str:
        return f"{len(self)} nodes of {self.per_node} ranks"
