"""A residual in few bits between exchanges: in bfloat16, or as int8 with a scale per block.

It is rounded by chance, up or down, so that the mean of many roundings is the value itself: errors do not add up in one
direction. The bits of chance depend on rank, step and bucket alone, so that a run can be repeated; and what was stored
is the same after it is read and stored again, so that a resumed run continues bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.exchange.quantised.exchange import steps_for
from anabranch.exchange.quantised.stochastic import Seeds
from anabranch.values.kinds.formats import BlockFormat

OWN = "residual"  # so that these bits of chance are not those of an exchange of the same bucket


@dataclass(frozen=True)
class PackedResidual:
    """The values of one bucket's residual, as a message of the format."""

    message: torch.Tensor
    form: BlockFormat
    rank: int

    @classmethod
    def zeros(cls, numel: int, form: BlockFormat, rank: int, device: torch.device | None) -> "PackedResidual":
        """A residual of zeros."""
        nbytes = form.message_nbytes(form.region_numel(numel, 1))
        return cls(torch.zeros(1, nbytes, dtype=torch.uint8, device=device), form, rank)

    def read(self, target: torch.Tensor) -> torch.Tensor:
        """Write the values to ``target``, and return it."""
        if len(target):
            steps_for(target).finish(self.message, target, self.form)
        return target

    def write(self, values: torch.Tensor, step: int, names: Sequence[str]) -> None:
        """Store these values, rounded, after so many steps of the bucket of these parameters."""
        if len(values):
            seed = Seeds.of(self.rank, step, (OWN, *names)).sender
            self.message.copy_(steps_for(values).quantise(values, None, 1, self.form, seed))
