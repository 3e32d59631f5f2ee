"""``anabranch run``: DataParallel in place of DDP in an unchanged program, and a summary of each model."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.parallel import DataParallel
from anabranch.tuning.explain import in_short
from anabranch.tuning.tuner import Tuner


class ModelSummary:
    """What DataParallel did for one model, in a few lines, as text. It does not keep the model alive."""

    def __init__(self, model: DataParallel) -> None:
        self._name = type(model.module).__name__
        self._lines = f"nothing was tried: {model._no_plan_reason}."
        self._note_once = weakref.finalize(model, self._note, model._tuner)

    def _note(self, tuner: Tuner | None) -> None:
        """Keep the findings in a few lines, when the summary is printed or the model is deleted."""
        if tuner is not None:
            self._lines = in_short(tuner.findings())

    def __str__(self) -> str:
        self._note_once()  # nothing, if the model is gone
        return f"{self._name}: {self._lines}"


@contextmanager
def replaced_ddp(options: Mapping[str, Any]) -> Iterator[list[ModelSummary]]:
    """A context in which ``DistributedDataParallel(...)`` makes a DataParallel with these options.

    Yields the summaries of all models, in the order in which they were wrapped. It does not matter by which name, or
    when, a program has imported the class: the class itself is the same, so that isinstance() holds, and only its
    constructor returns another object. Subclasses of a program's own stay what they are.
    """
    summaries: list[ModelSummary] = []

    class Replacement(DataParallel):
        def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
            super().__init__(module, *args, **{**options, **given})
            summaries.append(ModelSummary(self))

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return _plain(Replacement if cls is DistributedDataParallel else cls)

    Replacement.__name__ = Replacement.__qualname__ = DataParallel.__name__
    DistributedDataParallel.__new__ = new  # type: ignore[method-assign]
    try:
        yield summaries
    finally:
        # Not deleted: Python would then refuse the constructor's arguments (its issue 5322).
        DistributedDataParallel.__new__ = _plain  # type: ignore[method-assign]


def _plain(cls: type, *_: Any, **__: Any) -> Any:
    return object.__new__(cls)
