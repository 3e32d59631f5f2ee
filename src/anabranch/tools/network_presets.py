"""Networks by name, with the source of their costs, and ranges of costs from the lowest to the highest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Network

Model = AlphaBeta | TwoLevel
Origin = Literal["published", "measured", "nominal"]

MICRO = 1e-6
GIGABIT = 1e9 / 8  # bytes per second


class Preset(NamedTuple):
    """Links of a kind: their costs, and the lowest and highest costs that links of this kind have.

    origin      published: measured by others; measured: by this project; nominal: assumed from the data sheet
    source      which measurement, or what was assumed
    spread      the source of ``low`` and ``high``
    """

    low: Model
    model: Model
    high: Model
    origin: Origin
    source: str
    spread: str


def _ring(alpha_us: float, beta_s_per_byte: float) -> AlphaBeta:
    return AlphaBeta("ring", alpha_us * MICRO, beta_s_per_byte)


def _nominal(gbit: float, alpha_us: float, shares: tuple[float, float, float], how: str) -> Preset:
    """A share of the data sheet's rate, for low, middle and high; latencies from half to twice the middle one."""
    best, usual, worst = (1 / (share * gbit * GIGABIT) for share in shares)
    low, middle, high = (f"{share:.0%}" for share in shares)
    return Preset(
        _ring(alpha_us / 2, best), _ring(alpha_us, usual), _ring(2 * alpha_us, worst), "nominal",
        f"{alpha_us:g} µs a hop and {middle} of {gbit:g} Gbit/s, {how}: assumed, not measured",
        f"assumed: half to twice that latency, {low} to {high} of the rate",
    )  # fmt: skip


def _nvlink(across: Preset, name: str) -> Preset:
    """Nodes of eight GPUs on NVLink with one network card each. Nominal, because the costs of NVLink are assumed."""
    nvlink = _nominal(450 * 8, 3, (0.95, 0.8, 0.6), "NVLink 4, each way")
    low, middle, high = (
        TwoLevel(8, inside, outside)  # type: ignore[arg-type]  # both are rings
        for inside, outside in zip(nvlink[:3], across[:3], strict=True)
    )
    source = f"inside nodes of 8: {nvlink.source}; between nodes, one card each, as {name}: {across.source}"
    return Preset(low, middle, high, nvlink.origin, source, f"inside {nvlink.spread}; between nodes {across.spread}")


LINKS: Mapping[str, Preset] = {
    "1gbe": Preset(
        _ring(113, 8e-9), _ring(436, 9e-9), _ring(900, 1e-8), "published",
        "436 µs a hop and 0.89 Gbit/s, point to point, in the MG-WFBP authors' scripts",
        "113 to 900 µs a hop in the same authors' all-gathers on 16 and 4 workers; 0.8 to 1 Gbit/s is assumed",
    ),
    "10gbe": Preset(
        _ring(45.25, 1 / (9.43 * GIGABIT)), AlphaBeta.ring_like(8, 1.3687e-3, 1.6570e-9),
        AlphaBeta("ring", 2.465e-3 / 14, 1.2 / (9 * 2**30 / 8)), "published",
        "a = 1.3687 ms and b = 1.657 ns per byte, nccl-tests on 8 nodes, in the ASC-WFBP authors' scripts, read as a "
        "ring",
        "from 45 µs a hop (the MG-WFBP simulation) and iperf's 9.43 Gbit/s to 176 µs (NCCL in a job of 8 workers) and "
        "8.05 Gbit/s (that simulation)",
    ),
    "25gbe": Preset(
        _ring(15, 3.780e-10), _ring(30, 4.046e-10), _ring(60, 4.457e-10), "measured",
        "19.8 Gbit/s, the median of five models' whole gradients in one NCCL all-reduce over TCP on this project's lab "
        "(benchmarks/rivals_h200_lab_25gbit_2026-11-15.md); 30 µs a hop is assumed",
        "17.9 to 21.2 Gbit/s among those five; 15 to 60 µs a hop is assumed",
    ),
    "100gbe": _nominal(100, 20, (0.95, 0.8, 0.5), "TCP, which often does not fill such a link"),
    "56ib": Preset(
        AlphaBeta.ring_like(8, 9.754e-5, 3.057e-10), AlphaBeta.ring_like(16, 2.358e-4, 4.059e-10),
        AlphaBeta.ring_like(16, 3 * 2.358e-4, 4.059e-10), "published",
        "a = 0.236 ms and b = 0.406 ns per byte on 16 V100s, the MG-WFBP authors' fit, read as a ring",
        "from their fit for 8 workers to three times that latency, as a later copy of their table has it",
    ),
    "100ib": _nominal(100, 5, (0.97, 0.9, 0.7), "RDMA"),
    "400ib": _nominal(400, 5, (0.97, 0.85, 0.6), "RDMA"),
}  # fmt: skip
NODES = {f"nvlink+{name}": _nvlink(LINKS[name], name) for name in ("25gbe", "100gbe", "400ib")}
PRESETS: Mapping[str, Preset] = {**LINKS, **NODES}
NO_SPREAD = "none known: no band"


@dataclass(frozen=True, slots=True)
class NetworkRange:
    """A network with its most likely costs (``middle``, for which plans are made) and its lowest and highest costs."""

    name: str
    middle: Network
    low: Network
    high: Network
    source: str
    spread: str

    @classmethod
    def preset(cls, name: str, world_size: int) -> Self:
        """The named links among ``world_size`` ranks."""
        if name not in PRESETS:
            raise ValueError(f"network {name!r}: no such name, expected one of {', '.join(PRESETS)}")
        found = PRESETS[name]
        low, middle, high = (Network.modelled(world_size, model) for model in found[:3])
        return cls(name, middle, low, high, f"{found.origin}: {found.source}", found.spread)

    @classmethod
    def given(cls, name: str, network: Network, source: str) -> Self:
        """A network of the user's own. Its band is its measured spread, if it has one."""
        if not any(point.spread_s > 0 for curve in network.curves.values() for point in curve.points):
            return cls(name, network, network, network, source, NO_SPREAD)
        measured = "one measured interquartile range to either side"
        return cls(name, network, network.shifted(-1), network.shifted(+1), source, measured)

    @property
    def extrapolation(self) -> str:
        """How the costs at other world sizes are derived."""
        model = self.middle.model
        if model is None:
            return "carried to other world sizes as the ring whose latency and rate its straight-line fit has here"
        if isinstance(model, TwoLevel):
            k = model.ranks_per_node
            nodes = f"reduce-scatter and all-gather inside nodes of {k}, between them an all-reduce over one card each"
            return f"{nodes}, one after the other; among P ranks 2(P-1) hops, each byte 2(P-1)/P times"
        if model.algorithm == "ring":
            return "a ring of P ranks: 2(P-1) hops, each byte 2(P-1)/P times over a link"
        return f"{model.algorithm.replace('_', ' ')}: hops grow with log2 P"
