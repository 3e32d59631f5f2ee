"""Textbook costs of an all-reduce over links with latency α, transfer time β and reduction time γ."""

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal, Self

from anabranch.values.checks import check_seconds

Algorithm = Literal["ring", "tree", "halving_doubling"]
Line = tuple[float, float]  # start_s, s_per_byte


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """One kind of link and the algorithm run over it.

    alpha_s: latency per message hop; beta_s_per_byte: transfer; gamma_s_per_byte: adding two bytes' worth of numbers.
    """

    algorithm: Algorithm
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.algorithm not in ("ring", "tree", "halving_doubling"):
            raise ValueError(f"algorithm is {self.algorithm!r}: expected ring, tree or halving_doubling")
        check_seconds("alpha_s", self.alpha_s)
        check_seconds("beta_s_per_byte", self.beta_s_per_byte)
        check_seconds("gamma_s_per_byte", self.gamma_s_per_byte)

    @classmethod
    def ring_like(cls, world_size: int, start_s: float, s_per_byte: float) -> Self:
        """The ring that costs start_s + s_per_byte · M among ``world_size`` ranks, γ counted into β."""
        hops = 2 * (world_size - 1)
        return cls("ring", start_s / hops, s_per_byte * world_size / hops)

    def line(self, world_size: int) -> Line:
        """(start_s, s_per_byte) of one all-reduce among ``world_size`` ranks."""
        n, alpha, beta, gamma = world_size, self.alpha_s, self.beta_s_per_byte, self.gamma_s_per_byte
        if n < 1:
            raise ValueError(f"world_size is {n}: expected at least 1")
        rounds = ceil(log2(n))  # a partial round costs a whole one
        if self.algorithm == "ring":
            return 2 * (n - 1) * alpha, 2 * (n - 1) / n * beta + (n - 1) / n * gamma
        if self.algorithm == "tree":
            return 2 * rounds * alpha, rounds * (2 * beta + gamma)
        return 2 * rounds * alpha, (n - 1) / n * (2 * beta + gamma)


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Nodes of ``ranks_per_node`` ranks with fast links inside and one network card each.

    The three phases run one after the other: reduce-scatter inside each node, all-reduce of every rank's share across
    the nodes, all-gather inside. The shares of a node pass its one card together, so the card carries the whole
    message; the additions across nodes are spread over the node's ranks.
    """

    ranks_per_node: int
    inside: AlphaBeta
    across: AlphaBeta

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}: expected at least 1")

    def line(self, world_size: int) -> Line:
        """(start_s, s_per_byte) of one all-reduce among ``world_size`` ranks; a last node may be partly filled."""
        inside_start, inside_slope = self.inside.line(min(world_size, self.ranks_per_node))
        across_start, across_slope = self.between_line(world_size)
        return inside_start + across_start, inside_slope + across_slope

    def between_line(self, world_size: int) -> Line:
        """The same of the second phase alone."""
        nodes = ceil(world_size / self.ranks_per_node)
        share = replace(self.across, gamma_s_per_byte=self.across.gamma_s_per_byte / self.ranks_per_node)
        return share.line(nodes) if nodes > 1 else (0.0, 0.0)

    def inside_lines(self, world_size: int) -> tuple[Line, Line]:
        """The same of the first and the third phase: half of an all-reduce each, but that only the first one adds."""
        ranks = min(world_size, self.ranks_per_node)
        start_s, s_per_byte = self.inside.line(ranks)
        _, moving_s_per_byte = replace(self.inside, gamma_s_per_byte=0.0).line(ranks)
        gather = start_s / 2, moving_s_per_byte / 2
        return (start_s / 2, s_per_byte - gather[1]), gather
