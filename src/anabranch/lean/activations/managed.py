"""Activations of a live model kept, recomputed, or a mix chosen from what its own first steps show."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from anabranch.lean.activations.profiler import BlockProfiler
from anabranch.lean.activations.recompute import PatchedModel, recompute
from anabranch.lean.activations.solver import Action, BlockCosts, BudgetError, Choice, Forecast
from anabranch.lean.options import Mode

log = logging.getLogger("anabranch")

PROFILED_STEPS = 2  # the first also warms up

ChoiceMessage = dict[str, Any]  # a choice, or why there is none yet or at all, as a JSON document
Agree = Callable[[ChoiceMessage], ChoiceMessage]
Choosing = Callable[[Sequence[BlockCosts]], ChoiceMessage]


class ManagedActivations:
    """A model whose activations are managed by a mode until ``undo()``.

    In mode "auto" the first steps are profiled, with as little memory as possible. The wrapper calls ``choose()``
    before each forward, on all ranks, until there is a ``choice``, which all ranks follow; ``agreed`` is its message.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.choice: Choice | None = None
        self.agreed: ChoiceMessage = {}
        self._model = model
        self._patched = recompute(model) if mode == "recompute" else None
        self._profiler = BlockProfiler(model) if mode == "auto" else None

    @property
    def actions(self) -> dict[str, Action]:
        """The action of each block; empty while all are kept or profiled."""
        return {} if self._patched is None else dict(self._patched.actions)

    def undo(self) -> None:
        """Leave the model as it was."""
        for patches in (self._patched, self._profiler):
            if patches is not None:
                patches.undo()
        self._patched = self._profiler = None

    def choose(self, choosing: Choosing, agree: Agree = dict) -> None:
        """Choose the mix if enough steps were profiled.

        ``choosing`` returns what this rank would choose, by the costs of its blocks. ``agree`` turns it into the choice
        of all ranks, which must recompute alike where a block communicates, as SyncBatchNorm does. Raises BudgetError,
        in every call, if no mix keeps within the budget.
        """
        if self._profiler is None:
            return
        enough = self._profiler.steps >= PROFILED_STEPS
        agreed = agree(_own_choice(self._profiler, choosing) if enough else {"wait": True})
        if "wait" in agreed:
            return
        if "error" in agreed:
            raise BudgetError(agreed["error"])
        self.agreed = agreed
        self.choice = Choice(agreed["actions"], Forecast(*agreed["forecast"]))
        self._profiler.undo()
        self._profiler = None
        self._patched = PatchedModel(self._model, self.choice.actions)


def _own_choice(profiler: BlockProfiler, choosing: Choosing) -> ChoiceMessage:
    """Return this rank's choice, or why none is possible: ranks must agree on that, too, or one would wait."""
    try:
        return choosing(profiler.costs())
    except BudgetError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("anabranch: choosing which activations are recomputed has failed")
        return {"error": f"choosing which activations are recomputed failed: {type(error).__name__}: {error}"}
