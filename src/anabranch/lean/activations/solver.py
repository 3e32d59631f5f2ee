"""Which action each block gets, so that a step stays within a budget of bytes at the least predicted extra time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.lean.activations.cost_model import (
    ACTIONS,
    START,
    Action,
    BlockCosts,
    Forecast,
    HostLink,
    PartialForecast,
    advance,
    possible_actions,
    predict,
)
from anabranch.values.checks import check_nbytes

BEAM_WIDTH = 64  # choices for the first blocks that the search follows at once
BEAM_GROWTH, MAX_BEAM_WIDTH = 8, 4096  # the search is repeated with a wider beam where none of them fits in the end

_Candidate = tuple[PartialForecast, tuple[Action, ...]]  # actions for the first blocks, and where they lead


class BudgetError(ValueError):
    """No choice of actions keeps within the budget."""


class Choice(NamedTuple):
    """An action for every block, its forecast, and a lower bound: no choice within the budget takes less extra time."""

    actions: dict[str, Action]
    forecast: Forecast
    at_least_s: float


def choose_with_windows(blocks: Sequence[BlockCosts], link: HostLink, budget_nbytes: int) -> Choice:
    """Choose actions such that copies under way fit into the budget, too.

    Offloading needs the bytes of the link's windows, where these have a limit. So two choices compete: nothing
    offloaded with the whole budget, and any action with the budget less the windows.
    """
    windows_nbytes = (link.window_nbytes or 0) + (link.ahead_nbytes or 0)
    not_offloaded = [replace(block, offloads=False) for block in blocks]
    choices: list[Choice] = []
    errors: list[BudgetError] = []
    for allowed, room_nbytes in ((not_offloaded, budget_nbytes), (blocks, max(budget_nbytes - windows_nbytes, 0))):
        try:
            choices.append(choose(allowed, link, room_nbytes))
        except BudgetError as error:
            errors.append(error)
        if choices and choices[0].forecast.extra_s == 0:
            break
    if not choices:
        raise BudgetError(
            f"with nothing offloaded, {errors[0]}. With offloading, which needs {windows_nbytes} of {budget_nbytes} "
            f"for copies under way, {errors[1]}"
        )
    return min(choices, key=lambda choice: choice.forecast.extra_s)


def smallest_budget(blocks: Sequence[BlockCosts], link: HostLink, extra_s: float = float("inf")) -> int:
    """Return the least budget, to about a thousandth of all bytes, with which a step takes at most so much longer."""
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    fits = predict(blocks, link, kept).peak_nbytes
    resolution, too_small = max(1, fits // 1000), -1
    while fits - too_small > resolution:
        tried = (fits + too_small) // 2
        try:
            enough = choose_with_windows(blocks, link, tried).forecast.extra_s <= extra_s
        except BudgetError:
            enough = False
        fits, too_small = (tried, too_small) if enough else (fits, tried)
    return fits


def choose(blocks: Sequence[BlockCosts], link: HostLink, budget_nbytes: int, width: int = BEAM_WIDTH) -> Choice:
    """Return the actions with the least predicted extra time whose predicted peak is within the budget.

    A beam search goes through the blocks in order with all candidates that no other dominates. It is exact while there
    are at most ``width`` of them. Beyond that the most promising go on, and ``at_least_s`` bounds what was missed.
    """
    _check(blocks, budget_nbytes)
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    if (forecast := predict(blocks, link, kept)).peak_nbytes <= budget_nbytes:  # nothing is faster
        return Choice(kept, forecast, forecast.extra_s)
    candidates: list[_Candidate] = [(START, ())]
    dropped_s = float("inf")  # a lower bound for all dropped candidates
    for number, block in enumerate(blocks):
        reached = [
            (after, (*path, action))
            for state, path in candidates
            for action in possible_actions(block, state if number else None)
            if (after := advance(state, block, link, action)).peak_nbytes <= budget_nbytes
        ]
        candidates = _undominated(reached)
        # A dropped candidate might have fitted: search again with a wider beam.
        if not candidates and width < MAX_BEAM_WIDTH and dropped_s < float("inf"):
            return choose(blocks, link, budget_nbytes, BEAM_GROWTH * width)
        if not candidates:
            raise BudgetError(
                f"budget_nbytes is {budget_nbytes}: no choice keeps within it up to block {block.name!r}; give "
                "more, or a smaller batch"
            )
        if len(candidates) > width:
            bounds = _lower_bounds(candidates, blocks[number + 1 :], link, budget_nbytes)
            candidates, best_dropped_s = _narrowed(candidates, bounds, width)
            dropped_s = min(dropped_s, best_dropped_s)
    _, path = min(candidates, key=lambda candidate: (candidate[0].extra_s, candidate[0].moved_nbytes))
    found: dict[str, Action] = {block.name: action for block, action in zip(blocks, path, strict=True)}
    actions, forecast = _relaxed(blocks, link, budget_nbytes, found)
    return Choice(actions, forecast, min(forecast.extra_s, dropped_s))


def _check(blocks: Sequence[BlockCosts], budget_nbytes: int) -> None:
    check_nbytes("budget_nbytes", budget_nbytes)
    names = [block.name for block in blocks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two blocks are called {twice!r}: expected a name for each")
    largest = max(blocks, key=lambda block: block.nbytes_per_run + block.work_nbytes, default=None)
    if largest is not None and (least := largest.nbytes_per_run + largest.work_nbytes) > budget_nbytes:
        raise BudgetError(
            f"budget_nbytes is {budget_nbytes}: block {largest.name!r} alone has {least} on the device while "
            "it is differentiated; give at least that, a smaller batch, or smaller blocks"
        )


def _narrowed(candidates: list[_Candidate], bounds: NDArray[np.float64], width: int) -> tuple[list[_Candidate], float]:
    """Keep the ``width`` candidates with the least bounds; also return the least bound of a dropped one.

    The two that leave the most room for the next block stay in any case, since the others may fit no further block.
    """
    order = np.argsort(bounds, kind="stable")
    roomiest = {
        min(range(len(candidates)), key=lambda index: used(candidates[index][0]))
        for used in (_used_nbytes, _used_nbytes_if_joined)
    }
    kept = sorted({*order[:width].tolist(), *roomiest})
    return [candidates[index] for index in kept], float(bounds[order[width]])


def _used_nbytes(state: PartialForecast) -> tuple[int, bool]:
    """What the next block finds in use; where all blocks can be offloaded, the least used can always go on."""
    return state.kept_nbytes, state.last == "keep"


def _used_nbytes_if_joined(state: PartialForecast) -> tuple[int, bool]:
    """What the next block finds in use if it joins this one."""
    return state.kept_nbytes + state.passing_nbytes, state.last == "keep"


def _relaxed(
    blocks: Sequence[BlockCosts], link: HostLink, budget_nbytes: int, actions: dict[str, Action]
) -> tuple[dict[str, Action], Forecast]:
    """Offload and recompute only where it is needed: the search is indifferent to what costs no predicted time.

    Goes from the last block to the first, as the last copies out have the least time to hide in.
    """
    forecast = predict(blocks, link, actions)
    for number in reversed(range(len(blocks))):
        name = blocks[number].name
        if number + 1 < len(blocks) and actions[blocks[number + 1].name] == "join":
            simpler: tuple[Action, ...] = ("recompute",) if actions[name] == "recompute+offload" else ()
        else:
            simpler = ("keep", "recompute") if actions[name] == "recompute+offload" else ("keep",)
        for action in simpler:
            tried = predict(blocks, link, {**actions, name: action})
            if tried.peak_nbytes <= budget_nbytes and tried.extra_s <= forecast.extra_s:
                actions, forecast = {**actions, name: action}, tried
                break
    return actions, forecast


def _undominated(candidates: list[_Candidate]) -> list[_Candidate]:
    """Remove candidates that another dominates: whatever follows, it ends no later and within the same bytes.

    Whatever follows, a second more of waiting now is at most a second more at the end. So a candidate that dominates
    has no more extra time now, and comes first in this order. A block that is recomputed can be joined, and shares
    nothing with the next.
    """
    candidates = sorted(candidates, key=lambda each: (each[0].extra_s, each[0].kept_nbytes, each[0].moved_nbytes))
    states = [state for state, _ in candidates]
    kept = np.array([state.kept_nbytes for state in states])
    recomputed = np.array([state.recomputed for state in states])
    passing = np.array([state.passing_nbytes if state.recomputed else 2**62 for state in states])
    kind = np.array([ACTIONS.index("join" if state.recomputed else state.last) for state in states])
    spent = np.array([state.spent_s for state in states])
    waits = np.array([(state.late_s, state.lead_s, state.due_s) for state in states])
    remaining: list[int] = []
    for index in range(len(candidates)):
        first = np.array(remaining, dtype=np.intp)
        longer_s = spent[first] - spent[index] + np.maximum(waits[first] - waits[index], 0.0).sum(axis=1)
        alike = (kind[first] == kind[index]) | recomputed[first]
        dominates = alike & (kept[first] <= kept[index]) & (passing[first] <= passing[index]) & (longer_s <= 0)
        if not dominates.any():
            remaining.append(index)
    return [candidates[index] for index in remaining]


def _lower_bounds(
    candidates: list[_Candidate], rest: Sequence[BlockCosts], link: HostLink, budget_nbytes: int
) -> NDArray[np.float64]:
    """Extra seconds that each candidate must come to, whatever actions the ``rest`` gets.

    Bytes over the budget are moved while the rest of forward runs, or recomputed. A byte costs no less than in the
    cheapest blocks, taken in fractions if need be, and no more than to wait for its copy.
    """
    wait_s = 1 / link.out_nbytes_per_s
    forward_s = sum(block.forward_s for block in rest)
    backward_s = sum(block.backward_s for block in rest)
    prices = sorted(
        (min(block.forward_s / block.nbytes, wait_s) if block.recomputes else wait_s, block.nbytes)
        for block in rest
        if block.nbytes
    )
    sizes = np.cumsum([0, *(nbytes for _, nbytes in prices)])
    costs = np.cumsum([0.0, *(price * nbytes for price, nbytes in prices)])
    states = [state for state, _ in candidates]
    over = np.array([state.kept_nbytes for state in states]) + float(sizes[-1]) - budget_nbytes
    left_s = forward_s - np.array([state.late_s for state in states])
    back_s = np.array([state.lead_s + state.due_s for state in states]) - forward_s - backward_s
    hidden = np.maximum(left_s, 0.0) * link.out_nbytes_per_s
    spent_s = np.array([state.spent_s for state in states])
    waited_s = np.maximum(-left_s, 0.0) + np.maximum(back_s, 0.0)
    return np.asarray(spent_s + waited_s + np.interp(over - hidden, sizes, costs), dtype=np.float64)
