"""How many buckets have memory of their own at a time under Lean, and how much that is."""

from collections.abc import Sequence

SLOTS = 2  # one for the bucket whose exchange runs, one for the next bucket
ALIGNMENT = 512  # bytes: where a slot may begin


def ring_nbytes(bucket_nbytes: Sequence[int]) -> int:
    """The memory of a ``SlotRing`` for these buckets: of the two largest neighbours; the first follows the last."""
    whole = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in bucket_nbytes]
    return max((one + other for one, other in zip(whole, [*whole[1:], *whole[:1]], strict=True)), default=0)
