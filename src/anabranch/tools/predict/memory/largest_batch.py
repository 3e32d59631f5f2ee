"""Searches the largest batch that fits in memory with few predictions, since each may be slow."""

from collections.abc import Callable, Mapping

MAX_BATCH = 1 << 16  # no larger batch is tried


def largest_batch(
    nbytes_at: Callable[[int], int], limit_nbytes: int, first: int = 8, max_batch: int = MAX_BATCH
) -> int:
    """Return the largest batch up to ``max_batch`` whose peak is at most the limit; 0 if none is.

    ``nbytes_at`` gives the peak of a batch, and never falls. Peaks are nearly straight lines, so a line through the two
    nearest known batches says which to try next; both neighbours of the answer are tried in any case.
    """
    known = {0: 0}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = nbytes_at(batch)
        return known[batch] <= limit_nbytes

    low, high = 0, first
    while high <= max_batch and fits(high):
        further = 2 * high if low == 0 else max(high + 1, _crossing(known, low, high, limit_nbytes))
        low, high = high, further
    if high > max_batch:
        if low == max_batch or fits(max_batch):
            return max_batch
        high = max_batch
    while high - low > 1:  # low fits, high does not
        guess = _crossing(known, low, high, limit_nbytes) if low else (low + high) // 2
        middle = min(high - 1, max(low + 1, guess))
        if fits(middle):
            low = middle
            if middle + 1 < high and not fits(middle + 1):
                high = middle + 1
        else:
            high = middle
    return low


def _crossing(known: Mapping[int, int], low: int, high: int, limit_nbytes: int) -> int:
    """Return the batch at which the line through two known batches reaches the limit."""
    slope = (known[high] - known[low]) / (high - low)
    return low + int((limit_nbytes - known[low]) / slope) if slope > 0 else 2 * high
