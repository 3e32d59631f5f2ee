"""Cost model of a sparse exchange at any number of ranks: its messages, at the cost of the links.

It models the exchange of fixed-size messages, which GPUs run. Its traffic depends on sizes alone, so a formula gives at
2048 ranks what tests count at a few. Of 100 M elements at 1 % on 4 ranks, each rank sends 312,500 pairs to every other
rank, and as many once around the ring: 2 · 3 · 2.5 MB, where an all-reduce sends 2 · ¾ · 400 MB. Prices are those of
float32 values unless ``options`` name another wire: bf16 sends half of that, int8 three eighths and the scales.
"""

from collections.abc import Mapping
from dataclasses import replace

from anabranch.planning.prices import FLOAT_NBYTES, Computing, Exchange, Phase
from anabranch.values.kinds.formats import Sizes
from anabranch.values.kinds.names import Wire, density_of, kind_of, split_wire
from anabranch.values.kinds.options import OkTopk
from anabranch.values.network import Network


def _on_h200(wire: Wire, offer_ms: float, reduce_ms: float, end_ms: float) -> Computing:
    """Of an exchange that takes this long for 1 % of 110 M float32 values; the offer with its threshold."""
    all_ms = offer_ms + reduce_ms + end_ms
    source = f"{all_ms:.2f} ms per 110 M elements (values as {wire}), as on an H200 (2026-11-18)"
    return Computing(0.0, all_ms * 1e-3 / (110e6 * FLOAT_NBYTES), source)


H200: Mapping[Wire, Computing] = {
    "fp32": _on_h200("fp32", 0.286, 0.086, 0.544),
    "bf16": _on_h200("bf16", 0.416, 0.226, 0.576),
    "int8": _on_h200("int8", 0.427, 0.407, 0.576),
}


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


def exchange_of(density: float, network: Network | None = None, options: OkTopk | None = None) -> Exchange:
    """The exchange of this density. It selects for as long as it did on ``network``, if measured there, or an H200.

    Selection reads every element whatever the density, so the density measured nearest to this one is used, of the same
    wire if there is one.
    """
    options = options or OkTopk()
    kind = kind_of(density, options.wire)
    assumed = Exchange(kind, lambda numel, ranks: phases(numel, ranks, density, options).values(), H200[options.wire])
    measured = [split_wire(kind) for kind in (network.curves if network is not None else ())]
    known = [(wire != options.wire, abs(d - density), d, wire) for kind, wire in measured if (d := density_of(kind))]
    if network is None or not known:
        return assumed
    *_, nearest, wire = min(known)
    measured_there = exchange_of(nearest, options=replace(options, wire=wire)).computing_on(network)
    return replace(assumed, computing=measured_there or assumed.computing)
