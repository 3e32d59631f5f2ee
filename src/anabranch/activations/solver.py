"""What to do with each block's activations: keep, offload or recompute, to fit a budget at the least extra time."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from anabranch.activations.cost_model import Block, HostLink
from anabranch.checks import check_nbytes

Action = Literal["keep", "offload", "recompute", "recompute+offload", "join"]
ACTIONS: tuple[Action, ...] = get_args(Action)

RECOMPUTED = ("recompute", "recompute+offload", "join")
OFFLOADED = ("offload", "recompute+offload")
WIDTH = 64  # choices for the first blocks that the search follows at once
WIDER, MOST_WIDTH = 8, 4096  # where none of them fits in the end


class BudgetError(ValueError):
    """No choice keeps within the budget."""


class Forecast(NamedTuple):
    """What a choice costs, and what it leaves on the device at most; ``moved_nbytes`` go each way."""

    extra_s: float
    peak_nbytes: int
    moved_nbytes: int


class Choice(NamedTuple):
    """An action for every block, what it costs, and the seconds below which no choice within the budget can be."""

    actions: dict[str, Action]
    forecast: Forecast
    at_least_s: float


class _State(NamedTuple):
    """Where a choice for the first blocks has led.

    The link carries one copy after the other. ``late_s`` is how far it is behind when forward reaches this block, and
    what remains of that at the end of forward is waited for. The way back is the same seen from the end: a copy must
    have arrived before its block's backward, so what the computation after it does not hide comes on top. Beyond the
    link's windows nothing hides anything.
    """

    last: Action
    kept_nbytes: int
    passing_nbytes: int  # on the device only while this block, or the run of blocks it is in, is differentiated
    spent_s: float  # recomputing, and waiting where a window was full
    late_s: float  # copies out that are still under way
    lead_s: float  # copies back that the backward of this block and those after it have not hidden
    due_s: float  # copies back for this block, or for the first of its run: nothing here can hide them
    peak_nbytes: int
    moved_nbytes: int

    @property
    def extra_s(self) -> float:
        return self.spent_s + self.late_s + self.lead_s + self.due_s


_START = _State("keep", 0, 0, 0.0, 0.0, 0.0, 0.0, 0, 0)


def predict(blocks: Sequence[Block], link: HostLink, actions: Mapping[str, Action]) -> Forecast:
    """The extra seconds and the peak bytes of a choice that names an action for every block."""
    state = _START
    for number, block in enumerate(blocks):
        if block.name not in actions:
            raise ValueError(f"no action for block {block.name!r}: expected one of {', '.join(ACTIONS)}")
        action = actions[block.name]
        if action not in _possible(block, state if number else None):
            raise ValueError(
                f"block {block.name!r} after {state.last!r} is to {action}: expected one of "
                f"{', '.join(_possible(block, state if number else None))}"
            )
        state = _after(state, block, link, action)
    return Forecast(state.extra_s, state.peak_nbytes, state.moved_nbytes)


def choose(blocks: Sequence[Block], link: HostLink, budget_nbytes: int, width: int = WIDTH) -> Choice:
    """The actions with the least predicted extra time whose predicted peak is within the budget.

    Goes through the blocks in order with all choices that no other beats whatever follows. That is exact while there
    are at most ``width`` of them; beyond that the most promising go on, and ``at_least_s`` says what could have been
    missed.
    """
    _check(blocks, budget_nbytes)
    labels: list[_Label] = [(_START, ())]
    dropped_s = float("inf")  # the least that a dropped choice could have come to
    for number, block in enumerate(blocks):
        reached = [
            (after, (*path, action))
            for state, path in labels
            for action in _possible(block, state if number else None)
            if (after := _after(state, block, link, action)).peak_nbytes <= budget_nbytes
        ]
        labels = _undominated(reached)
        if not labels and width < MOST_WIDTH and dropped_s < float("inf"):  # one that was dropped might have fitted
            return choose(blocks, link, budget_nbytes, WIDER * width)
        if not labels:
            raise BudgetError(
                f"budget_nbytes is {budget_nbytes}: no choice keeps within it up to block {block.name!r}; give "
                "more, or a smaller batch"
            )
        if len(labels) > width:
            bounds = _at_least(labels, blocks[number + 1 :], link, budget_nbytes)
            order = np.argsort(bounds, kind="stable")
            dropped_s = min(dropped_s, float(bounds[order[width]]))
            going = {
                min(range(len(labels)), key=lambda index: lean(labels[index][0])) for lean in (_leanness, _tightness)
            }
            labels = [labels[index] for index in sorted({*order[:width].tolist(), *going})]
    _, path = min(labels, key=lambda label: (label[0].extra_s, label[0].moved_nbytes))
    found: dict[str, Action] = {block.name: action for block, action in zip(blocks, path, strict=True)}
    actions, forecast = _relaxed(blocks, link, budget_nbytes, found)
    return Choice(actions, forecast, min(forecast.extra_s, dropped_s))


_Label = tuple[_State, tuple[Action, ...]]


def _check(blocks: Sequence[Block], budget_nbytes: int) -> None:
    check_nbytes("budget_nbytes", budget_nbytes)
    names = [block.name for block in blocks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two blocks are called {twice!r}: expected a name for each")
    largest = max(blocks, key=lambda block: block.once_nbytes + block.work_nbytes, default=None)
    if largest is not None and (least := largest.once_nbytes + largest.work_nbytes) > budget_nbytes:
        raise BudgetError(
            f"budget_nbytes is {budget_nbytes}: block {largest.name!r} alone has {least} on the device while "
            "it is differentiated; give at least that, a smaller batch, or smaller blocks"
        )


def _leanness(state: _State) -> tuple[int, bool]:
    """Least where the next block has the most room; can always go on where everything can be offloaded."""
    return state.kept_nbytes, state.last == "keep"


def _tightness(state: _State) -> tuple[int, bool]:
    """Least where the next block has the most room in one run with this one."""
    return state.kept_nbytes + state.passing_nbytes, state.last == "keep"


def _relaxed(
    blocks: Sequence[Block], link: HostLink, budget_nbytes: int, actions: dict[str, Action]
) -> tuple[dict[str, Action], Forecast]:
    """Offload and recompute only where it is needed: the search does not mind what costs no time in the model.

    From the last block on, as the last copies out have the least time to hide in.
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


