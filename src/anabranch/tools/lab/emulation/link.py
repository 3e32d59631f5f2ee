"""An emulated link: what an operation costs on it, and how transfers at the same time share it.

The cost of an operation with N ranks, links of latency α and transfer time β, and M bytes:

    all-reduce                                  2(N−1)·α  +  2(N−1)/N·β·M    the ring of ``anabranch.values.links``
    all-gather, reduce-scatter, all-to-all       (N−1)·α  +   (N−1)/N·β·M    M of the whole; a ring, or pairwise
    broadcast, reduce                        ⌈log₂ N⌉·α  +           β·M    a tree, long messages in a pipeline
    gather, scatter                                    α  +   (N−1)/N·β·M    M of the whole; the root's link fills
    barrier                                  ⌈log₂ N⌉·α                      dissemination
    send, receive                                      α  +           β·M

Every rank of a group computes the same cost, whatever its role. A group of one rank costs nothing.

Transfers in one direction share it evenly and together never exceed its rate; latencies overlap with everything. So k
equal messages at once each take start + k · transfer: the contention law of ``anabranch.values.network`` with η = 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

from anabranch.values.links import AlphaBeta


class Cost(NamedTuple):
    """Seconds before an operation needs the link, and seconds of transfer on a link that carries nothing else."""

    start_s: float
    transfer_s: float


CostFunction = Callable[[AlphaBeta, int, int], Cost]  # of the link, the number of ranks and the number of bytes


def all_reduce(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Cost of an all-reduce of a buffer of ``nbytes``."""
    start_s, s_per_byte = link.line(ranks)
    return Cost(start_s, s_per_byte * nbytes)


def all_gather(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Cost of an all-gather, reduce-scatter or all-to-all: half an all-reduce."""
    return Cost((ranks - 1) * link.alpha_s, (ranks - 1) / ranks * link.beta_s_per_byte * nbytes)


def broadcast(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Cost of a broadcast or reduce; with 0 bytes, of a barrier."""
    return Cost(ceil(log2(ranks)) * link.alpha_s, (ranks > 1) * link.beta_s_per_byte * nbytes)


def gather(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Cost of a gather or scatter."""
    return Cost((ranks > 1) * link.alpha_s, (ranks - 1) / ranks * link.beta_s_per_byte * nbytes)


def point_to_point(link: AlphaBeta, ranks: int, nbytes: int) -> Cost:  # noqa: ARG001
    """Cost of one message between two ranks."""
    return Cost(link.alpha_s, link.beta_s_per_byte * nbytes)


@dataclass(eq=False, slots=True)
class Transfer:
    """One message: the time at which its transfer begins, and the seconds of transfer left if it had the link alone."""

    begins: float
    left_s: float
    done: bool = False


class LinkDirection:
    """One direction of a full-duplex link, shared evenly by its transfers.

    Its state is computed when it is asked for: there is no thread, and no clock but the one given.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._now = clock()
        self._transfers: list[Transfer] = []

    def start(self, cost: Cost) -> Transfer:
        """Start a message now."""
        with self._lock:
            self._advance(self._clock())
            transfer = Transfer(self._now + cost.start_s, cost.transfer_s)
            self._transfers.append(transfer)
            return transfer

    def remaining_s(self, transfer: Transfer) -> float:
        """Seconds until it is done, provided that no other message starts before; 0 when it is done."""
        with self._lock:
            self._advance(self._clock())
            if transfer.done:
                return 0.0
            if transfer.begins > self._now:
                return transfer.begins - self._now + transfer.left_s
            # In equal shares, every other transfer will have had as much of the link as this one, or all it needs.
            return sum(min(other.left_s, transfer.left_s) for other in self._active())

    def _active(self) -> list[Transfer]:
        return [transfer for transfer in self._transfers if transfer.begins <= self._now]

    def _advance(self, now: float) -> None:
        """Go from event to event: a transfer begins, the shortest active transfer ends, or ``now`` is reached."""
        while self._transfers:
            active = self._active()
            first = min(active, key=lambda transfer: transfer.left_s, default=None)
            ends = inf if first is None else self._now + first.left_s * len(active)
            begins = min((t.begins for t in self._transfers if t.begins > self._now), default=inf)
            until = min(ends, begins, now)
            for transfer in active:
                transfer.left_s = max(0.0, transfer.left_s - (until - self._now) / len(active))
            self._now = max(self._now, until)
            if first is not None and until == ends:
                first.done = True  # because it is the first to end, not because nothing is left: rounding leaves some
                self._transfers.remove(first)
            elif until == now:
                break
        self._now = max(self._now, now)


class Nic:
    """The emulated network interface of one process: all its groups share the two directions of one link."""

    def __init__(self, link: AlphaBeta) -> None:
        self.link = link
        self._outbound = LinkDirection()
        self._inbound = LinkDirection()

    def start(self, operation: str, cost: Cost) -> "EmulatedTransfer":
        """Start an operation now. A send uses one direction, a receive the other, and a collective uses both."""
        if operation == "send":
            directions = [self._outbound]
        elif operation in ("recv", "recv_anysource"):
            directions = [self._inbound]
        else:
            directions = [self._outbound, self._inbound]
        return EmulatedTransfer(cost, directions)


class EmulatedTransfer:
    """One operation's use of the link, started now; done when it is done in every direction it uses."""

    def __init__(self, cost: Cost, directions: Sequence[LinkDirection]) -> None:
        self._transfers = [(direction, direction.start(cost)) for direction in directions]

    @property
    def done(self) -> bool:
        """Whether its time has passed."""
        return self._remaining_s() <= 0

    def wait(self) -> None:
        """Sleep until it is done. That may take longer than it seemed at first, when other messages start meanwhile."""
        while (remaining_s := self._remaining_s()) > 0:
            sleep(remaining_s)

    def _remaining_s(self) -> float:
        return max(direction.remaining_s(transfer) for direction, transfer in self._transfers)
