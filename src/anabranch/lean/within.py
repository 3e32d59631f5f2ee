"""What to do within a budget of memory: how residuals are stored, and what happens to activations.

Every way to store residuals leaves some room for activations, and takes some time in each step. How much a way holds at
every moment of a step is computed by ``planning.memory``, as for ``anabranch memory``: of a model that
trains it gets what its blocks were seen to save. For each way the solver finds the least extra time with which
activations keep within the room. The way with the least sum is chosen; of ways that differ by less than a measurement
can tell, the most exact one. What copies to the host must be faster by more than that, since its price is less certain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from anabranch.exchange.compression import Settings, keeps_residual, kinds_of
from anabranch.lean.activations.blocks import END, REST, blocks_of
from anabranch.lean.activations.cost_model import RECOMPUTED, Action, BlockCosts, HostLink, in_use, predict
from anabranch.lean.activations.solver import BudgetError, Choice, choose, choose_with_windows, smallest_budget
from anabranch.lean.activations.speeds import Speeds
from anabranch.lean.host_waits import HostBucket, predicted_wait_s
from anabranch.planning.memory import (
    FRAGMENTATION,
    Footprint,
    MemoryUse,
    Moment,
    OptimizerMemory,
    ReadyGradient,
    ResidualPlacement,
    Setting,
    StepProfile,
    TrainingMode,
    allocated_nbytes,
    lean_moments,
    peak_footprint,
    residual_nbytes,
    residuals_by_bucket,
)
from anabranch.values.kinds.names import DENSE, OKTOPK, density_of
from anabranch.values.kinds.options import Auto, OkTopk

ALIKE = 0.005  # share of the computing time by which ways may differ and count as equally fast
# What copies to the host must be faster than what does not by more than this share of the computing time. Other copies
# and exchanges share the bus and the device in ways that no short measurement shows.
HOST_MARGIN = 0.05
ROUNDED: tuple[ResidualPlacement, ...] = ("bf16", "int8")


class Gradient(NamedTuple):
    """A gradient of the live model, and the block with whose backward it comes."""

    name: str
    numel: int
    nbytes: int
    sparse: bool
    block: str


@dataclass(frozen=True)
class Held:
    """What a rank holds beside activations and residuals.

    weights_nbytes   parameters and buffers
    optimizer        its state, and what a step needs beside it
    gradients        in the order of backward
    exchanges        those that plans may choose, each with its setting for the account
    """

    weights_nbytes: int
    optimizer: OptimizerMemory
    gradients: Sequence[Gradient]
    exchanges: Sequence[tuple[TrainingMode, Setting]]

    def storages(self, blocks: Sequence[BlockCosts], memory_nbytes_per_s: float, with_host: bool) -> list["Storage"]:
        """The ways to store residuals, the most exact first; ``with_host``: host memory is not the device's.

        Rounding takes the time to read and write the values, rounded and not, twice.
        """
        step = self._step(blocks)
        exact_nbytes = max(residual_nbytes(step.profile, setting, way) for way, setting in self.exchanges)
        found = [self._storage(step, "in place")]
        if not exact_nbytes:
            return found
        if with_host:
            found.append(replace(self._storage(step, "host"), over_link_nbytes=exact_nbytes))
        for how in ROUNDED:
            stored = (residual_nbytes(step.profile, s, way._replace(residuals=how)) for way, s in self.exchanges)
            passed_s = (2 * exact_nbytes + 3 * max(stored)) / memory_nbytes_per_s
            found.append(replace(self._storage(step, how), extra_s=passed_s))
        return found

    def _storage(self, step: "BlockStep", residuals: ResidualPlacement) -> "Storage":
        ways = [(way._replace(residuals=residuals), setting) for way, setting in self.exchanges]
        moments = [moment for way, setting in ways for moment in lean_moments(step.profile, setting, way)]
        held_nbytes = min(moment.footprint.nbytes for moment in moments)
        return Storage(residuals, step, ways, held_nbytes, step.on_top(moments, held_nbytes), step.at_end(moments))

    def _step(self, blocks: Sequence[BlockCosts]) -> "BlockStep":
        """The step as the account sees it: gradients in the order in which the blocks are differentiated."""
        own: dict[str, list[Gradient]] = {block.name: [] for block in reversed(blocks)}
        for one in self.gradients:
            own[one.block if one.block in own else blocks[0].name].append(one)  # what did not run comes last
        none, ready, spans = MemoryUse(0), list[ReadyGradient](), {}
        for name, gradients in own.items():
            spans[name] = range(len(ready), len(ready) + len(gradients))
            ready += [ReadyGradient(one.name, one.numel, one.nbytes, none, none, one.sparse) for one in gradients]
        return BlockStep(StepProfile(self.weights_nbytes, tuple(ready), none, self.optimizer), spans)


@dataclass(frozen=True)
class BlockStep:
    """A step whose activations are known by block.

    profile   without activations
    spans     by block, in the order of backward: its gradients, as indices; where it has none, the next one follows it
    """

    profile: StepProfile
    spans: Mapping[str, range]

    def on_top(self, moments: Sequence[Moment], held_nbytes: int) -> dict[str, int]:
        """By block: what is in memory on top of ``held_nbytes`` while it is differentiated, activations apart."""
        gradients = self.profile.gradients
        most: dict[tuple[int, bool], int] = {}
        for moment in moments:
            if moment.index < len(gradients):
                nbytes = moment.footprint.nbytes + gradients[moment.index].nbytes - held_nbytes
                key = (moment.index, moment.ready)
                most[key] = max(most.get(key, 0), nbytes)
        return {
            block: max(most.get((index, ready), 0) for index in self._seen(span) for ready in {False, bool(span)})
            for block, span in self.spans.items()
        }

    def at_end(self, moments: Iterable[Moment]) -> int:
        """The most that is in memory when backward is over."""
        return max(moment.footprint.nbytes for moment in moments if moment.index == len(self.profile.gradients))

    def computed_s(self, blocks: Iterable[BlockCosts], actions: Mapping[str, Action]) -> list[float]:
        """By gradient: seconds of backward, with what it recomputes, until its block is differentiated."""
        computed_s = {block.name: _backward_s(block, actions[block.name]) for block in blocks}
        found, total_s = list[float](), 0.0
        for name, span in self.spans.items():
            total_s += computed_s[name]
            found += [total_s] * len(span)
        return found

    def with_activations(self, in_use_nbytes: Mapping[str, int], offloaded_nbytes: int) -> StepProfile:
        """The profile with so many bytes of activations while each block is differentiated."""
        before, when_ready = ([0] * len(self.profile.gradients) for _ in range(2))
        for block, span in self.spans.items():
            for index in self._seen(span):
                before[index] = max(before[index], in_use_nbytes[block])
                when_ready[index] = in_use_nbytes[block] if span else when_ready[index]
        gradients = tuple(
            replace(one, peak_before=MemoryUse(a, one.nbytes), when_ready=MemoryUse(b, one.nbytes))
            for one, a, b in zip(self.profile.gradients, before, when_ready, strict=True)
        )
        return replace(self.profile, gradients=gradients, offloaded_nbytes=offloaded_nbytes)

    def _seen(self, span: range) -> range:
        """The gradients until which a block's activations are in memory."""
        next_one = min(span.start, len(self.profile.gradients) - 1)
        return span or range(next_one, next_one + 1)


