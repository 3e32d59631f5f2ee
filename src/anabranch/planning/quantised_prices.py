"""Cost model of quantised exchanges at any number of ranks: their messages, at the cost of the links, and three passes.

Every rank sends each other one a region of 1/P of the bucket, once to its owner and once as its owner. Of 100 M
elements on 4 ranks in int8 that is 2 · 3 · 25.4 MB, where an all-reduce sends 2 · ¾ · 400 MB. Imports no torch, so
that planners and simulators can use it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from anabranch.planning.prices import FLOAT_NBYTES, Computing, Exchange, Phase
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import BF16, INT4, INT8
from anabranch.values.network import Network


def _on_h200(quantise_ms: float, reduce_ms: float, finish_ms: float) -> Computing:
    """Of an exchange whose passes over 110 M float32 values, of four ranks, take this long."""
    all_ms = quantise_ms + reduce_ms + finish_ms
    source = f"{all_ms:.2f} ms per 110 M elements, three passes on an H200 (2026-11-18)"
    return Computing(0.0, all_ms * 1e-3 / (110e6 * FLOAT_NBYTES), source)


# With the defaults of Quantised: rounded to nearest, int4 with its residual (0.68 ms in all without).
H200: Mapping[str, Computing] = {
    BF16: _on_h200(0.153, 0.080, 0.333),
    INT8: _on_h200(0.196, 0.072, 0.229),
    INT4: _on_h200(0.444, 0.082, 1.053),
}


class Region(NamedTuple):
    """The part of a bucket that one rank owns: its values, padding included, and the bytes of a message with them.

    A message goes to each other rank, once in the all-to-all and once in the all-gather.
    """

    numel: int
    message_nbytes: int

    @classmethod
    def of(cls, kind: str, numel: int, ranks: int) -> "Region":
        """The region of each rank in a bucket of ``numel`` elements."""
        form = FORMATS[kind]
        region = form.region_numel(numel, ranks)
        return cls(region, form.message_nbytes(region))


def phases(kind: str, numel: int, ranks: int) -> list[Phase]:
    """The messages of one step for a bucket of ``numel`` elements: the all-to-all, then the all-gather."""
    nbytes = Region.of(kind, numel, ranks).message_nbytes
    return [Phase(ranks - 1, nbytes, ring=False), Phase(ranks - 1, nbytes, ring=True)]


def exchange_of(kind: str, network: Network | None = None) -> Exchange:
    """The exchange of this kind. It computes for as long as it did on ``network``, if measured there, or an H200."""
    assumed = Exchange(kind, partial(phases, kind), H200[kind])
    measured = assumed.computing_on(network) if network is not None else None
    return replace(assumed, computing=measured or assumed.computing)
