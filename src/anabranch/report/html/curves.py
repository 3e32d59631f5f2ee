"""Curves over steps, thinned where there are more steps than pixels, without hiding what stood out."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MOST_POINTS = 2000  # drawn one by one
BINS = 800  # of a longer run: about as many as a wide screen has columns for


@dataclass(frozen=True, slots=True)
class Thinned:
    """Medians of equal numbers of steps, with the least and the most of each; ``per_point`` is 1 where all are kept."""

    steps: tuple[int, ...]
    middle: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    high_at: tuple[int, ...]
    last: tuple[int, ...]
    per_point: int


def thinned(steps: Sequence[int], values: Sequence[float]) -> Thinned:
    """A curve of at most ``MOST_POINTS`` points. Every least and every most value is still on it."""
    if len(steps) <= MOST_POINTS:
        alike = tuple(values)
        return Thinned(tuple(steps), alike, alike, alike, tuple(steps), tuple(steps), 1)
    per_point = -(-len(steps) // BINS)
    parts = [range(low, min(low + per_point, len(steps))) for low in range(0, len(steps), per_point)]
    tops = [max(part, key=values.__getitem__) for part in parts]
    return Thinned(
        tuple(steps[part[0]] for part in parts),
        tuple(median(values[at] for at in part) for part in parts),
        tuple(min(values[at] for at in part) for part in parts),
        tuple(values[at] for at in tops),
        tuple(steps[at] for at in tops),
        tuple(steps[part[-1]] for part in parts),
        per_point,
    )
