"""Which action each block gets, so that a step stays within a budget of bytes at the least predicted extra time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple, get_args

import numpy as np

# What is done with a block's activations between its forward and its backward:
#   keep        they stay on the device
#   recompute   only the block's input stays, and backward runs its forward again
#   join        recomputed in one run with the block before, which needs no input of its own
Action = Literal["keep", "recompute", "join"]
ACTIONS: tuple[Action, ...] = get_args(Action)
RESOLUTION = 1 << 14  # parts of the budget in which bytes are counted, rounded up


class BudgetError(ValueError):
    """No choice of actions keeps within the budget."""


@dataclass(frozen=True)
class BlockCosts:
    """Bytes and seconds of one block of a model, which gets one action as a whole.

    forward_s, backward_s   its compute time, without any recomputation
    inner_nbytes            what autograd saves in it and no other block needs
    input_nbytes            its input, from which it can be recomputed
    joins                   whether it can be recomputed in one run with the block before
    recomputes              whether it can be recomputed at all
    work_nbytes             gradients of activations that live only while it is differentiated
    runs                    how often it runs in a forward, each run differentiated by itself; bytes and seconds are
                            of all runs together
    """

    name: str
    forward_s: float
    backward_s: float
    inner_nbytes: int
    input_nbytes: int
    joins: bool = False
    recomputes: bool = True
    work_nbytes: int = 0
    runs: int = 1

    @property
    def nbytes(self) -> int:
        """All that autograd has saved in it, its input included."""
        return self.inner_nbytes + self.input_nbytes

    @property
    def recomputed_nbytes(self) -> int:
        """What recomputing it brings back while one run of it is differentiated."""
        return self.inner_nbytes // self.runs


class Forecast(NamedTuple):
    """Predicted extra seconds of a step, and peak bytes of activations on the device."""

    extra_s: float
    peak_nbytes: int


class ActivationChoice(NamedTuple):
    """An action for every block, and its forecast."""

    actions: dict[str, Action]
    forecast: Forecast


def predict(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> Forecast:
    """Forecast one step with an action for every block; ``blocks`` are in the order of forward."""
    extra_s = sum(block.forward_s for block in blocks if actions.get(block.name, "keep") != "keep")
    return Forecast(extra_s, max(in_use(blocks, actions).values(), default=0))


def in_use(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> dict[str, int]:
    """Bytes of activations on the device while each block is differentiated, by its name."""
    kept = recomputed = 0  # what stays of the blocks so far, and what is recomputed of this run of joined blocks
    found = {}
    for block in blocks:
        action = actions.get(block.name, "keep")  # a block that did not run on rank 0, which has chosen
        if action == "join":
            recomputed += block.nbytes
        else:
            kept += block.nbytes if action == "keep" else block.input_nbytes
            recomputed = 0 if action == "keep" else block.recomputed_nbytes
        found[block.name] = kept + recomputed + block.work_nbytes
    return found


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


def choose(blocks: Sequence[BlockCosts], budget_nbytes: int) -> ActivationChoice:
    """Return the actions with the least predicted extra time whose predicted peak is within the budget.

    Dynamic programming over the blocks and over what stays in memory of those so far, counted in 1/16384 of the budget:

        least[j, k + kept(run)] = min over runs of blocks i … j−1 of least[i, k] + extra(run), if k ≤ most(run)
    """
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    if (forecast := predict(blocks, kept)).peak_nbytes <= budget_nbytes:  # nothing is faster
        return ActivationChoice(kept, forecast)
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
    return ActivationChoice(kept, predict(blocks, kept))


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
