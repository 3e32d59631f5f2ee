"""Shares: the part of every parameter that one rank of a node exchanges with other nodes."""

from typing import NamedTuple, Self

from anabranch.values.nodes import Nodes


class Share(NamedTuple):
    """Part ``number`` of ``parts`` equal parts of every parameter; it does not depend on the plan."""

    parts: int = 1
    number: int = 0

    def of(self, numel: int) -> range:
        """Its elements of a parameter of ``numel`` elements."""
        return range(self.number * numel // self.parts, (self.number + 1) * numel // self.parts)

    @classmethod
    def on(cls, nodes: Nodes, rank: int) -> Self:
        """That of a rank on nodes."""
        return cls(nodes.per_node, nodes.place_of(rank))


WHOLE = Share()


def within(inner: range, outer: range) -> bool:
    """Whether one range of elements lies in another."""
    return not inner or (outer.start <= inner.start and inner.stop <= outer.stop)
