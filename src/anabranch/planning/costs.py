"""A cost curve as arrays, for planners that ask for the costs of many messages at once."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.values.curve import Segment

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Sums taken in another order differ in their last bits: two plans this close, relatively, finish together.
SAME = 1e-12


class CostLines:
    """The lines of a cost curve T, as arrays."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.at = np.array([segment.nbytes for segment in segments], dtype=np.int64)
        self.seconds = np.array([segment.seconds for segment in segments])
        self.slope = np.array([segment.s_per_byte for segment in segments])

    def cost(self, nbytes: Ints) -> Floats:
        """T of each message."""
        k = np.searchsorted(self.at, nbytes, side="right") - 1
        return np.asarray(self.seconds[k] + self.slope[k] * (nbytes - self.at[k]))

    def table(self, nbytes: Iterable[int]) -> Floats:
        """T of one message with the items i … j − 1 of these sizes, at [i, j]; where there are none, T(0)."""
        total = np.cumsum([0, *nbytes], dtype=np.int64)
        return self.cost(np.maximum(total[None, :] - total[:, None], 0))
