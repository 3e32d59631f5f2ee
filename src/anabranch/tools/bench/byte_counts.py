"""Bytes and messages that each rank sent and received: the measure by which sparse exchanges are compared."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class ByteCounts:
    """Bytes and messages, per rank and phase. What a rank keeps for itself is not counted.

    Collectives count as their usual algorithms send them: an all-to-all directly, an all-gather around the ring (a rank
    passes on everything except its successor's own part), an all-reduce twice around the ring.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))
        self._received: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))
        self._messages: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))

    @property
    def phases(self) -> list[str]:
        """The phases seen so far, in order of their first message."""
        return list(self._sent)

    def sent(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Bytes sent by each rank, in these phases or in all."""
        return self._total(self._sent, phases)

    def received(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Bytes received by each rank."""
        return self._total(self._received, phases)

    def messages(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Messages sent by each rank. Each costs the latency of the network once."""
        return self._total(self._messages, phases)

    def volume(self, phases: Iterable[str] | None = None) -> float:
        """The most bytes that any rank sent, or received: links are full duplex, so the larger of the two counts."""
        wanted = None if phases is None else list(phases)
        return float(np.maximum(self.sent(wanted), self.received(wanted)).max(initial=0.0))

    def clear(self) -> None:
        """Reset all counts."""
        for table in (self._sent, self._received, self._messages):
            table.clear()

    def add_pairs(self, phase: str, nbytes: FloatArray) -> None:
        """Messages of ``nbytes[i, j]`` from rank i to rank j, sent directly."""
        between = nbytes.copy()
        np.fill_diagonal(between, 0.0)
        self._sent[phase] += between.sum(axis=1)
        self._received[phase] += between.sum(axis=0)
        self._messages[phase] += (between > 0).sum(axis=1)

    def add_ring_gather(self, phase: str, nbytes: FloatArray) -> None:
        """An all-gather around a ring; the part of rank i has ``nbytes[i]``."""
        self._sent[phase] += nbytes.sum() - np.roll(nbytes, -1)
        self._received[phase] += nbytes.sum() - nbytes
        self._messages[phase] += self.size - 1

    def add_ring_reduce(self, phase: str, nbytes: float) -> None:
        """An all-reduce of ``nbytes`` around a ring."""
        passed_on = 2 * nbytes * (self.size - 1) / self.size
        self._sent[phase] += passed_on
        self._received[phase] += passed_on
        self._messages[phase] += 2 * (self.size - 1)

    @staticmethod
    def _total(table: dict[str, FloatArray], phases: Iterable[str] | None) -> FloatArray:
        chosen = [table[phase] for phase in (list(table) if phases is None else phases)]
        return np.sum(chosen, axis=0) if chosen else np.zeros(0)
