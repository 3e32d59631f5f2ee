"""Updates that wait until the norm over all gradients is known; a sparse average waits as its values that are not 0."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from anabranch.exchange.contracts import record_stream
from anabranch.lean.optimizers import BucketOptimizer


class NonzeroValues(NamedTuple):
    """A tensor that is mostly zeros."""

    positions: torch.Tensor
    values: torch.Tensor
    numel: int

    def whole(self) -> torch.Tensor:
        """The tensor."""
        record_stream(self.positions, self.values)
        whole = self.values.new_zeros(self.numel)
        whole[self.positions.long()] = self.values
        return whole

    @classmethod
    def of(cls, whole: torch.Tensor) -> "NonzeroValues":
        """The values of a flat tensor; waits for the device."""
        positions = whole.nonzero().flatten()
        dtype = torch.int32 if whole.numel() <= torch.iinfo(torch.int32).max else torch.int64
        return cls(positions.to(dtype), whole[positions], whole.numel())

    @property
    def nbytes(self) -> int:
        """The memory it needs."""
        return self.positions.nbytes + self.values.nbytes


@dataclass(frozen=True)
class HeldUpdate:
    """The update of a bucket that waits for the norm.

    finite            whether the average is finite, on the device
    used, put_back    as in ``BucketUpdater.exchange_and_step``
    """

    optimizer: BucketOptimizer
    held: torch.Tensor | NonzeroValues
    finite: torch.Tensor
    used: torch.Tensor | None
    put_back: Callable[[torch.Tensor], None] | None

    @property
    def waits_for_host(self) -> bool:
        """Whether only the host can leave it out; a fused optimizer of a dense bucket does that on the device."""
        on_device = self.finite.is_cuda and self.optimizer.takes_found_inf
        return not on_device or self.used is not None or self.put_back is not None

    def average(self) -> torch.Tensor:
        """The bucket's average."""
        return self.held.whole() if isinstance(self.held, NonzeroValues) else self.held

    def compacted(self) -> "HeldUpdate":
        """The same in as little memory of its own as it needs; waits for the device."""
        average = self.average()
        values = NonzeroValues.of(average)
        return replace(self, held=values if values.nbytes < average.nbytes else average.clone())

    def undo(self, loss_scale: float) -> None:
        """Give the average, times the scale of the loss, back to the residual it came from, where it is finite."""
        if self.put_back is not None:
            average = self.average()
            self.put_back(torch.where(average.isfinite(), average, 0.0).mul_(loss_scale))