def _possible(block: Block, before: _State | None) -> tuple[Action, ...]:
    follows = block.joins and before is not None and before.last in RECOMPUTED
    return tuple(
        action
        for action in ACTIONS
        if (block.recomputes or action not in RECOMPUTED)
        and (block.offloads or action not in OFFLOADED)
        and (follows or action != "join")
    )


def _after(state: _State, block: Block, link: HostLink, action: Action) -> _State:
    """Where an action for one more block leads."""
    recomputed = action in RECOMPUTED
    if action in OFFLOADED:  # while the block before holds on to what both have saved
        stays = block.shared_nbytes if state.last == "keep" else 0
        moved_before, passing = block.input_nbytes, block.once_nbytes
    elif action == "join":
        stays, moved_before, passing = 0, 0, state.passing_nbytes + block.nbytes
    else:
        stays = block.input_nbytes + (0 if recomputed else block.inner_nbytes)
        moved_before = block.shared_nbytes if state.last == "offload" else 0  # the block before has offloaded it
        passing = (block.nbytes - stays) // block.runs
    moved_after = block.inner_nbytes if action == "offload" else 0
    kept = state.kept_nbytes + stays
    hides_s = block.backward_s + (block.forward_s if recomputed else 0.0)
    wanted_s = state.lead_s + (0.0 if action == "join" else state.due_s)
    pending_s = min(wanted_s, link.ahead_s)
    begun_s = state.late_s + moved_before / link.out_nbytes_per_s
    late_s = max(min(begun_s, link.window_s) - block.forward_s, 0.0)
    ended_s = late_s + moved_after / link.out_nbytes_per_s
    waited_s = wanted_s - pending_s + max(begun_s - link.window_s, 0.0) + max(ended_s - link.window_s, 0.0)
    return _State(
        last=action,
        kept_nbytes=kept,
        passing_nbytes=passing,
        spent_s=state.spent_s + waited_s + (block.forward_s if recomputed else 0.0),
        late_s=min(ended_s, link.window_s),
        lead_s=max(pending_s - hides_s, 0.0),
        due_s=state.due_s if action == "join" else (moved_before + moved_after) / link.back_nbytes_per_s,
        peak_nbytes=max(state.peak_nbytes, kept + passing + block.work_nbytes),
        moved_nbytes=state.moved_nbytes + moved_before + moved_after,
    )


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Without those that another beats: it ends no later and within the same bytes, whatever follows.

    Whatever follows, a second more of waiting now is at most a second more at the end. So whoever beats is no later
    now, and in this order comes first. A block that is recomputed can be joined, and shares nothing with the next.
    """
    labels = sorted(labels, key=lambda label: (label[0].extra_s, label[0].kept_nbytes, label[0].moved_nbytes))
    states = [label[0] for label in labels]
    kept = np.array([state.kept_nbytes for state in states])
    runs = np.array([state.last in RECOMPUTED for state in states])
    passing = np.array([state.passing_nbytes if state.last in RECOMPUTED else 2**62 for state in states])
    kind = np.array([ACTIONS.index("join" if state.last in RECOMPUTED else state.last) for state in states])
    spent = np.array([state.spent_s for state in states])
    waits = np.array([(state.late_s, state.lead_s, state.due_s) for state in states])
    going: list[int] = []
    for index in range(len(labels)):
        first = np.array(going, dtype=np.intp)
        longer_s = spent[first] - spent[index] + np.maximum(waits[first] - waits[index], 0.0).sum(axis=1)
        alike = (kind[first] == kind[index]) | runs[first]
        beats = alike & (kept[first] <= kept[index]) & (passing[first] <= passing[index]) & (longer_s <= 0)
        if not beats.any():
            going.append(index)
    return [labels[index] for index in going]


def _at_least(labels: list[_Label], rest: Sequence[Block], link: HostLink, budget_nbytes: int) -> NDArray[np.float64]:
    """Seconds that each must come to: bytes over the budget are moved behind what is left of forward, or recomputed.

    A byte costs no less than in the cheapest blocks, taken by halves if need be, and no more than to wait for it.
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
    states = [label[0] for label in labels]
    over = np.array([state.kept_nbytes for state in states]) + float(sizes[-1]) - budget_nbytes
    left_s = forward_s - np.array([state.late_s for state in states])
    back_s = np.array([state.lead_s + state.due_s for state in states]) - forward_s - backward_s
    hidden = np.maximum(left_s, 0.0) * link.out_nbytes_per_s
    spent_s = np.array([state.spent_s for state in states])
    waited_s = np.maximum(-left_s, 0.0) + np.maximum(back_s, 0.0)
    return np.asarray(spent_s + waited_s + np.interp(over - hidden, sizes, costs), dtype=np.float64)
