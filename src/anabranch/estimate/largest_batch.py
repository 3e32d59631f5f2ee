"""The largest batch that fits: a search that looks at few batches, since each look runs a model."""

import math
from collections.abc import Callable, Mapping

MOST = 1 << 16  # no larger batch is looked at


def largest_batch(
    nbytes_at: Callable[[int], int],
    limit_nbytes: int,
    first: int = 8,
    most: int = MOST,
    enough_nbytes: float = math.inf,
    growth: float = math.inf,
) -> int:
    """The largest batch up to ``most`` whose peak is at most the limit; 0 if none is. ``nbytes_at`` never falls.

    Peaks are nearly straight lines, so a line through the two nearest batches known says where to look next; both
    neighbours of the answer are looked at, whatever the line said. Where looks are dear, a batch that takes
    ``enough_nbytes`` will do, and none is ``growth`` times as large as one that is known to fit.
    """
    known = {0: 0}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = nbytes_at(batch)
        return known[batch] <= limit_nbytes

    low, high = 0, first
    while high <= most and fits(high):
        if known[high] >= enough_nbytes:
            return high
        further = 2 * high if low == 0 else max(high + 1, _crossing(known, low, high, limit_nbytes))
        low, high = high, int(min(further, growth * high))
    if high > most:
        if low == most or fits(most):
            return most
        high = most
    return _between(fits, known, low, high, limit_nbytes, enough_nbytes)


def _between(
    fits: Callable[[int], bool], known: Mapping[int, int], low: int, high: int, limit: int, enough: float
) -> int:
    """``low`` fits and ``high`` does not."""
    while high - low > 1 and known[low] < enough:
        guess = _crossing(known, low, high, limit) if low else (low + high) // 2
        middle = min(high - 1, max(low + 1, guess))
        if fits(middle):
            low = middle
            if enough == math.inf and middle + 1 < high and not fits(middle + 1):
                high = middle + 1
        else:
            high = middle
    return low


def _crossing(known: Mapping[int, int], low: int, high: int, limit: int) -> int:
    """Where the line through two known batches reaches the limit."""
    slope = (known[high] - known[low]) / (high - low)
    return low + int((limit - known[low]) / slope) if slope > 0 else 2 * high
