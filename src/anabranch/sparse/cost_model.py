"""Cost model of a sparse exchange at any number of ranks: its messages, at the cost of the links.

It models the exchange of fixed-size messages, which GPUs run. Its traffic depends on sizes alone, so a formula gives at
2048 ranks what tests count at a few. Of 100 M elements at 1 % on 4 ranks, each rank sends 312,500 pairs to every other
rank, and as many once around the ring: 2 · 3 · 2.5 MB, where an all-reduce sends 2 · ¾ · 400 MB. Prices are those of
float32 values unless ``options`` name another wire: bf16 sends half of that, int8 three eighths and the scales.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from anabranch.alpha_beta import AlphaBeta, TwoLevel
from anabranch.curve import Curve
from anabranch.network import Network
from anabranch.sparse.naming import density_of, kind_of
from anabranch.sparse.options import OkTopk
from anabranch.sparse.sizes import Sizes

SIZES_NBYTES = [4 << bits for bits in range(8, 31)]  # points of the curve: 1 KiB to 4 GiB
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


class Selection(NamedTuple):
    """The time an exchange computes beside its messages, by the bytes of the bucket, and where that is known from."""

    start_s: float
    s_per_byte: float
    source: str


# Threshold and offer 284 µs, reduce 89 µs, end 543 µs, for 1 % of 110 M float32.
H200 = Selection(
    0.0, (284e-6 + 89e-6 + 543e-6) / (110e6 * FLOAT_NBYTES), "0.92 ms per 110 M elements, as on an H200 (2026-11-15)"
)


def phases(numel: int, ranks: int, density: float, options: OkTopk | None = None) -> Mapping[str, Phase]:
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


def exchange_curve(network: Network, density: float, selection: Selection, options: OkTopk | None = None) -> Curve:
    """The cost curve of an exchange at this density on this network, by the bytes of the float32 bucket."""
    ranks = network.world_size
    if ranks == 1:
        return Curve.linear(0.0, 0.0)  # one rank sends nothing and selects nothing
    links = network.model or AlphaBeta.ring_like(ranks, *network.curve("dense").line())
    points = []
    for nbytes in SIZES_NBYTES:
        travel = [travel_s(p, links, ranks) for p in phases(nbytes // FLOAT_NBYTES, ranks, density, options).values()]
        points.append((nbytes, sum(travel) + selection.start_s + selection.s_per_byte * nbytes))
    return Curve.through(points)


def priced(network: Network, density: float, selection: Selection, options: OkTopk | None = None) -> Network:
    """The network with a cost for buckets of this density; a measured cost is kept."""
    kind = kind_of(density)
    if kind in network.curves:
        return network
    return replace(network, curves={**network.curves, kind: exchange_curve(network, density, selection, options)})


def selection_on(network: Network, density: float, options: OkTopk | None = None) -> Selection:
    """The cost of selection where this network was measured: the time of a measured exchange beyond its messages.

    Selection reads every element whatever the density, so the measured density nearest to this one is used. Without
    any, the cost on an H200 is assumed.
    """
    known = {kind: found for kind in network.curves if (found := density_of(kind)) is not None}
    if not known:
        return H200
    kind = min(known, key=lambda kind: abs(known[kind] - density))
    measured = network.curve(kind)
    messages = exchange_curve(network, known[kind], Selection(0.0, 0.0, ""), options)
    sizes = [point.nbytes for point in measured.points if point.nbytes]
    beyond = [(size, max(0.0, measured.seconds(size) - messages.seconds(size))) for size in sizes]
    if len(beyond) < 2:
        return H200
    start_s, s_per_byte = Curve.through(beyond).line()
    source = f"the time {kind} took beyond its messages, measured on {network.world_size} ranks"
    return Selection(start_s, s_per_byte, source)
