"""One direction of an emulated network card: transfers share it evenly, and never carry more than it can.

Latencies overlap with anything. So k equal messages at once each take start + k · transfer, which is the contention
law of ``anabranch.network`` with η = 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from threading import Lock
from time import monotonic

from anabranch.lab.emulation.cost import Cost


@dataclass(eq=False, slots=True)
class Transfer:
    """A message on its way: from when on it needs the wire, and for how long still if it were alone there."""

    begins: float
    alone_s: float
    over: bool = False


class Wire:
    """Transfers in fair shares, computed when somebody asks: no thread, and no clock but the one given."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._now = clock()
        self._transfers: list[Transfer] = []

    def post(self, cost: Cost) -> Transfer:
        """Start a message now."""
        with self._lock:
            self._advance(self._clock())
            transfer = Transfer(self._now + cost.start_s, cost.transfer_s)
            self._transfers.append(transfer)
            return transfer

    def left_s(self, transfer: Transfer) -> float:
        """Seconds until it is over if nothing else begins before; 0 when it is over. Ask again after that time."""
        with self._lock:
            self._advance(self._clock())
            if transfer.over:
                return 0.0
            if transfer.begins > self._now:
                return transfer.begins - self._now + transfer.alone_s
            # In equal shares, every other one will have had as much of the wire as this one, or all that it needs.
            return sum(min(other.alone_s, transfer.alone_s) for other in self._active())

    def _active(self) -> list[Transfer]:
        return [transfer for transfer in self._transfers if transfer.begins <= self._now]

    def _advance(self, now: float) -> None:
        """From event to event: a transfer begins, the shortest of those on the wire ends, or now."""
        while self._transfers:
            active = self._active()
            first = min(active, key=lambda transfer: transfer.alone_s, default=None)
            ends = inf if first is None else self._now + first.alone_s * len(active)
            begins = min((t.begins for t in self._transfers if t.begins > self._now), default=inf)
            until = min(ends, begins, now)
            for transfer in active:
                transfer.alone_s = max(0.0, transfer.alone_s - (until - self._now) / len(active))
            self._now = max(self._now, until)
            if first is not None and until == ends:
                first.over = True  # for being the first, not for a remainder of zero: rounding leaves some
                self._transfers.remove(first)
            elif until == now:
                break
        self._now = max(self._now, now)
