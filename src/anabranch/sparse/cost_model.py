"""What a sparse exchange costs at any number of ranks: its messages as virtual ranks count them, priced by the links.

The exchange of fixed-size messages is priced, which is what GPUs run: its traffic depends on nothing but sizes, so a
formula gives at 2048 ranks what tests count at a few. Of 100 M elements at 1 % on 4 ranks, each sends 312,500 pairs to
every other rank, and as many once around the ring: 2 · 3 · 2.5 MB, where an all-reduce sends 2 · ¾ · 400 MB.
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

SIZES_NBYTES = [4 << bits for bits in range(8, 31)]  # 1 KiB to 4 GiB: where the curve has its points
FLOAT_NBYTES = 4


class Phase(NamedTuple):
    """What one rank does in one phase of a step: so many messages of so many bytes each, to everyone or on a ring."""

    messages: float
    nbytes: float
    ring: bool

    @property
    def words(self) -> float:
        """What it sends and receives in all."""
        return self.messages * self.nbytes / 4


class Selection(NamedTuple):
    """What an exchange computes beside its messages, by the bytes of the bucket, and how that is known."""

    start_s: float
    s_per_byte: float
    source: str


# Threshold and offer 284 µs, reduce 89 µs, end 543 µs, for 1 % of 110 M float32.
H200 = Selection(
    0.0, (284e-6 + 89e-6 + 543e-6) / (110e6 * FLOAT_NBYTES), "0.92 ms per 110 M elements, as on an H200 (2026-11-15)"
)


def phases(numel: int, ranks: int, density: float, options: OkTopk | None = None) -> Mapping[str, Phase]:
    """The messages of one step for a bucket of so many elements; what happens every few steps counts in proportion."""
    options = options or OkTopk()
    sizes, others = Sizes.of(numel, ranks, density, options), ranks - 1
    boundaries_nbytes = 8 * others  # int64, all-reduced: each rank passes on 1/P of them 2(P−1) times
    balancing = 0 if sizes.everything else 2 * others / options.region_period
    return {
        "split": Phase(others, sizes.message_nbytes, ring=False),
        "gather": Phase(others, sizes.message_nbytes, ring=True),
        "regions": Phase(balancing, boundaries_nbytes / ranks, ring=True),
    }


def travel_s(phase: Phase, links: AlphaBeta | TwoLevel, ranks: int) -> float:
    """How long the messages of a phase take, one behind the other, on full duplex links."""
    if isinstance(links, AlphaBeta):
        return phase.messages * (links.alpha_s + phase.nbytes * links.beta_s_per_byte)
    inside, across, here = links.inside, links.across, min(ranks, links.ranks_per_node)
    if phase.ring or here == ranks:  # each step of a ring takes as long as on its slowest link
        return travel_s(phase, across if here < ranks else inside, ranks)
    near = phase.messages * (here - 1) / (ranks - 1)
    together_nbytes = here * phase.nbytes  # all ranks of a node send to the others through its one card
    far_s = (phase.messages - near) * (across.alpha_s + together_nbytes * across.beta_s_per_byte)
    return near * (inside.alpha_s + phase.nbytes * inside.beta_s_per_byte) + far_s


def exchange_curve(network: Network, density: float, selection: Selection) -> Curve:
    """What an exchange at this density costs on this network, by the bytes of the float32 bucket."""
    ranks = network.world_size
    if ranks == 1:
        return Curve.linear(0.0, 0.0)  # nothing is sent, so nothing is selected
    links = network.model or AlphaBeta.ring_like(ranks, *network.curve("dense").line())
    points = []
    for nbytes in SIZES_NBYTES:
        travel = [travel_s(p, links, ranks) for p in phases(nbytes // FLOAT_NBYTES, ranks, density).values()]
        points.append((nbytes, sum(travel) + selection.start_s + selection.s_per_byte * nbytes))
    return Curve.through(points)


def priced(network: Network, density: float, selection: Selection) -> Network:
    """The network with a cost for buckets of this density; a measured one stays what it is."""
    kind = kind_of(density)
    if kind in network.curves:
        return network
    return replace(network, curves={**network.curves, kind: exchange_curve(network, density, selection)})


def selection_on(network: Network, density: float) -> Selection:
    """What selecting costs where this network was measured: what a measured exchange takes beyond its messages.

    Selection reads every element whatever the density, so the measured density nearest to this one tells. Without
    any, it is taken to be an H200's.
    """
    known = {kind: found for kind in network.curves if (found := density_of(kind)) is not None}
    if not known:
        return H200
    kind = min(known, key=lambda kind: abs(known[kind] - density))
    measured = network.curve(kind)
    wire = exchange_curve(network, known[kind], Selection(0.0, 0.0, ""))
    sizes = [point.nbytes for point in measured.points if point.nbytes]
    beyond = [(size, max(0.0, measured.seconds(size) - wire.seconds(size))) for size in sizes]
    if len(beyond) < 2:
        return H200
    start_s, s_per_byte = Curve.through(beyond).line()
    source = f"what {kind} took beyond its messages, measured on {network.world_size} ranks"
    return Selection(start_s, s_per_byte, source)
