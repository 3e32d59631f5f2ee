"""Which action each block gets, so that a step stays within a budget of bytes at the least predicted extra time."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from anabranch.lean.activations.cost_model import Action, BlockCosts, Forecast, predict
from anabranch.values.checks import check_nbytes

RESOLUTION = 1 << 14  # parts of the budget in which bytes are counted, rounded up


class BudgetError(ValueError):
    """No choice of actions keeps within the budget."""


class Choice(NamedTuple):
    """An action for every block, and its forecast."""

    actions: dict[str, Action]
    forecast: Forecast


class _Run(NamedTuple):
    """Blocks ``first`` to ``end`` − 1: one that is kept, or those that are recomputed together.

    kept_units   what stays of them in memory, in parts of the budget
    most_units   how much may stay of the blocks before, so that each of them can be differentiated within the budget
    """

    first: int
    end: int
    recomputed: bool
    kept_units: int
    most_units: int
    extra_s: float


def choose(blocks: Sequence[BlockCosts], budget_nbytes: int) -> Choice:
    """Return the actions with the least predicted extra time whose predicted peak is within the budget.

    Dynamic programming over the blocks and over what stays in memory of those so far, counted in 1/16384 of the budget:

        least[j, k + kept(run)] = min over runs of blocks i … j−1 of least[i, k] + extra(run), if k ≤ most(run)
    """
    _check(blocks, budget_nbytes)
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    if (forecast := predict(blocks, kept)).peak_nbytes <= budget_nbytes:  # nothing is faster
        return Choice(kept, forecast)
    unit_nbytes = max(1, ceil(budget_nbytes / RESOLUTION))
    units = budget_nbytes // unit_nbytes + 1
    least_s = np.full((len(blocks) + 1, units), np.inf)
    least_s[0, 0] = 0.0
    taken: list[list[_Run]] = [[] for _ in range(len(blocks) + 1)]  # by block behind it: runs that may end there
    number = np.zeros((len(blocks) + 1, units), dtype=np.int32)  # which of them
    for first in range(len(blocks)):
        for run in _runs_from(blocks, first, budget_nbytes, unit_nbytes):
            count = min(run.most_units, units - 1 - run.kept_units) + 1
            if count <= 0:
                continue
            target = slice(run.kept_units, run.kept_units + count)
            reached_s = least_s[first, :count] + run.extra_s
            better = reached_s < least_s[run.end, target]
            least_s[run.end, target][better] = reached_s[better]
            number[run.end, target][better] = len(taken[run.end])
            taken[run.end].append(run)
    if not np.isfinite(least_s[-1]).any():
        raise BudgetError(f"no choice of blocks to recompute keeps within {budget_nbytes} bytes")
    end, used = len(blocks), int(np.argmin(least_s[-1]))
    while end:
        run = taken[end][number[end, used]]
        for index in range(run.first, end) if run.recomputed else ():
            kept[blocks[index].name] = "recompute" if index == run.first else "join"
        end, used = run.first, used - run.kept_units
    return Choice(kept, predict(blocks, kept))


def smallest_budget(blocks: Sequence[BlockCosts]) -> int:
    """Return the least budget that some actions keep within, to about a thousandth of all bytes."""
    fits = predict(blocks, {block.name: "keep" for block in blocks}).peak_nbytes
    resolution, too_small = max(1, fits // 1000), -1
    while fits - too_small > resolution:
        tried = (fits + too_small) // 2
        try:
            choose(blocks, tried)
        except BudgetError:
            too_small = tried
        else:
            fits = tried
    return fits


def _runs_from(blocks: Sequence[BlockCosts], first: int, budget_nbytes: int, unit_nbytes: int) -> Iterator[_Run]:
    """All runs that begin with this block."""
    block = blocks[first]
    units = ceil(block.nbytes / unit_nbytes)
    yield _Run(first, first + 1, False, units, (budget_nbytes - block.work_nbytes) // unit_nbytes - units, 0.0)
    units = ceil(block.input_nbytes / unit_nbytes)
    recomputed_nbytes, most_units, extra_s = 0, budget_nbytes, 0.0
    for end in range(first + 1, len(blocks) + 1):
        block = blocks[end - 1]
        if not block.recomputes or (end > first + 1 and not block.joins):
            return
        recomputed_nbytes += block.recomputed_nbytes if end == first + 1 else block.nbytes
        most_units = min(most_units, (budget_nbytes - recomputed_nbytes - block.work_nbytes) // unit_nbytes - units)
        extra_s += block.forward_s
        if most_units < 0:
            return
        yield _Run(first, end, True, units, most_units, extra_s)


def _check(blocks: Sequence[BlockCosts], budget_nbytes: int) -> None:
    check_nbytes("budget_nbytes", budget_nbytes)
    names = [block.name for block in blocks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two blocks are called {twice!r}: expected a name for each")
