"""The exact plan of two-level messages on one lane: stages inside nodes and between them overlap.

With r[j] the instant at which the j-th gradient is ready, and s, m and g those at which the first i gradients have left
the scatter, the link between nodes and the gather, a message with the gradients i + 1 … j leaves them at

    s' = max(s, r[j]) + scatter        m' = max(m, s') + between        g' = max(g, m') + gather

No single one of the three decides what follows, so every i has a front: the states (s, m, g) that no other one beats in
all numbers. What is too early to matter counts as late as it may be: the next message finds the scatter free if s is no
later than r[i+1], the link if m is no later than that message at its smallest can come to it, and so on. What is left
are 20 states for each i on average, on the recorded models; a hundred where nodes are slower inside than between them.

The first search has the fronts of (s, m, g) and finds the earliest finish. The second one counts messages, too, and
keeps only what may still finish by then: so it finds one with fewest messages among all plans that finish first.

Where sending a message delays all later gradients by d, r[j] is later by d times the number of messages before it. Then
the first search finds an early finish, the second one the earliest.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from anabranch.planning.by_size import at_most
from anabranch.planning.costs import SAME, CostLines, Floats, Ints
from anabranch.values.curve import Curve
from anabranch.values.network import Network
from anabranch.values.trace import TensorSpec

MOST_GRADIENTS = 128  # more are merged with their neighbours before the search


def best_runs(tensors: Sequence[TensorSpec], network: Network, collective: str) -> list[Sequence[TensorSpec]]:
    """The gradients in buckets that finish first, in as few as that allows; the network has costs inside nodes.

    Exact for up to ``MOST_GRADIENTS``. Of more, neighbours are merged first, which is not exact: on recorded models the
    step was longer by 0.4 % at most.
    """
    assert network.inside is not None, "without costs inside nodes there is one stage, which best_cuts plans"
    groups = at_most(tensors, MOST_GRADIENTS)
    own = [sum(t.nbytes for t in group) for group in groups]
    priced = [sum(t.cost_nbytes(collective) for t in group) for group in groups]

    def table(curve: Curve, nbytes: Sequence[int]) -> Floats:
        return CostLines(curve.segments()).table(nbytes)

    stages = _Stages(
        np.array([0.0, *(group[-1].ready_s for group in groups)]),
        table(network.inside.scatter, own),
        table(network.curve(collective), priced),
        table(network.inside.gather, own),
        network.delay_s(collective),
    )
    edges = stages.best_edges()
    return [[t for group in groups[low:high] for t in group] for low, high in pairwise(edges)]


class _States(NamedTuple):
    """States of the search, one to each place.

    ends      [state, stage]: when the groups so far have left each stage
    messages  how many they are
    owner     the number of groups so far
    before    the state before the last message; −1 for none
    """

    ends: Floats
    messages: Ints
    owner: Ints
    before: Ints


class _Stages(NamedTuple):
    """When groups are ready, r[0] being 0, and what a message with the groups i … j − 1 takes in each stage, at [i, j].

    ``delay_s``: by how much each message delays the groups after it.
    """

    ready: Floats
    scatter: Floats
    between: Floats
    gather: Floats
    delay_s: float

    def best_edges(self) -> list[int]:
        """The numbers of groups before each bucket of the best plan, and of all groups."""
        early, _ = self._first_to_finish(self._states())
        # Ten times what counts as the same: the limit is compared with differences, which are rounded.
        states = self._states(early * (1 + 10 * SAME), counted=True)
        _, at = self._first_to_finish(states)
        edges = []
        while at >= 0:
            edges.append(int(states.owner[at]))
            at = int(states.before[at])
        return edges[::-1]

    def _first_to_finish(self, states: _States) -> tuple[float, int]:
        """The earliest finish, and the state with fewest messages that has it."""
        last = np.flatnonzero(states.owner == len(self.ready) - 1)
        finish = np.maximum(states.ends[last, 2], self.ready[-1] + states.messages[last] * self.delay_s)
        same = last[finish <= finish.min() * (1 + SAME)]
        return float(finish.min()), int(same[np.argmin(states.messages[same])])

    def _states(self, limit_s: float = inf, counted: bool = False) -> _States:
        """The fronts of all i, of states that may still finish by ``limit_s``; ``counted``: by messages, too."""
        count = len(self.ready) - 1
        latest = self._latest(limit_s)
        nothing = np.zeros(1, np.int64)
        found = _States(np.zeros((1, 3)), nothing, nothing, nothing - 1)
        for j in range(1, count + 1):
            i, messages = found.owner, found.messages + 1
            ends = np.empty((len(i), 3))
            starts = np.maximum(found.ends[:, 0], self.ready[j] + found.messages * self.delay_s)
            ends[:, 0] = starts + self.scatter[i, j]
            ends[:, 1] = np.maximum(found.ends[:, 1], ends[:, 0]) + self.between[i, j]
            ends[:, 2] = np.maximum(found.ends[:, 2], ends[:, 1]) + self.gather[i, j]
            some = np.flatnonzero((ends <= latest[j]).all(axis=1))
            ends, messages = ends[some], messages[some]
            if j < count:  # no earlier than they can matter to the next message
                ends[:, 0] = np.maximum(ends[:, 0], self.ready[j + 1] + messages * self.delay_s)
                ends[:, 1] = np.maximum(ends[:, 1], ends[:, 0] + self.scatter[j, j + 1])
                ends[:, 2] = np.maximum(ends[:, 2], ends[:, 1] + self.between[j, j + 1])
            kept = _unbeaten(np.column_stack((ends, messages)), 4 if counted else 3)
            new = _States(ends[kept], messages[kept], np.full(len(kept), j), some[kept])
            found = _States(*(np.concatenate(pair) for pair in zip(found, new, strict=True)))
        return found

    def _latest(self, limit_s: float) -> Floats:
        """[i, stage]: when the first i groups must have left each stage at the latest, to finish by ``limit_s``.

        That is as if each stage were the only one that messages wait for, so that it may be too late already.
        """
        count = len(self.ready) - 1
        latest = np.full((count + 1, 3), limit_s)
        for i in range(count - 1, -1, -1):
            later = slice(i + 1, count + 1)
            between_s, scatter_s = self.between[i, later], self.scatter[i, later]
            left = latest[later, 1].copy()
            left[-1] -= self.gather[i, count]
            latest[i, 1] = (left - between_s).max()
            latest[i, 0] = (np.minimum(latest[later, 0], left - between_s) - scatter_s).max()
        return latest


def _unbeaten(columns: Floats, compared: int) -> Ints:
    """Indices of the rows that no other one beats: that has no larger number in the first ``compared`` columns.

    Of rows that are equal there, one with the least in the other columns.
    """
    left = np.lexsort(columns.T[::-1])
    kept = []
    while len(left):  # no row is beaten by one that is sorted after it, but for equal ones
        kept.append(left[0])
        left = left[(columns[left, :compared] < columns[left[0], :compared]).any(axis=1)]
    return np.array(kept, dtype=np.int64)
