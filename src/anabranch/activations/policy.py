"""Activations of a live model kept, offloaded, recomputed, or a mix of these chosen from what its own steps show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from anabranch.activations.blocks import REST
from anabranch.activations.cost_model import Block, HostLink
from anabranch.activations.offloader import MIB, Offloader
from anabranch.activations.profiler import Survey, measure_link
from anabranch.activations.recompute import PatchedModel, recompute
from anabranch.activations.solver import Action, BudgetError, Choice, Forecast, choose

Mode = Literal["keep", "offload", "recompute", "auto"]
SURVEY_STEPS = 2  # the first also warms up

Told = dict[str, Any]  # a choice, or why there is none, as JSON has it
Agree = Callable[[Told], Told]


@dataclass(frozen=True)
class Activations:
    """Where activations are between forward and backward.

    mode            "keep" them on the device, "offload" all to the host, "recompute" every block, or "auto": a mix
    budget_nbytes   what "auto" may have on the device at once
    least_nbytes    smaller tensors are never offloaded
    window_nbytes   how much may wait for its copy to the host before computation waits
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
        """Refuse what cannot be run."""
        if self.mode not in get_args(Mode):
            raise ValueError(f"Activations mode is {self.mode!r}: expected one of {', '.join(get_args(Mode))}")
        for name in ("least_nbytes", "window_nbytes", "ahead_nbytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"Activations {name} is {getattr(self, name)!r}: expected a whole number from 0 on")
        for name in ("budget_nbytes", "host_nbytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Activations {name} is {value!r}: expected a whole number from 1 on, or None")
        if (self.mode == "auto") != (self.budget_nbytes is not None):
            raise ValueError(
                f"Activations mode is {self.mode!r} with budget_nbytes={self.budget_nbytes}: expected a budget "
                "with mode 'auto', and with no other"
            )


class ManagedActivations:
    """A model whose activations are managed as asked, until ``undo()``.

    In mode "auto" the first steps are surveyed, in the leanest way there is; the mix is chosen when the next forward
    begins, and is in force in all blocks below the model's own forward, which has begun by then, and in that from the
    next step on; or when someone calls ``choose()`` who can do that on all ranks at once, if ``waits``. A budget that
    is too small raises each time.
    """

    def __init__(self, model: nn.Module, options: Activations, waits: bool = False) -> None:
        self.options = options
        self.choice: Choice | None = None  # of mode "auto", once it is made: the one that all ranks follow
        self._model = model
        self._treated: PatchedModel | None = None
        self._survey: Survey | None = None
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self.offloader = None if options.mode in ("keep", "recompute") else self._new_offloader()
        if options.mode == "offload":
            self._treated = PatchedModel(model, {REST: "offload"}, self.offloader)
        elif options.mode == "recompute":
            self._treated = recompute(model)
        elif options.mode == "auto":
            assert self.offloader is not None
            self._survey = Survey(model, self.offloader)
            if not waits:
                self._handle = model.register_forward_pre_hook(self._before_forward, prepend=True)

    @property
    def actions(self) -> dict[str, Action]:
        """What is done with each block now; empty while all are kept or surveyed."""
        return {} if self._treated is None else dict(self._treated.actions)

    def undo(self) -> None:
        """Leave the model as it was, and let go of host memory that no graph needs."""
        for used in (self._treated, self._survey):
            if used is not None:
                used.undo()
        if self._handle is not None:
            self._handle.remove()
        if self.offloader is not None:
            self.offloader.close()
        self._treated = self._survey = self._handle = None

    def _before_forward(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        if self._survey is not None and self._survey.steps >= SURVEY_STEPS and torch.is_grad_enabled():
            self.choose()

    def choose(self, agree: Agree = dict) -> None:
        """Choose the mix, if the survey is over. ``agree`` turns this rank's choice into the one that all ranks follow.

        Ranks must recompute alike where a block communicates, as SyncBatchNorm does.
        """
        if self._survey is None:
            return
        told = agree(self._chosen(self._survey) if self._survey.steps >= SURVEY_STEPS else {"wait": True})
        if "wait" in told:
            return
        if "error" in told:
            raise BudgetError(told["error"])
        self.choice = Choice(told["actions"], Forecast(*told["forecast"]), told["at_least_s"])
        survey, self._survey = self._survey, None
        survey.undo()
        self._treated = PatchedModel(self._model, self.choice.actions, self.offloader, last=survey.last)

    def _chosen(self, survey: Survey) -> Told:
        """This rank's choice; one that cannot be made is told as well, so that no rank waits for another."""
        assert self.offloader is not None and self.options.budget_nbytes is not None
        measured = measure_link(self.offloader.device)
        link = replace(measured, window_nbytes=self.options.window_nbytes, ahead_nbytes=self.options.ahead_nbytes)
        try:
            return better_of_two(survey.blocks(), link, self.options.budget_nbytes)._asdict()
        except BudgetError as error:
            return {"error": str(error)}

    def _new_offloader(self) -> Offloader:
        parameter = next(self._model.parameters(), None)
        if parameter is None:
            raise ValueError("the model has no parameters: expected one to train, on the device that it computes on")
        options = self.options
        return Offloader(
            parameter.device, options.least_nbytes, options.window_nbytes, options.ahead_nbytes, options.host_nbytes
        )


def better_of_two(blocks: Sequence[Block], link: HostLink, budget_nbytes: int) -> Choice:
    """With all of the budget and nothing offloaded, or less what the link's windows may take, if they have an end."""
    windows = (link.window_nbytes or 0) + (link.ahead_nbytes or 0)
    staying = [replace(block, offloads=False) for block in blocks]
    found, errors = [], []
    for given, room_nbytes in ((staying, budget_nbytes), (blocks, max(budget_nbytes - windows, 0))):
        try:
            found.append(choose(given, link, room_nbytes))
        except BudgetError as error:
            errors.append(error)
    if not found:
        raise BudgetError(
            f"with nothing offloaded, {errors[0]}. With offloading, which needs {windows} of {budget_nbytes} for "
            f"copies under way, {errors[1]}"
        )
    return min(found, key=lambda choice: choice.forecast.extra_s)
