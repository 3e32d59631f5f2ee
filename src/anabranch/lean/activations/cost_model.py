"""What an action for each block costs: predicted extra seconds and peak bytes of one training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from anabranch.values.checks import check_nbytes, check_positive, check_seconds

# What is done with a block's activations between its forward and its backward:
#   keep                on the device
#   offload             all to host memory
#   recompute           only its input stays on the device, and backward runs its forward again
#   recompute+offload   the same with its input in host memory
#   join                recomputed in one run with the block before, which needs no input of its own
Action = Literal["keep", "offload", "recompute", "recompute+offload", "join"]
ACTIONS: tuple[Action, ...] = get_args(Action)

RECOMPUTED: tuple[Action, ...] = ("recompute", "recompute+offload", "join")
OFFLOADED: tuple[Action, ...] = ("offload", "recompute+offload")


@dataclass(frozen=True)
class BlockCosts:
    """Bytes and seconds of one block of a model, which gets one action as a whole.

    forward_s, backward_s   its compute time, without any recomputation
    inner_nbytes            what autograd saves in it and no other block needs
    input_nbytes            its input, from which it can be recomputed
    shared_nbytes           the part of its input that the block before has saved as well
    work_nbytes             gradients of activations that live only while it is differentiated
    joins                   whether it can be recomputed in one run with the block before
    recomputes              whether it can be recomputed at all
    offloads                whether anything of it can be offloaded
    runs                    how often it runs in a forward, each run differentiated by itself; bytes and seconds are
                            of all runs together
    """

    name: str
    forward_s: float
    backward_s: float
    inner_nbytes: int
    input_nbytes: int
    shared_nbytes: int = 0
    joins: bool = False
    recomputes: bool = True
    work_nbytes: int = 0
    offloads: bool = True
    runs: int = 1

    def __post_init__(self) -> None:
        check_seconds(f"forward_s of block {self.name}", self.forward_s)
        check_seconds(f"backward_s of block {self.name}", self.backward_s)
        for field in ("inner_nbytes", "input_nbytes", "shared_nbytes", "work_nbytes"):
            check_nbytes(f"{field} of block {self.name}", getattr(self, field))
        if self.shared_nbytes > self.input_nbytes:
            raise ValueError(
                f"block {self.name} shares {self.shared_nbytes} bytes of an input of {self.input_nbytes}: "
                "expected a part of it"
            )

    @property
    def nbytes(self) -> int:
        """All that autograd has saved in it, its input included."""
        return self.inner_nbytes + self.input_nbytes

    @property
    def nbytes_per_run(self) -> int:
        """The same for one run."""
        return self.nbytes // self.runs


@dataclass(frozen=True)
class HostLink:
    """How fast bytes go from the device to pinned host memory and back, both ways at once.

    window_nbytes   how much may be on its way out before computation waits; None: no limit
    ahead_nbytes    how much may be back before it is needed; None: no limit
    """

    out_nbytes_per_s: float
    back_nbytes_per_s: float
    window_nbytes: int | None = None
    ahead_nbytes: int | None = None

    def __post_init__(self) -> None:
        check_positive("out_nbytes_per_s", self.out_nbytes_per_s)
        check_positive("back_nbytes_per_s", self.back_nbytes_per_s)

    @property
    def window_s(self) -> float:
        """By how much copies out may lag behind computation."""
        return float("inf") if self.window_nbytes is None else self.window_nbytes / self.out_nbytes_per_s

    @property
    def ahead_s(self) -> float:
        """By how much copies back may run ahead of computation."""
        return float("inf") if self.ahead_nbytes is None else self.ahead_nbytes / self.back_nbytes_per_s


class Forecast(NamedTuple):
    """Predicted extra seconds of a step, peak bytes on the device, and bytes that move out and again back."""

    extra_s: float
    peak_nbytes: int
    moved_nbytes: int


class PartialForecast(NamedTuple):
    """The forecast after the first blocks of a model, with what the next block's costs depend on.

    The link carries one copy after the other. ``late_s`` is by how much copies out lag when forward reaches this block;
    what remains of it at the end of forward is waited for. The way back is the same seen from the end: a copy must have
    arrived before its block's backward, so what the computation after it does not hide is extra time. Beyond the
    link's windows nothing hides a copy.
    """

    last: Action
    kept_nbytes: int
    passing_nbytes: int  # on the device only while this block, or the run of joined blocks it is in, is differentiated
    spent_s: float  # recomputing, and waiting where a window was full
    late_s: float  # copies out that have not finished
    lead_s: float  # copies back that the backward of this block and of those after it have not hidden
    due_s: float  # copies back for this block, or for the first of its joined run: nothing so far can hide them
    peak_nbytes: int
    moved_nbytes: int

    @property
    def extra_s(self) -> float:
        """The extra seconds if no block followed."""
        return self.spent_s + self.late_s + self.lead_s + self.due_s

    @property
    def recomputed(self) -> bool:
        """Whether the last block is recomputed."""
        return self.last in RECOMPUTED


START = PartialForecast("keep", 0, 0, 0.0, 0.0, 0.0, 0.0, 0, 0)


def predict(blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> Forecast:
    """Forecast one step with an action for every block; ``blocks`` are in the order of forward."""
    state = START
    for number, block in enumerate(blocks):
        if block.name not in actions:
            raise ValueError(f"no action for block {block.name!r}: expected one of {', '.join(ACTIONS)}")
        action = actions[block.name]
        possible = possible_actions(block, state if number else None)
        if action not in possible:
            raise ValueError(
                f"block {block.name!r} after {state.last!r} is to {action}: expected one of {', '.join(possible)}"
            )
        state = advance(state, block, link, action)
    return Forecast(state.extra_s, state.peak_nbytes, state.moved_nbytes)


def in_use(blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> dict[str, int]:
    """Bytes of activations on the device while each block is differentiated, by its name."""
    state, found = START, {}
    for block in blocks:
        state = advance(state, block, link, actions[block.name])
        found[block.name] = state.kept_nbytes + state.passing_nbytes + block.work_nbytes
    return found


def possible_actions(block: BlockCosts, before: PartialForecast | None) -> tuple[Action, ...]:
    """Return the actions that a block can have after ``before``; None: it is the first block."""
    can_join = block.joins and before is not None and before.recomputed
    return tuple(
        action
        for action in ACTIONS
        if (block.recomputes or action not in RECOMPUTED)
        and (block.offloads or action not in OFFLOADED)
        and (can_join or action != "join")
    )


def advance(state: PartialForecast, block: BlockCosts, link: HostLink, action: Action) -> PartialForecast:
    """Return the state after one more block with this action."""
    recomputed = action in RECOMPUTED
    if action in OFFLOADED:  # what the block before has saved as well stays if that block is kept
        stays = block.shared_nbytes if state.last == "keep" else 0
        moved_before, passing = block.input_nbytes, block.nbytes_per_run
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
    return PartialForecast(
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
