"""What an action for each block costs: predicted extra seconds and peak bytes of one training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from anabranch.values.checks import check_nbytes, check_seconds

# What is done with a block's activations between its forward and its backward:
#   keep        they stay on the device
#   recompute   only the block's input stays, and backward runs its forward again
#   join        recomputed in one run with the block before, which needs no input of its own
Action = Literal["keep", "recompute", "join"]
ACTIONS: tuple[Action, ...] = get_args(Action)


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

    def __post_init__(self) -> None:
        check_seconds(f"forward_s of block {self.name}", self.forward_s)
        check_seconds(f"backward_s of block {self.name}", self.backward_s)
        for field in ("inner_nbytes", "input_nbytes", "work_nbytes"):
            check_nbytes(f"{field} of block {self.name}", getattr(self, field))

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


def predict(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> Forecast:
    """Forecast one step with an action for every block; ``blocks`` are in the order of forward."""
    in_use_nbytes = in_use(blocks, actions)
    extra_s = sum(block.forward_s for block in blocks if actions[block.name] != "keep")
    return Forecast(extra_s, max(in_use_nbytes.values(), default=0))


def in_use(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> dict[str, int]:
    """Bytes of activations on the device while each block is differentiated, by its name."""
    kept = recomputed = 0  # what stays of the blocks so far, and what is recomputed of this run of joined blocks
    before: Action = "keep"
    found = {}
    for block in blocks:
        action = _checked(block, actions, before)
        if action == "join":
            recomputed += block.nbytes
        else:
            kept += block.nbytes if action == "keep" else block.input_nbytes
            recomputed = 0 if action == "keep" else block.recomputed_nbytes
        found[block.name] = kept + recomputed + block.work_nbytes
        before = action
    return found


def _checked(block: BlockCosts, actions: Mapping[str, Action], before: Action) -> Action:
    possible = [
        action
        for action in ACTIONS
        if action == "keep" or (block.recomputes and (action != "join" or (block.joins and before != "keep")))
    ]
    action = actions.get(block.name)
    if action is None or action not in possible:
        raise ValueError(
            f"the action of block {block.name!r}, after one of {before!r}, is {action!r}: expected one of "
            f"{', '.join(possible)}"
        )
    return action