@dataclass(frozen=True)
class Storage:
    """A way to store residuals: what a rank then holds beside activations, and what it costs in each step.

    ways               of the account, with their settings
    held_nbytes        what it holds at every moment
    on_top_nbytes      by block: what it holds more while that is differentiated
    end_nbytes         what it holds at the end of backward, when activations are gone
    over_link_nbytes   go to host memory and back in each step, while the rest of backward runs
    """

    residuals: ResidualPlacement
    step: BlockStep
    ways: Sequence[tuple[TrainingMode, Setting]]
    held_nbytes: int
    on_top_nbytes: Mapping[str, int]
    end_nbytes: int
    extra_s: float = 0.0
    over_link_nbytes: int = 0

    def peak(self, blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> Footprint:
        """The peak of a step with these actions, by the account."""
        moved_nbytes = predict(blocks, link, actions).moved_nbytes
        profile = self.step.with_activations(in_use(blocks, link, actions), moved_nbytes)
        window_nbytes = max(link.window_nbytes or 0, link.ahead_nbytes or 0)
        found = (peak_footprint(profile, way, replace(s, window_nbytes=window_nbytes)) for way, s in self.ways)
        return max(found, key=lambda footprint: footprint.nbytes)

    def peak_nbytes(self, blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> int:
        """The bytes of that peak."""
        return self.peak(blocks, link, actions).nbytes

    def waited_s(self, blocks: Sequence[BlockCosts], link: HostLink, choice: Choice) -> float:
        """What computing does not hide of copies of residuals, which share the link with those of activations."""
        if not self.over_link_nbytes:
            return 0.0
        computed_s = self.step.computed_s(blocks, choice.actions)
        forward_s = sum(block.forward_s for block in blocks)
        by_bucket_s = max(
            predicted_wait_s(
                _host_buckets(residuals_by_bucket(self.step.profile, setting, way), computed_s), link, forward_s
            )
            for way, setting in self.ways
        )
        moved_nbytes = self.over_link_nbytes + choice.forecast.moved_nbytes
        moved_s = moved_nbytes / min(link.out_nbytes_per_s, link.back_nbytes_per_s)
        return max(by_bucket_s, moved_s - sum(_backward_s(block, choice.actions[block.name]) for block in blocks))

    def occupied(self, blocks: Iterable[BlockCosts]) -> list[BlockCosts]:
        """The blocks with what is in memory beside their activations, for a solver whose room is all but ``held``."""
        return [replace(block, work_nbytes=block.work_nbytes + self.on_top_nbytes[block.name]) for block in blocks]


@dataclass(frozen=True)
class WithinChoice:
    """What was chosen within a budget.

    choice     the actions for activations
    extra_s    the predicted extra time of a step
    peak_nbytes   the predicted peak
    tried      by way to store residuals, the extra time of a step; None where it does not fit
    """

    residuals: ResidualPlacement
    choice: Choice
    extra_s: float
    peak_nbytes: int
    tried: Mapping[ResidualPlacement, float | None]

    def message(self, budget_nbytes: int) -> dict[str, Any]:
        """The choice as a JSON document, which other ranks follow."""
        return {
            **self.choice._asdict(),
            "residuals": self.residuals,
            "within_nbytes": budget_nbytes,
            "peak_nbytes": self.peak_nbytes,
            "extra_s": self.extra_s,
            "tried": dict(self.tried),
        }


def choose_within(
    blocks: Sequence[BlockCosts], link: HostLink, storages: Sequence[Storage], budget_nbytes: int
) -> WithinChoice:
    """The fastest way to train within the budget; BudgetError, which names the least that would do, if none fits."""
    room_nbytes = int(budget_nbytes * (1 - FRAGMENTATION))
    priced = [one for storage in storages for one in _priced(blocks, link, storage, room_nbytes)]
    if not priced:
        least = min(
            max(one.held_nbytes + smallest_budget(one.occupied(blocks), link), one.end_nbytes) for one in storages
        )
        raise BudgetError(
            f"within is {_size(budget_nbytes)}, of which {FRAGMENTATION:.0%} are left to the allocator: no mode keeps "
            f"within it; give at least {_size(int(least / (1 - FRAGMENTATION)) + 1)}, or a smaller batch"
        )
    best = _best(priced, sum(block.forward_s + block.backward_s for block in blocks))
    tried: dict[ResidualPlacement, float | None] = {
        storage.residuals: min((one.extra_s for one in priced if one.storage is storage), default=None)
        for storage in storages
    }
    peak_nbytes = best.storage.peak_nbytes(blocks, link, best.choice.actions)
    return WithinChoice(best.storage.residuals, best.choice, best.extra_s, peak_nbytes, tried)


class Priced(NamedTuple):
    """A way to store residuals with actions for activations, and the predicted extra time of a step."""

    storage: Storage
    choice: Choice
    extra_s: float

    @property
    def host_nbytes(self) -> int:
        """Bytes that go to the host and back in each step."""
        return self.storage.over_link_nbytes + self.choice.forecast.moved_nbytes


def _priced(blocks: Sequence[BlockCosts], link: HostLink, storage: Storage, room_nbytes: int) -> Iterator[Priced]:
    """The fastest actions, and where these offload something the fastest that do not; none where nothing fits."""
    if storage.end_nbytes > room_nbytes or storage.held_nbytes > room_nbytes:
        return
    occupied, activations_nbytes = storage.occupied(blocks), room_nbytes - storage.held_nbytes
    for choosing, allowed in (
        (choose_with_windows, occupied),
        (choose, [replace(block, offloads=False) for block in occupied]),
    ):
        try:
            choice = choosing(allowed, link, activations_nbytes)
        except BudgetError:
            continue
        choice = choice._replace(forecast=predict(blocks, link, choice.actions))
        extra_s = choice.forecast.extra_s + storage.extra_s + storage.waited_s(blocks, link, choice)
        yield Priced(storage, choice, extra_s)
        if not choice.forecast.moved_nbytes:
            return


def _best(priced: Sequence[Priced], computing_s: float) -> Priced:
    """The fastest that copies nothing to the host, unless what does is faster by the margin; of equals the first."""
    fastest_s = min(one.extra_s for one in priced)
    on_device = [one for one in priced if not one.host_nbytes]
    if min((one.extra_s for one in on_device), default=inf) <= fastest_s + HOST_MARGIN * computing_s:
        priced = on_device
    enough_s = min(one.extra_s for one in priced) + ALIKE * computing_s
    return next(one for one in priced if one.extra_s <= enough_s)


def check_fits(
    message: Mapping[str, Any], blocks: Sequence[BlockCosts], link: HostLink, storages: Sequence[Storage]
) -> None:
    """Raise BudgetError unless what rank 0 has chosen keeps within the budget on this rank, too."""
    storage = next(storage for storage in storages if storage.residuals == message["residuals"])
    peak = storage.peak_nbytes(blocks, link, message["actions"])
    if peak > message["within_nbytes"]:
        raise BudgetError(
            f"rank 0 has chosen what keeps within {_size(message['within_nbytes'])} there, and this rank would need "
            f"{_size(peak)}: give every rank a batch of the same size, or rank 0 the largest"
        )


class WithinBudget:
    """Chooses for one model on one rank, when its first steps were profiled.

    held   returns what this rank holds beside activations; called then
    """

    def __init__(self, budget_nbytes: int, held: Callable[[], Held], device: torch.device) -> None:
        self._budget_nbytes = budget_nbytes
        self._held = held
        self._device = device
        self._found: tuple[Sequence[BlockCosts], HostLink, Sequence[Storage]] | None = None

    def choosing(self, blocks: Sequence[BlockCosts], speeds: Speeds) -> dict[str, Any]:
        """What this rank would choose, as a message; BudgetError if nothing fits."""
        on_gpu, link = self._device.type == "cuda", speeds.link
        storages = self._held().storages(blocks, speeds.memory_nbytes_per_s, with_host=on_gpu)
        self._found = (blocks, link, storages)
        return choose_within(blocks, link, storages, self._budget_nbytes).message(self._budget_nbytes)

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise BudgetError if what rank 0 has chosen does not fit here, as far as this rank was profiled."""
        if self._found is not None:
            check_fits(message, *self._found)


def described(message: Mapping[str, Any]) -> str:
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
    return (
        f"within {message['within_nbytes'] / gib:.2f} GiB: {residuals}blocks of activations: "
        f"{activations}; predicted peak {message['peak_nbytes'] / gib:.2f} GiB, +{1e3 * message['extra_s']:.2f} ms a "
        f"step{instead}"
    )


def gradients_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], may_be_sparse: Callable[[torch.Tensor], bool]
) -> list[Gradient]:
    """The gradients of these parameters, as backward is expected to make them: from the last to the first.

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
        found.append(Gradient(name, parameter.numel(), nbytes, may_be_sparse(parameter), block_name))
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / (1 << 30):.3f} GiB)"


def _backward_s(block: BlockCosts, action: Action) -> float:
    return block.backward_s + (block.forward_s if action in RECOMPUTED else 0.0)


def _host_buckets(residuals: Iterable[tuple[int, int]], computed_s: Sequence[float]) -> list[HostBucket]:
    """Buckets by their last gradient and their bytes, with what is computed between them."""
    found, before_s = list[HostBucket](), 0.0
    for index, nbytes in residuals:
        found.append(HostBucket(nbytes, computed_s[index] - before_s))
        before_s = computed_s[index]
    return found


def in_account(settings: Settings, setting: Setting) -> list[tuple[TrainingMode, Setting]]:
    """The exchanges that plans may choose on Lean, for the account of memory: dense where nothing is compressed."""
    options = settings.oktopk if isinstance(settings, Auto) else settings if isinstance(settings, OkTopk) else OkTopk()
    found = []
    for kind in kinds_of(settings):
        density = density_of(kind)
        mode = (
            TrainingMode(kind, True, rounding_errors=keeps_residual(settings, kind))
            if density is None
            else TrainingMode(OKTOPK, True)
        )
        found.append((mode, replace(setting, density=density or 1.0, options=options)))
    return found or [(TrainingMode(DENSE, True), setting)]
