"""Transfers that happen only when somebody waits for them: a link of the slowest kind, on the CPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Promise:
    """A copy that somebody has asked for."""

    source: torch.Tensor
    target: torch.Tensor
    after: list["Promise"] = field(default_factory=list)
    done: bool = False

    def keep(self) -> None:
        """Copy, if that has not happened yet, behind those it must come after."""
        for before in self.after:
            before.keep()
        if not self.done:
            self.done = True
            self.target.copy_(self.source)


class LazyTransfers:
    """In place of ``CudaTransfers``: whoever forgets to wait reads NaN or another bucket, or loses what waited."""

    def __init__(self) -> None:
        self.homewards: list[Promise] = []
        self.waited = 0

    def begin(self) -> None:
        """Nothing is under way."""

    def inward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def bring(self, home: torch.Tensor, room: torch.Tensor, after: Sequence[Any]) -> Any:
        return Promise(home, room, [before for before in after if before is not None])

    def take_home(self, room: torch.Tensor, home: torch.Tensor) -> Any:
        home.fill_(float("nan"))  # it is nobody's to read until the copy is there
        self.homewards.append(Promise(room, home))
        return self.homewards[-1]

    def wait(self, done: Any) -> None:
        self.waited += not done.done
        done.keep()

    def settle(self) -> None:
        while self.homewards:
            self.homewards.pop(0).keep()
