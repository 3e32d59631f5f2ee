"""Where to cut a compiled graph: finely, to see when gradients could leave, and then where the buckets of a plan end.

The backward of a part is one call, and its gradients leave when it ends. A gradient is complete when the backward of
the first operation that uses its parameter has run. So a cut before operation i lets all gradients leave, before the
operations that come earlier have run backward, whose parameters are first used at i or later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

PARTS = 16  # at most: what the last part sends is never hidden, and this is a sixteenth of all gradients
MIN_PART_NBYTES = 1 << 16  # a shorter message costs little more than its latency, and each part costs compile time
SLACK = 2.0  # by what factor a part may exceed that, so that it begins where little crosses the cut: between two blocks

Cuts = tuple[int, ...]  # positions of operations, ascending: each begins a part


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What cutting must know of a graph with operations 0, 1, ….

    first_use   by the name of a parameter, the first operation that uses it
    nbytes      by the same names, the bytes of its gradient
    crossing    per operation, the bytes of activations that cross a cut before it; inf where no cut is possible
    last_use    per operation, the last one that uses its result; ``len(crossing)`` if the graph returns it
    """

    first_use: Mapping[str, int]
    nbytes: Mapping[str, int]
    crossing: Sequence[float]
    last_use: Sequence[int]


def fine_cuts(shape: GraphShape, model_nbytes: int) -> Cuts:
    """Cuts into parts of about a sixteenth of the model's gradients each, where little crosses the cut."""
    part_nbytes = max(MIN_PART_NBYTES, model_nbytes / PARTS)
    completed = [0] * len(shape.crossing)
    for name, first in shape.first_use.items():
        completed[first] += shape.nbytes[name]
    before = [0, *accumulate(completed)]  # bytes of the gradients that operations before a position complete
    cuts: list[int] = []
    end: int | None = len(shape.crossing)
    while end is not None and (end := _previous_cut(shape, before, end, part_nbytes)) is not None:
        cuts.append(end)
    return tuple(reversed(cuts))


def is_connected(shape: GraphShape, model_nbytes: int) -> bool:
    """Whether a graph cannot be cut that otherwise would be."""
    free = replace(shape, crossing=[0.0] * len(shape.crossing))
    return not fine_cuts(shape, model_nbytes) and bool(fine_cuts(free, model_nbytes))


def cuts_for(parts: Sequence[Iterable[str]], shape: GraphShape, allowed: Cuts) -> Cuts:
    """Those of the ``allowed`` cuts that let these gradients leave as soon as they can, in this order."""
    found = set()
    needed = len(shape.crossing)  # the first operation that the parts so far need
    for names in parts[:-1]:
        needed = min([needed, *(shape.first_use[name] for name in names if name in shape.first_use)])
        found.update([cut for cut in allowed if cut <= needed][-1:])
    return tuple(sorted(found))


def _previous_cut(shape: GraphShape, before: Sequence[int], end: int, part_nbytes: float) -> int | None:
    """The cut that begins the part that ends before operation ``end``; None if it begins the graph."""
    best: tuple[float, int] | None = None
    most_nbytes = inf
    last_use = 0
    for position in range(end - 1, 0, -1):
        last_use = max(last_use, shape.last_use[position])
        nbytes = before[end] - before[position]
        if before[position] == 0 or nbytes > most_nbytes:
            break
        has_result = last_use >= end  # a part without one could not be placed
        if nbytes >= part_nbytes and has_result and shape.crossing[position] < inf:
            if best is None:
                most_nbytes = max(nbytes, SLACK * part_nbytes)
            if best is None or shape.crossing[position] < best[0]:
                best = shape.crossing[position], position
    return best[1] if best is not None else None
