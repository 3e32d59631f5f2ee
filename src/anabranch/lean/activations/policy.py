"""Activations of a live model kept, offloaded, recomputed, or a mix chosen from what its own first steps show."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from anabranch.lean.activations.blocks import REST
from anabranch.lean.activations.cost_model import Action, BlockCosts, Forecast
from anabranch.lean.activations.offloader import MIB, Offloader
from anabranch.lean.activations.profiler import BlockProfiler
from anabranch.lean.activations.recompute import PatchedModel, recompute
from anabranch.lean.activations.solver import BudgetError, Choice, choose_with_windows, smallest_budget
from anabranch.lean.activations.speeds import SpeedMeter, Speeds

log = logging.getLogger("anabranch")

Mode = Literal["keep", "offload", "recompute", "auto"]
PROFILED_STEPS = 2  # the first also warms up

ChoiceMessage = dict[str, Any]  # a choice, or why there is none yet or at all, as a JSON document
Agree = Callable[[ChoiceMessage], ChoiceMessage]
Barrier = Callable[[], None]  # waits for all ranks
Choosing = Callable[[Sequence[BlockCosts], Speeds], ChoiceMessage]


@dataclass(frozen=True)
class Activations:
    """Where activations are between forward and backward.

    mode            "keep" them on the device, "offload" all to the host, "recompute" every block, or "auto": a mix
    budget_nbytes   what "auto" may have on the device at once; None: as little as costs no predicted time
    least_nbytes    smaller tensors are never offloaded
    window_nbytes   how much may be on its way to the host before computation waits
    ahead_nbytes    how much may be back before it is needed
    host_nbytes     how much pinned host memory may be used
    """

    mode: Mode = "auto"
    budget_nbytes: int | None = None
    least_nbytes: int = MIB
    window_nbytes: int = 256 * MIB
    ahead_nbytes: int = 256 * MIB
    host_nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"Activations mode is {self.mode!r}: expected one of {', '.join(get_args(Mode))}")
        for name in ("least_nbytes", "window_nbytes", "ahead_nbytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"Activations {name} is {getattr(self, name)!r}: expected a whole number from 0 on")
        for name in ("budget_nbytes", "host_nbytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Activations {name} is {value!r}: expected a whole number from 1 on, or None")
        if self.mode != "auto" and self.budget_nbytes is not None:
            raise ValueError(
                f"Activations mode is {self.mode!r} with budget_nbytes={self.budget_nbytes}: expected a budget "
                "with mode 'auto' only"
            )


class ManagedActivations:
    """A model whose activations are managed as the options say, until ``undo()``.

    In mode "auto" the first steps are profiled, with as little memory as possible. The wrapper calls
    ``choose()`` before each forward, on all ranks: when enough steps were profiled, it chooses the mix.

    choosing   what this rank would choose, by the costs of its blocks and the speeds of its device; by default as the
               options say

    ``agreed``: the choice of mode "auto" as all ranks have got it.
    """

    def __init__(self, model: nn.Module, options: Activations, choosing: Choosing | None = None) -> None:
        self.options = options
        self.agreed: ChoiceMessage = {}
        self._choosing = choosing or self._by_options
        self.choice: Choice | None = None  # of mode "auto", once it is made: the one that all ranks follow
        self.offloader = None if options.mode in ("keep", "recompute") else self._new_offloader(model)
        self._model = model
        self._patched: PatchedModel | None = None
        self._profiler: BlockProfiler | None = None
        if options.mode == "offload":
            self._patched = PatchedModel(model, {REST: "offload"}, self.offloader)
        elif options.mode == "recompute":
            self._patched = recompute(model)
        elif options.mode == "auto":
            assert self.offloader is not None
            self._profiler = BlockProfiler(model, self.offloader)

    @property
    def actions(self) -> dict[str, Action]:
        """The action of each block; empty while all are kept or profiled."""
        return {} if self._patched is None else dict(self._patched.actions)

    def undo(self) -> None:
        """Leave the model as it was, and free host memory that no graph needs."""
        for patches in (self._patched, self._profiler):
            if patches is not None:
                patches.undo()
        if self.offloader is not None:
            self.offloader.close()
        self._patched = None
        self._profiler = None

    def choose(self, agree: Agree = dict, barrier: Barrier = lambda: None) -> None:
        """Choose the mix if enough steps were profiled. ``agree`` turns this rank's choice into that of all ranks.

        Ranks must recompute alike where a block communicates, as SyncBatchNorm does. ``barrier`` is called once before
        ``agree``: ranks copy to the host at the same time in a step, so their link is measured so, too. Raises
        BudgetError, in every call, if no mix keeps within the budget.
        """
        if self._profiler is None:
            return
        enough = self._profiler.steps >= PROFILED_STEPS
        if not enough:
            barrier()
        agreed = agree(self._own_choice(self._profiler, barrier) if enough else {"wait": True})
        if "wait" in agreed:
            return
        if "error" in agreed:
            raise BudgetError(agreed["error"])
        self.agreed = agreed
        self.choice = Choice(agreed["actions"], Forecast(*agreed["forecast"]), agreed["at_least_s"])
        profiler, self._profiler = self._profiler, None
        profiler.undo()
        self._patched = PatchedModel(self._model, self.choice.actions, self.offloader, last=profiler.last)

    def _own_choice(self, profiler: BlockProfiler, barrier: Barrier) -> ChoiceMessage:
        """Return this rank's choice, or why none is possible: ranks must agree on that, too, or one would wait."""
        try:
            speeds = self._measured(barrier)
            return self._choosing(profiler.costs(), speeds)
        except BudgetError as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("anabranch: choosing where activations are has failed")
            return {"error": f"choosing where activations are has failed: {type(error).__name__}: {error}"}

    def _measured(self, barrier: Barrier) -> Speeds:
        """The speeds of this rank's device while all ranks measure theirs."""
        assert self.offloader is not None
        try:
            meter = SpeedMeter(self.offloader.device)
        finally:
            barrier()  # the others wait, also for a rank that cannot measure
        link, memory_nbytes_per_s = meter.measure()
        options = self.options
        link = replace(link, window_nbytes=options.window_nbytes, ahead_nbytes=options.ahead_nbytes)
        return Speeds(link, memory_nbytes_per_s)

    def _by_options(self, blocks: Sequence[BlockCosts], speeds: Speeds) -> ChoiceMessage:
        link, budget_nbytes = speeds.link, self.options.budget_nbytes
        if budget_nbytes is None:
            budget_nbytes = smallest_budget(blocks, link, extra_s=0.0)
        return choose_with_windows(blocks, link, budget_nbytes)._asdict()

    def _new_offloader(self, model: nn.Module) -> Offloader:
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("the model has no parameters: expected one to train, on the device that it computes on")
        options = self.options
        return Offloader(
            parameter.device, options.least_nbytes, options.window_nbytes, options.ahead_nbytes, options.host_nbytes
        )
