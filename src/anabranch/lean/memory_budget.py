"""What to do within a budget of memory: how residuals are stored, and which activations are recomputed.

Every way to store residuals leaves some room for activations, and takes some time in each step. How much it holds at
every moment of a step is said by ``planning.footprint``, as for ``anabranch memory``: here it gets what the blocks of a
model that trains were seen to save. For each the solver finds the least extra time with which activations
keep within the room. The one with the least sum is chosen; of those that differ by less than a measurement can tell,
the most exact one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from anabranch.exchange.compression import Settings, keeps_residual, kinds_of
from anabranch.lean.activations.blocks import END, REST, blocks_of
from anabranch.lean.activations.solver import Action, BlockCosts, BudgetError, choose, predict, smallest_budget
from anabranch.observe.clock import clock_for
from anabranch.planning.footprint import (
    FRAGMENTATION,
    NO_USE,
    OptimizerMemory,
    ReadyGradient,
    ResidualPlacement,
    Setting,
    StepProfile,
    TrainingMode,
    allocated_nbytes,
    lean_moments,
    residual_nbytes,
)
from anabranch.values.kinds.names import DENSE, OKTOPK, density_of
from anabranch.values.kinds.options import Auto, OkTopk

ALIKE = 0.005  # share of the computing time by which choices may differ and count as equally fast
ROUNDED: tuple[ResidualPlacement, ...] = ("bf16", "int8")
COPIED_NBYTES, COPIES = 64 << 20, 8  # to measure the device's memory: large enough that start-up costs do not count

# The blocks that may be differentiated at a moment of backward: by its gradient's index, and whether that is ready.
BlocksAt = Mapping[tuple[int, bool], Sequence[str]]


@dataclass(frozen=True)
class FixedMemory:
    """What a rank holds besides activations and residuals.

    weights_nbytes   parameters and buffers
    optimizer        its state, and what a step needs on top
    gradients        in the order of backward, each behind the name of the block with whose backward it comes
    exchanges        those that plans may choose, each with its setting for the account
    """

    weights_nbytes: int
    optimizer: OptimizerMemory
    gradients: Sequence[tuple[str, ReadyGradient]]
    exchanges: Sequence[tuple[TrainingMode, Setting]]

    def storages(self, blocks: Sequence[BlockCosts], memory_nbytes_per_s: float) -> list["ResidualStorage"]:
        """The ways to store residuals, the most exact first. Rounding reads and writes all values twice."""
        profile, blocks_at = self._in_backward_order(blocks)
        exact_nbytes = max(residual_nbytes(profile, setting, mode) for mode, setting in self.exchanges)
        found = [ResidualStorage("in place", profile, blocks_at, self.exchanges)]
        for how in ROUNDED if exact_nbytes else ():
            exchanges = [(mode._replace(residuals=how), setting) for mode, setting in self.exchanges]
            stored_nbytes = max(residual_nbytes(profile, setting, mode) for mode, setting in exchanges)
            extra_s = (2 * exact_nbytes + 3 * stored_nbytes) / memory_nbytes_per_s
            found.append(ResidualStorage(how, profile, blocks_at, exchanges, extra_s))
        return found

    def _in_backward_order(self, blocks: Sequence[BlockCosts]) -> tuple[StepProfile, BlocksAt]:
        """A step without activations: gradients in the order in which the blocks are differentiated."""
        own: dict[str, list[ReadyGradient]] = {block.name: [] for block in reversed(blocks)}
        for block_name, gradient in self.gradients:
            own[block_name if block_name in own else blocks[0].name].append(gradient)  # what did not run comes last
        ready: list[ReadyGradient] = []
        blocks_at: dict[tuple[int, bool], list[str]] = defaultdict(list)
        for name, gradients in own.items():
            if not gradients:  # the next gradient follows it
                blocks_at[min(len(ready), len(self.gradients) - 1), False].append(name)
            for gradient in gradients:
                for is_ready in (False, True):
                    blocks_at[len(ready), is_ready].append(name)
                ready.append(gradient)
        return StepProfile(self.weights_nbytes, tuple(ready), NO_USE, self.optimizer), blocks_at


class ResidualStorage:
    """One way to store residuals: what a rank then holds besides activations, and the ``extra_s`` of a step.

    ``held_nbytes``: what it holds at every moment; ``end_nbytes``: at the end of backward, when activations are gone.
    """

    def __init__(
        self,
        residuals: ResidualPlacement,
        profile: StepProfile,
        blocks_at: BlocksAt,
        exchanges: Sequence[tuple[TrainingMode, Setting]],
        extra_s: float = 0.0,
    ) -> None:
        self.residuals = residuals
        self.extra_s = extra_s
        self.profile, self.blocks_at, self.exchanges = profile, blocks_at, exchanges
        gradients = profile.gradients
        moments = [moment for mode, setting in exchanges for moment in lean_moments(profile, setting, mode)]
        self.held_nbytes = min(moment.footprint.nbytes for moment in moments)
        self.end_nbytes = max(moment.footprint.nbytes for moment in moments if moment.index == len(gradients))
        self._on_top_nbytes: dict[str, int] = {}  # by block: most that is held on top while it is differentiated
        for moment in moments:
            for block in blocks_at.get((moment.index, moment.ready), ()):
                nbytes = moment.footprint.nbytes + gradients[moment.index].nbytes - self.held_nbytes
                self._on_top_nbytes[block] = max(self._on_top_nbytes.get(block, 0), nbytes)

    def peak_nbytes(self, blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> int:
        """The peak of a step with these actions, by the account."""
        return max(self.held_nbytes + predict(self.occupied(blocks), actions).peak_nbytes, self.end_nbytes)

    def occupied(self, blocks: Iterable[BlockCosts]) -> list[BlockCosts]:
        """The blocks with what is in memory next to their activations, for a solver whose room is all but ``held``."""
        return [replace(block, work_nbytes=block.work_nbytes + self._on_top_nbytes[block.name]) for block in blocks]

    def fastest(self, blocks: Sequence[BlockCosts], room_nbytes: int) -> tuple[dict[str, Action], float] | None:
        """The fastest actions within the room and the extra time of a step with them; None where nothing fits."""
        if max(self.end_nbytes, self.held_nbytes) > room_nbytes:
            return None
        try:
            actions, forecast = choose(self.occupied(blocks), room_nbytes - self.held_nbytes)
        except BudgetError:
            return None
        return actions, forecast.extra_s + self.extra_s

    def least_nbytes(self, blocks: Sequence[BlockCosts]) -> int:
        """The least room in which some actions fit."""
        return max(self.held_nbytes + smallest_budget(self.occupied(blocks)), self.end_nbytes)


class WithinChoice(NamedTuple):
    """What was chosen within a budget; its fields are the JSON document that other ranks follow.

    actions         for activations
    residuals       how they are stored
    within_nbytes   the budget
    peak_nbytes     the predicted peak of a rank
    tried           by how residuals are stored, the extra time of a step, storing included; None where it does not fit
    """

    actions: Mapping[str, Action]
    residuals: ResidualPlacement
    within_nbytes: int
    peak_nbytes: int
    tried: Mapping[ResidualPlacement, float | None]


def choose_within(
    blocks: Sequence[BlockCosts], storages: Sequence[ResidualStorage], budget_nbytes: int
) -> WithinChoice:
    """What trains fastest within the budget; BudgetError, which names the least that would do, if nothing fits."""
    room_nbytes = int(budget_nbytes * (1 - FRAGMENTATION))
    fitting = [(storage, *found) for storage in storages if (found := storage.fastest(blocks, room_nbytes)) is not None]
    if not fitting:
        least = min(storage.least_nbytes(blocks) for storage in storages)
        raise BudgetError(
            f"within is {_size(budget_nbytes)}, of which {FRAGMENTATION:.0%} are left to the allocator: no mode keeps "
            f"within it; give at least {_size(int(least / (1 - FRAGMENTATION)) + 1)}, or a smaller batch"
        )
    computing_s = sum(block.forward_s + block.backward_s for block in blocks)
    enough_s = min(extra_s for *_, extra_s in fitting) + ALIKE * computing_s
    storage, actions, _ = next(one for one in fitting if one[-1] <= enough_s)
    tried = dict.fromkeys((one.residuals for one in storages), None) | {one.residuals: s for one, _, s in fitting}
    return WithinChoice(actions, storage.residuals, budget_nbytes, storage.peak_nbytes(blocks, actions), tried)


def check_fits(message: Mapping[str, Any], blocks: Sequence[BlockCosts], storages: Sequence[ResidualStorage]) -> None:
    """Raise BudgetError unless what rank 0 has chosen keeps within the budget on this rank, too."""
    storage = next(storage for storage in storages if storage.residuals == message["residuals"])
    peak_nbytes = storage.peak_nbytes(blocks, message["actions"])
    if peak_nbytes > message["within_nbytes"]:
        raise BudgetError(
            f"rank 0 has chosen what keeps within {_size(message['within_nbytes'])} there, and this rank would need "
            f"{_size(peak_nbytes)}: give every rank a batch of the same size, or rank 0 the largest"
        )


def memory_nbytes_per_s(device: torch.device) -> float:
    """Bytes a second that the device reads and writes in its own memory, measured."""
    clock = clock_for(device)
    source, target = (torch.zeros(COPIED_NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)  # memory is mapped in the first copy
    start = clock.mark()
    for _ in range(COPIES):
        target.copy_(source)
    end = clock.mark()
    clock.settle()
    seconds = clock.elapsed_s(start, end)
    clock.close()
    return 2 * COPIES * COPIED_NBYTES / max(seconds, 1e-9)


def described_choice(message: Mapping[str, Any]) -> str:
    """A line for ``explain()``."""
    gib, how = 1 << 30, Counter(message["actions"].values())
    activations = ", ".join(f"{count} {action}" for action, count in how.items())
    others = [
        f"{residuals} {'does not fit' if extra_s is None else f'+{1e3 * extra_s:.2f} ms'}"
        for residuals, extra_s in message["tried"].items()
        if residuals != message["residuals"]
    ]
    instead = f"; otherwise: {', '.join(others)}" if others else ""
    residuals = f"residuals {message['residuals']}, " if others else ""  # where there was a choice
    extra_ms = 1e3 * message["tried"][message["residuals"]]
    return (
        f"within {message['within_nbytes'] / gib:.2f} GiB: {residuals}blocks of activations: {activations}; predicted "
        f"peak {message['peak_nbytes'] / gib:.2f} GiB, +{extra_ms:.2f} ms a step{instead}"
    )


def gradients_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], may_be_sparse: Callable[[torch.Tensor], bool]
) -> list[tuple[str, ReadyGradient]]:
    """The gradients of these parameters behind the names of their blocks, as backward is expected to make them.

    What belongs to no block comes with the block behind it in the module; with ``END`` behind the last, with ``REST``
    before the first.
    """
    own: dict[nn.Parameter, str] = {}
    for block in blocks_of(module):
        for part in block.modules:
            own |= {parameter: block.name for parameter in part.parameters() if parameter not in own}
    backwards = list(parameters.items())[::-1]
    last = max((number for number, (_, parameter) in enumerate(backwards) if parameter in own), default=-1)
    found, block_name = [], END
    for number, (name, parameter) in enumerate(backwards):
        block_name = REST if number > last else own.get(parameter, block_name)
        nbytes = allocated_nbytes(parameter.nbytes)
        found.append((block_name, ReadyGradient(name, parameter.numel(), nbytes, sparse=may_be_sparse(parameter))))
    return found


def exchanges_of(settings: Settings, setting: Setting) -> list[tuple[TrainingMode, Setting]]:
    """The exchanges that plans may choose, each with its setting for the account; dense where nothing is compressed."""
    options = settings.oktopk if isinstance(settings, Auto) else settings if isinstance(settings, OkTopk) else OkTopk()
    found = []
    for kind in kinds_of(settings):
        if (density := density_of(kind)) is None:
            mode = TrainingMode(kind, lean=True, rounding_errors=keeps_residual(settings, kind))
            found.append((mode, replace(setting, density=1.0, options=options)))
        else:
            found.append((TrainingMode(OKTOPK, lean=True), replace(setting, density=density, options=options)))
    return found or [(TrainingMode(DENSE, lean=True), setting)]


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / (1 << 30):.3f} GiB)"
