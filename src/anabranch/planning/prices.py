"""Cost of an exchange at any number of ranks: its messages on the links of a network, and the computing beside them.

``sparse/cost_model.py`` and ``quantised/cost_model.py`` say what the exchanges of their family send and compute.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from anabranch.values.curve import Curve
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network

SIZES_NBYTES = [4 << bits for bits in range(8, 31)]  # points of a curve: 1 KiB to 4 GiB
FLOAT_NBYTES = 4
BETWEEN_NODES = "@nodes"  # ends the name of an exchange between nodes


class Phase(NamedTuple):
    """One rank's part in one phase of a step: ``messages`` of ``nbytes`` each, to every other rank or along a ring."""

    messages: float
    nbytes: float
    ring: bool

    @property
    def sent_nbytes(self) -> float:
        """Bytes that the rank sends, and receives, in all."""
        return self.messages * self.nbytes


class Computing(NamedTuple):
    """The time an exchange computes beside its messages, by the bytes of the bucket, and where that is known from."""

    start_s: float
    s_per_byte: float
    source: str

    def seconds(self, nbytes: float) -> float:
        """For a bucket of ``nbytes``."""
        return self.start_s + self.s_per_byte * nbytes


NOTHING = Computing(0.0, 0.0, "nothing")


def travel_s(phase: Phase, links: AlphaBeta | TwoLevel, ranks: int) -> float:
    """The time of a phase's messages, one after another, on full duplex links."""
    if isinstance(links, AlphaBeta):
        return phase.messages * (links.alpha_s + phase.nbytes * links.beta_s_per_byte)
    inside, across, here = links.inside, links.across, min(ranks, links.ranks_per_node)
    if phase.ring or here == ranks:  # each step of a ring takes as long as its slowest link
        return travel_s(phase, across if here < ranks else inside, ranks)
    near = phase.messages * (here - 1) / (ranks - 1)
    node_nbytes = here * phase.nbytes  # all ranks of a node send to other nodes through its one network card
    far_s = (phase.messages - near) * (across.alpha_s + node_nbytes * across.beta_s_per_byte)
    return near * (inside.alpha_s + phase.nbytes * inside.beta_s_per_byte) + far_s


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of exchange, from which its cost on any network follows.

    kind        as a bucket names it, such as "int8"
    phases      what a rank sends, by the elements of the bucket and the number of ranks
    computing   the time it computes beside that
    two_level   ranks of a node are averaged densely, and only nodes exchange in this way
    """

    kind: str
    phases: Callable[[int, int], Iterable[Phase]]
    computing: Computing
    two_level: bool = False

    def between_nodes(self) -> "Exchange":
        """The same between nodes, inside of which sums are dense: a reduce-scatter before it, an all-gather after."""
        return replace(self, kind=self.kind + BETWEEN_NODES, two_level=True)

    def seconds(self, nbytes: int, links: AlphaBeta | TwoLevel, ranks: int) -> float:
        """The time for a bucket of ``nbytes`` of float32."""
        if self.two_level and isinstance(links, TwoLevel):
            return self._two_level_s(nbytes, links, ranks)
        phases = self.phases(-(-nbytes // FLOAT_NBYTES), ranks)
        return sum(travel_s(phase, links, ranks) for phase in phases) + self.computing.seconds(nbytes)

    def _two_level_s(self, nbytes: int, links: TwoLevel, ranks: int) -> float:
        """Each rank exchanges its share of the bucket with the ranks of the same place in other nodes.

        The shares of a node pass its one network card together. With one rank in each node it is the plain exchange.
        """
        here, nodes = min(ranks, links.ranks_per_node), ceil(ranks / links.ranks_per_node)
        start_s, s_per_byte = links.inside.line(here)
        inside_s = start_s + s_per_byte * nbytes
        if nodes == 1:
            return inside_s
        card = replace(links.across, beta_s_per_byte=here * links.across.beta_s_per_byte)
        return inside_s + self.seconds(-(-nbytes // here), card, nodes)

    def sent_nbytes(self, numel: int, ranks: int) -> int:
        """Bytes that one rank sends for a bucket of ``numel`` elements."""
        return round(sum(phase.sent_nbytes for phase in self.phases(numel, ranks)))

    def curve(self, network: Network) -> Curve:
        """The cost curve on this network, by the bytes of the float32 bucket."""
        ranks = network.world_size
        if ranks == 1:
            return Curve.linear(0.0, 0.0)  # one rank sends nothing and computes nothing
        links = links_of(network)
        return Curve.through((nbytes, self.seconds(nbytes, links, ranks)) for nbytes in SIZES_NBYTES)

    def priced(self, network: Network) -> Network:
        """The network with a cost for buckets of this kind; a measured cost is kept."""
        if self.kind in network.curves:
            return network
        return replace(network, curves={**network.curves, self.kind: self.curve(network)})

    def computing_on(self, network: Network) -> Computing | None:
        """The time that this kind, measured on this network, took beyond its messages; None if it was not measured."""
        if self.kind not in network.curves:
            return None
        measured, messages = network.curve(self.kind), replace(self, computing=NOTHING).curve(network)
        sizes = [point.nbytes for point in measured.points if point.nbytes]
        if len(sizes) < 2:
            return None
        beyond = [(size, max(0.0, measured.seconds(size) - messages.seconds(size))) for size in sizes]
        source = f"the time {self.kind} took beyond its messages, measured on {network.world_size} ranks"
        return Computing(*Curve.through(beyond).line(), source)


def links_of(network: Network) -> AlphaBeta | TwoLevel:
    """The links of a network: those of its model, or of the ring that costs as much as its dense collective."""
    return network.model or AlphaBeta.ring_like(network.world_size, *network.curve("dense").line())
