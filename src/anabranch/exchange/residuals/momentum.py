"""Momentum before sending: each rank averages its own gradients over time, and sends that average (its velocity).

Without it, a value that stays in the residual for a hundred steps and is then sent at once is new to the optimizer's
momentum, which spreads it over the steps after; meanwhile every other step brings zeros. Averaged before it is sent, it
arrives as it should be applied, and the optimizer needs no momentum of its own. Where a value was sent, its velocity
is reset, so that late values do not keep pushing. Y. Lin et al., *Deep gradient compression*, ICLR 2018, call this
momentum correction and factor masking. ``BucketState`` keeps the velocity of a bucket.
"""

from typing import NamedTuple

import torch

from anabranch.exchange.dense import SUMMABLE_BELOW


class Velocity(NamedTuple):
    """What a rank sends in place of gradients: decay · values + (1 − decay) · gradients; float32, on their device."""

    values: torch.Tensor
    decay: float

    def take(self, gradient: torch.Tensor) -> None:
        """Before an exchange: take the gradient into the velocity, which takes the gradient's place."""
        self.values.mul_(self.decay).add_(gradient, alpha=1 - self.decay)
        gradient.copy_(self.values)

    def reset_sent(self, average: torch.Tensor, residual: torch.Tensor, rounded: bool) -> None:
        """After it: reset what was sent. Gradients that cannot be sent leave no trace.

        ``rounded``: values were rounded before they were sent, so the residual is not exactly 0 where one was sent.
        """
        sent = residual == 0
        if rounded:
            sent |= average != 0  # where any rank's value was sent; and everywhere, where gradients are NaN
        self.values.masked_fill_(sent | ~(self.values.abs() < SUMMABLE_BELOW), 0.0)
