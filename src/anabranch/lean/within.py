"""What to do within a budget of memory: how residuals are stored, and what happens to activations.

Every way to store residuals leaves some room for activations, and takes some time in each step. For each, the solver
finds the least extra time with which activations keep within that room. The way with the least sum is chosen; of ways
that differ by less than a measurement can tell, the most exact one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anabranch.activations.cost_model import BlockCosts, Forecast, HostLink, predict
from anabranch.activations.profiler import measure_memory
from anabranch.activations.solver import BudgetError, Choice, choose_with_windows, smallest_budget
from anabranch.lean.options import ResidualPlacement
from anabranch.lean.slots import SLOTS

ALIKE = 0.005  # share of the computing time by which ways may differ and count as equally fast
MARGIN = 0.05  # share of the budget that torch's allocator holds in pieces too small to use
FLOAT_NBYTES = 4
PACKED_NBYTES: Mapping[ResidualPlacement, float] = {"bf16": 2.0, "int8": 65 / 64}  # of a value, scales included


@dataclass(frozen=True)
class Storage:
    """A way to store residuals: what a rank then holds beside activations, and what it costs in each step.

    end_nbytes         what it holds at the end of backward, when activations are gone
    over_link_nbytes   go to host memory and back in each step, while the rest of backward runs
    """

    residuals: ResidualPlacement
    held_nbytes: int
    end_nbytes: int = 0
    extra_s: float = 0.0
    over_link_nbytes: int = 0


@dataclass(frozen=True)
class Held:
    """What a rank holds beside activations and residuals.

    weights_nbytes     parameters and buffers
    optimizer_nbytes   the state of the optimizer
    bucket_nbytes      the largest bucket's gradients
    residual_numel     elements of all buckets that have a residual
    bucket_numel       elements of the largest of these
    compressed         whether buckets are compressed, so that there are messages beside them
    averages_nbytes    averages that are held until the end of backward, for clipping
    """

    weights_nbytes: int
    optimizer_nbytes: int
    bucket_nbytes: int
    residual_numel: int = 0
    bucket_numel: int = 0
    compressed: bool = False
    averages_nbytes: int = 0

    def storages(self, memory_nbytes_per_s: float, with_host: bool) -> list[Storage]:
        """The ways to store residuals, the most exact first; ``with_host``: host memory is not the device's.

        Slots of two buckets are counted, and as much for messages: at the peak there may be fewer. Rounding takes the
        time to read and write the values, rounded and not, twice.
        """
        slots = SLOTS * self.bucket_nbytes * (2 if self.compressed else 1)
        beside = self.weights_nbytes + self.optimizer_nbytes + slots
        exact_nbytes, wide_slots = FLOAT_NBYTES * self.residual_numel, SLOTS * FLOAT_NBYTES * self.bucket_numel

        def storage(
            residuals: ResidualPlacement, nbytes: int, extra_s: float = 0.0, over_link_nbytes: int = 0
        ) -> Storage:
            held_nbytes = beside + nbytes
            return Storage(residuals, held_nbytes, held_nbytes + self.averages_nbytes, extra_s, over_link_nbytes)

        found = [storage("in place", exact_nbytes)]
        if not self.residual_numel:
            return found
        if with_host:
            found.append(storage("host", wide_slots, over_link_nbytes=exact_nbytes))
        for how, each in PACKED_NBYTES.items():
            packed_nbytes = int(each * self.residual_numel)
            passed_s = (2 * exact_nbytes + 3 * packed_nbytes) / memory_nbytes_per_s
            found.append(storage(how, packed_nbytes + wide_slots, passed_s))
        return found


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
    room_nbytes = int(budget_nbytes * (1 - MARGIN))
    found: dict[ResidualPlacement, tuple[float, Choice, int]] = {}
    for storage in storages:
        try:
            choice = choose_with_windows(blocks, link, max(0, room_nbytes - storage.held_nbytes))
        except BudgetError:
            continue
        peak_nbytes = _peak_nbytes(storage, choice.forecast, link)
        if peak_nbytes <= room_nbytes:
            found[storage.residuals] = (_extra_s(blocks, link, storage, choice), choice, peak_nbytes)
    if not found:
        activations_nbytes = smallest_budget(blocks, link)
        least = min(max(one.held_nbytes + activations_nbytes, one.end_nbytes) for one in storages)
        raise BudgetError(
            f"within is {budget_nbytes} bytes, of which {MARGIN:.0%} are left to the allocator: no mode keeps within "
            f"it; give at least {int(least / (1 - MARGIN)) + 1} bytes, or a smaller batch"
        )
    alike_s = ALIKE * sum(block.forward_s + block.backward_s for block in blocks)
    fast_enough_s = min(extra_s for extra_s, _, _ in found.values()) + alike_s
    best = next(residuals for residuals, (extra_s, _, _) in found.items() if extra_s <= fast_enough_s)
    extra_s, choice, peak_nbytes = found[best]
    tried = {one.residuals: found[one.residuals][0] if one.residuals in found else None for one in storages}
    return WithinChoice(best, choice, extra_s, peak_nbytes, tried)


def check_fits(
    message: Mapping[str, Any], blocks: Sequence[BlockCosts], link: HostLink, storages: Sequence[Storage]
) -> None:
    """Raise BudgetError unless what rank 0 has chosen keeps within the budget on this rank, too."""
    storage = next(storage for storage in storages if storage.residuals == message["residuals"])
    peak = _peak_nbytes(storage, predict(blocks, link, message["actions"]), link)
    if peak > message["within_nbytes"]:
        raise BudgetError(
            f"rank 0 has chosen what keeps within {message['within_nbytes']} bytes there, and this rank would need "
            f"{peak}: give every rank a batch of the same size, or rank 0 the largest"
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

    def choosing(self, blocks: Sequence[BlockCosts], link: HostLink) -> dict[str, Any]:
        """What this rank would choose, as a message; BudgetError if nothing fits."""
        storages = self._held().storages(measure_memory(self._device), with_host=self._device.type == "cuda")
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
    return (
        f"within {message['within_nbytes'] / gib:.2f} GiB: residuals {message['residuals']}, blocks of activations: "
        f"{activations}; predicted peak {message['peak_nbytes'] / gib:.2f} GiB, +{1e3 * message['extra_s']:.2f} ms a "
        f"step{instead}"
    )


def nbytes_of(tensor: torch.Tensor) -> int:
    """The memory of a tensor; one that rounds its values says the size that they would have."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(nbytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _peak_nbytes(storage: Storage, forecast: Forecast, link: HostLink) -> int:
    """The most in memory: with all activations, and copies of them under way, or at the end of backward."""
    windows_nbytes = (link.window_nbytes or 0) + (link.ahead_nbytes or 0) if forecast.moved_nbytes else 0
    return max(storage.held_nbytes + forecast.peak_nbytes + windows_nbytes, storage.end_nbytes)


def _extra_s(blocks: Sequence[BlockCosts], link: HostLink, storage: Storage, choice: Choice) -> float:
    """Activations, rounding, and what backward does not hide of residuals that share the link with activations."""
    waited_s = 0.0
    if storage.over_link_nbytes:
        moved_s = (storage.over_link_nbytes + choice.forecast.moved_nbytes) / min(
            link.out_nbytes_per_s, link.back_nbytes_per_s
        )
        waited_s = max(0.0, moved_s - sum(block.backward_s for block in blocks))
    return choice.forecast.extra_s + storage.extra_s + waited_s
