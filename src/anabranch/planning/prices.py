"""The price of an exchange at any number of ranks: its messages on the links of a network, and its computing.

Every rank of a quantised exchange sends each other rank a region of 1/P of the bucket, once to its owner and once as
its owner. Of 100 M elements on 4 ranks in int8 that is 2 · 3 · 25.4 MB, where an all-reduce sends 2 · ¾ · 400 MB.

A sparse exchange is priced as the one of fixed-size messages, which GPUs run. Its traffic depends on sizes alone, so a
formula gives at 2048 ranks what tests count at a few. Of 100 M elements at 1 % on 4 ranks, each rank sends 312,500
pairs to every other rank, and as many once around the ring: 2 · 3 · 2.5 MB. With a wire of bf16 it sends half of that,
with int8 three eighths and the scales.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple

from anabranch.values.curve import Curve
from anabranch.values.kinds.formats import FORMATS, Sizes
from anabranch.values.kinds.names import BF16, DENSE, INT4, INT8, Wire, density_of, kind_of, split_wire, two_level
from anabranch.values.kinds.options import OkTopk
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import InsideNodes, Network

SIZES_NBYTES = [4 << bits for bits in range(8, 31)]  # points of a curve: 1 KiB to 4 GiB
FLOAT_NBYTES = 4


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
    """The time an exchange computes in addition to its messages, by the bytes of the bucket; and who measured it."""

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
    computing   the time it computes in addition
    two_level   only nodes run this exchange, of sums that are dense inside them; its costs are those between nodes
    """

    kind: str
    phases: Callable[[int, int], Iterable[Phase]]
    computing: Computing
    two_level: bool = False

    def between_nodes(self) -> "Exchange":
        """The same between nodes, inside of which sums are dense: a reduce-scatter before it, an all-gather after."""
        return replace(self, kind=two_level(self.kind), two_level=True)

    def seconds(self, nbytes: int, links: AlphaBeta | TwoLevel, ranks: int) -> float:
        """The time for a bucket of ``nbytes`` of float32; on two levels that between nodes.

        Each rank exchanges its share of the bucket with the ranks of the same place in other nodes. The shares of a
        node pass its one network card together. With one rank in each node it is the plain exchange.
        """
        if self.two_level and isinstance(links, TwoLevel):
            here, nodes = min(ranks, links.ranks_per_node), ceil(ranks / links.ranks_per_node)
            card = replace(links.across, beta_s_per_byte=here * links.across.beta_s_per_byte)
            return self.seconds(-(-nbytes // here), card, nodes) if nodes > 1 else 0.0
        phases = self.phases(-(-nbytes // FLOAT_NBYTES), ranks)
        return sum(travel_s(phase, links, ranks) for phase in phases) + self.computing.seconds(nbytes)

    def sent_nbytes(self, numel: int, ranks: int) -> int:
        """Bytes that one rank sends for a bucket of ``numel`` elements."""
        return round(sum(phase.sent_nbytes for phase in self.phases(numel, ranks)))

    def curve(self, network: Network) -> Curve:
        """The cost curve on this network, by the bytes of the float32 bucket."""
        ranks = network.world_size
        if ranks == 1:
            return Curve.linear(0.0, 0.0)  # one rank sends nothing and computes nothing
        links = links_of(network, self.two_level)
        return Curve.through((nbytes, self.seconds(nbytes, links, ranks)) for nbytes in SIZES_NBYTES)

    def priced(self, network: Network) -> Network:
        """The network with a cost for buckets of this kind; a measured cost is kept."""
        if self.kind in network.curves:
            return network
        if self.two_level:
            network = with_nodes(network)
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


def links_of(network: Network, between_nodes: bool = False) -> AlphaBeta | TwoLevel:
    """The links of a network: those of its model, or of the ring that costs as much as its dense collective.

    ``between_nodes``: where nodes were measured, the links between them, as a ring that costs as much as dense messages
    there.
    """
    inside, kind = network.inside, two_level(DENSE)
    if between_nodes and inside is not None and kind in network.curves and not isinstance(network.model, TwoLevel):
        nodes = ceil(network.world_size / inside.ranks_per_node)
        card = AlphaBeta.ring_like(max(2, nodes), *network.curve(kind).line())
        return TwoLevel(inside.ranks_per_node, card, card)  # only what is between nodes is asked of them
    return network.model or AlphaBeta.ring_like(network.world_size, *network.curve(DENSE).line())


def with_nodes(network: Network) -> Network:
    """The network with what dense messages cost on two levels, from its model; if it has no nodes, as much as flat.

    What was measured is kept.
    """
    model, kind = network.model, two_level(DENSE)
    if not isinstance(model, TwoLevel):
        return replace(network, curves={kind: network.curve(DENSE), **network.curves})
    between = Curve.linear(*model.between_line(network.world_size))
    inside = network.inside or InsideNodes.modelled(network.world_size, model)
    return replace(network, curves={kind: between, **network.curves}, inside=inside)


def _on_h200(what: str, *passes_ms: float) -> Computing:
    """The passes of an exchange, measured for 110 M float32 values of four ranks."""
    source = f"{sum(passes_ms):.2f} ms per 110 M elements{what} on an H200 (2026-11-18)"
    return Computing(0.0, sum(passes_ms) * 1e-3 / (110e6 * FLOAT_NBYTES), source)


# With the defaults of Quantised: quantise, reduce, finish; int4 with its residual (0.68 ms in all without).
QUANTISED_ON_H200: Mapping[str, Computing] = {
    BF16: _on_h200(", three passes", 0.153, 0.080, 0.333),
    INT8: _on_h200(", three passes", 0.196, 0.072, 0.229),
    INT4: _on_h200(", three passes", 0.444, 0.082, 1.053),
}
# At 1 %: the offer with its threshold, reduce, finish.
SPARSE_ON_H200: Mapping[Wire, Computing] = {
    "fp32": _on_h200(" (values as fp32), as", 0.286, 0.086, 0.544),
    "bf16": _on_h200(" (values as bf16), as", 0.416, 0.226, 0.576),
    "int8": _on_h200(" (values as int8), as", 0.427, 0.407, 0.576),
}


def quantised_phases(kind: str, numel: int, ranks: int) -> list[Phase]:
    """The messages of one step for a bucket of ``numel`` elements: the all-to-all, then the all-gather."""
    form = FORMATS[kind]
    nbytes = form.message_nbytes(form.region_numel(numel, ranks))
    return [Phase(ranks - 1, nbytes, ring=False), Phase(ranks - 1, nbytes, ring=True)]


def quantised_exchange(kind: str, network: Network | None = None) -> Exchange:
    """The exchange of this kind. It computes for as long as it did on ``network``, if measured there, or an H200."""
    assumed = Exchange(kind, partial(quantised_phases, kind), QUANTISED_ON_H200[kind])
    measured = assumed.computing_on(network) if network is not None else None
    return replace(assumed, computing=measured or assumed.computing)


def sparse_phases(numel: int, ranks: int, density: float, options: OkTopk | None = None) -> Mapping[str, Phase]:
    """The messages of one step for a bucket of ``numel`` elements. What happens every few steps counts in part."""
    options = options or OkTopk()
    sizes, others = Sizes.of(numel, ranks, density, options), ranks - 1
    boundaries_nbytes = 8 * others  # int64, all-reduced: each rank passes on 1/P of them 2(P−1) times
    balancing = 0 if sizes.selects_all else 2 * others / options.region_period
    return {
        "split": Phase(others, sizes.message_nbytes, ring=False),
        "gather": Phase(others, sizes.message_nbytes, ring=True),
        "regions": Phase(balancing, boundaries_nbytes / ranks, ring=True),
    }


def sparse_exchange(density: float, network: Network | None = None, options: OkTopk | None = None) -> Exchange:
    """The exchange of this density. It selects for as long as it did on ``network``, if measured there, or an H200.

    Selection reads every element whatever the density, so the density measured nearest to this one is used, of the same
    wire if there is one.
    """
    options = options or OkTopk()
    kind = kind_of(density, options.wire)
    assumed = Exchange(
        kind,
        lambda numel, ranks: sparse_phases(numel, ranks, density, options).values(),
        SPARSE_ON_H200[options.wire],
    )
    measured = [split_wire(kind) for kind in (network.curves if network is not None else ())]
    known = [(wire != options.wire, abs(d - density), d, wire) for kind, wire in measured if (d := density_of(kind))]
    if network is None or not known:
        return assumed
    *_, nearest, wire = min(known)
    measured_there = sparse_exchange(nearest, options=replace(options, wire=wire)).computing_on(network)
    return replace(assumed, computing=measured_there or assumed.computing)
