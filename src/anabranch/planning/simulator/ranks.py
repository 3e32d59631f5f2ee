"""Ranks that are not all equally fast: a collective has to wait for the last of them.

The last rank is expected as a mean over worlds. One pool of ranks is drawn, and a world of P ranks is any P of them in
a row, so a pool for the largest world holds many small ones, and no size needs draws of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from anabranch.values.checks import check_positive
from anabranch.values.trace import Trace

MAX_JITTER = 3.0  # one piece of work in six then takes twenty times as long or more: beyond, nothing is modelled
WORLDS = 64  # of one size, over which the last rank is averaged, where the pool has so many
LEAST_RANKS = 512  # in the pool, so that the mean of small worlds is over many of them
CHUNK_NUMBERS = 1 << 20  # drawn at once: 65,536 ranks of 10,000 tensors must not need gigabytes

Times = npt.NDArray[np.float64]


def slowest_ranks(
    trace: Trace,
    world_sizes: Sequence[int],
    jitter: float,
    stragglers: int = 0,
    straggler_factor: float = 1.0,
    seed: int = 0,
) -> dict[int, Trace]:
    """By world size, the trace that a collective sees: a gradient is ready when the last rank is expected to have it.

    Each piece of each rank's computation takes exp(jitter·z) times as long, z standard normal; ``stragglers`` ranks of
    each world compute ``straggler_factor`` times as long besides. The same seed and sizes give the same traces.
    """
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(
            f"jitter is {jitter}: expected 0 to {MAX_JITTER:g}, the spread of the logarithm of computing time"
        )
    check_positive("straggler_factor", straggler_factor)
    worlds = [_Worlds(size, stragglers, straggler_factor) for size in world_sizes]
    ready = np.array([tensor.ready_s for tensor in trace.tensors])
    work = np.concatenate([[trace.forward_s], np.diff(ready, prepend=0.0)])
    rng = np.random.default_rng(seed)
    ranks = max(max(world_sizes), LEAST_RANKS if jitter else 1)
    chunk = max(1, CHUNK_NUMBERS // len(work))
    for low in range(0, ranks, chunk):
        shape = (min(chunk, ranks - low), len(work))
        took = work * np.exp(jitter * rng.standard_normal(shape)) if jitter else np.broadcast_to(work, shape)
        arrived = np.cumsum(took, axis=1)
        for world in worlds:
            world.add(arrived)
    return {world.size: _seen(trace, world.total / world.done) for world in worlds}


class _Worlds:
    """Worlds of one size, filled with ranks in chunks; adds up, over the worlds, when the last rank was ready."""

    def __init__(self, size: int, stragglers: int, factor: float) -> None:
        if not 0 <= stragglers <= size:
            raise ValueError(f"stragglers is {stragglers}: expected 0 to {size}, the world size")
        self.size, self._stragglers, self._factor = size, stragglers, factor
        self.done = 0
        self.total: Times = np.zeros(1)
        self._filled = 0
        self._latest: Times = np.zeros(1)

    def add(self, arrived: Times) -> None:
        """Rows are ranks: the end of forward, then each gradient's instant."""
        at = 0
        while at < len(arrived) and self.done < WORLDS:
            rows = arrived[at : at + self.size - self._filled]
            slow = max(0, self._stragglers - self._filled)  # the first ranks of a world are its stragglers
            for part, factor in ((rows[:slow], self._factor), (rows[slow:], 1.0)):
                if len(part):
                    self._latest = np.maximum(self._latest, factor * part.max(axis=0))
            at += len(rows)
            self._filled += len(rows)
            if self._filled == self.size:
                self.total = self.total + self._latest
                self.done += 1
                self._filled, self._latest = 0, np.zeros(1)


def _seen(trace: Trace, latest: Times) -> Trace:
    """The step starts when all ranks start forward; backward's origin is when the last rank begins it."""
    forward_s = float(latest[0])
    ready = np.maximum.accumulate(np.maximum(0.0, latest[1:] - forward_s))
    tensors = tuple(replace(t, ready_s=float(s)) for t, s in zip(trace.tensors, ready, strict=True))
    return replace(trace, tensors=tensors, forward_s=forward_s)
