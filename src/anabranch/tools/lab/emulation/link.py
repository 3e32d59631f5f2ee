"""An emulated link: what an operation costs on it, and how transfers at the same time share it.

An operation with N ranks, links of latency α and transfer time β, and M bytes costs hops·α + share·β·M (``COSTS``).
Every rank of a group computes the same cost, whatever its role. A collective of one rank costs nothing.

Transfers in one direction share it evenly and together never exceed its rate; latencies overlap with everything. So k
equal messages at once each take start + k · transfer: the contention law of ``anabranch.values.network`` with η = 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

from anabranch.values.links import AlphaBeta

# By the kind of an operation: hops and share of N ranks.
COSTS: Mapping[str, Callable[[int], tuple[float, float]]] = {
    "all-reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),  # the ring of anabranch.values.links
    "all-gather": lambda n: (n - 1, (n - 1) / n),  # also reduce-scatter and all-to-all: a ring, or pairwise
    "broadcast": lambda n: (ceil(log2(n)), n > 1),  # also reduce, and a barrier of no bytes: a tree, in a pipeline
    "gather": lambda n: (n > 1, (n - 1) / n),  # also scatter: the root's link fills
    "message": lambda n: (1, 1),  # noqa: ARG005
}


class Cost(NamedTuple):
    """Seconds before an operation needs the link, and seconds of transfer on a link that carries nothing else."""

    start_s: float
    transfer_s: float


def cost(kind: str, link: AlphaBeta, ranks: int, nbytes: int) -> Cost:
    """Cost of an operation; ``nbytes`` of the whole of what is gathered or scattered."""
    hops, share = COSTS[kind](ranks)
    return Cost(hops * link.alpha_s, share * link.beta_s_per_byte * nbytes)


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


class EmulatedTransfer:
    """One operation's use of a link, started now; done when it is done in every direction it uses."""

    def __init__(self, cost: Cost, directions: Sequence[LinkDirection]) -> None:
        self._transfers = [(direction, direction.start(cost)) for direction in directions]

    @property
    def remaining_s(self) -> float:
        """Seconds until it is done, provided that no other message starts before; 0 when it is done."""
        return max(direction.remaining_s(transfer) for direction, transfer in self._transfers)

    def wait(self) -> None:
        """Sleep until it is done. That may take longer than it seemed at first, when other messages start meanwhile."""
        while (remaining_s := self.remaining_s) > 0:
            sleep(remaining_s)
