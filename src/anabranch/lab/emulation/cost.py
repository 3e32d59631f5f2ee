"""What an operation costs on the emulated network: latency, in which nothing is carried, and time on the wire.

With N ranks, links of latency α and transfer time β, and M bytes:

    all-reduce                                  2(N−1)·α  +  2(N−1)/N·β·M    the ring of ``anabranch.alpha_beta``
    all-gather, reduce-scatter, all-to-all       (N−1)·α  +   (N−1)/N·β·M    M of the whole; a ring, or pairwise
    broadcast, reduce                        ⌈log₂ N⌉·α  +           β·M    a tree, long messages in a pipeline
    gather, scatter                                    α  +   (N−1)/N·β·M    M of the whole; the root's link fills
    barrier                                  ⌈log₂ N⌉·α                      dissemination
    send, receive                                      α  +           β·M

Every rank of a group computes the same cost, whichever part it plays. A group of one rank costs nothing.
"""

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple

from anabranch.alpha_beta import AlphaBeta


class Cost(NamedTuple):
    """Seconds until the wire is needed, and seconds on a wire that carries nothing else."""

    start_s: float
    transfer_s: float


Law = Callable[[AlphaBeta, int, int], Cost]


def all_reduce(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """``nbytes`` of the buffer that is reduced."""
    start_s, s_per_byte = link.line(ranks)
    return Cost(start_s, s_per_byte * nbytes)


def exchange(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """All-gather, reduce-scatter and all-to-all: half an all-reduce."""
    return Cost((ranks - 1) * link.alpha_s, (ranks - 1) / ranks * link.beta_s_per_byte * nbytes)


def tree(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Broadcast and reduce."""
    return Cost(ceil(log2(ranks)) * link.alpha_s, (ranks > 1) * link.beta_s_per_byte * nbytes)


def star(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Gather and scatter."""
    return Cost((ranks > 1) * link.alpha_s, (ranks - 1) / ranks * link.beta_s_per_byte * nbytes)


def point_to_point(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:  # noqa: ARG001
    """One message between two ranks."""
    return Cost(link.alpha_s, link.beta_s_per_byte * nbytes)
