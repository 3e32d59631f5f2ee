"""Momentum before sending: each rank averages its own gradients over time, and sends that average (its velocity).

Without it, a value that stays in the residual for a hundred steps and is then sent at once is new to the optimizer's
momentum, which spreads it over the steps after; meanwhile every other step brings zeros. Averaged before it is sent, it
arrives as it should be applied, and the optimizer needs no momentum of its own. Where a value was sent, its velocity
is reset, so that late values do not keep pushing. Y. Lin et al., *Deep gradient compression*, ICLR 2018, call this
momentum correction and factor masking.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from anabranch.exchange.contracts import record_stream
from anabranch.exchange.dense import SUMMABLE_BELOW
from anabranch.exchange.residuals.state import BucketState


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


class Momentum:
    """Velocities of the sparse buckets of one model on one rank; kept by parameter, so that buckets can change.

    ``decay`` is the share of a velocity that is left after a step; at 0 there is no momentum and no state.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._flat: dict[tuple[str, ...], tuple[BucketState, torch.Tensor]] = {}
        self._pieces: dict[str, torch.Tensor] = {}  # parameters of former buckets, or from a checkpoint

    def velocity(self, state: BucketState) -> Velocity | None:
        """The velocity of a bucket; None without momentum."""
        return None if self.decay == 0.0 else Velocity(self._velocity(state), self.decay)

    def rescale(self, ratio: float) -> None:
        """From now on gradients are ``ratio`` times as large: scale all velocities to match."""
        for tensor in self.state_dict().values():
            tensor.mul_(ratio)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Velocities by parameter, as views."""
        found = dict(self._pieces)
        for state, flat in self._flat.values():
            found.update(zip(state.names, flat.split(list(state.numels)), strict=True))
        return found

    def clear(self) -> None:
        """Drop all velocities."""
        self._flat = {}
        self._pieces = {}

    def load_state_dict(self, *states: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's velocities, or the sum of those of several old ranks."""
        self.clear()
        for state in states:
            for name, piece in state.items():
                own = piece.detach().float().flatten()
                self._pieces[name] = self._pieces[name] + own if name in self._pieces else own.clone()

    def _velocity(self, state: BucketState) -> torch.Tensor:
        """The velocity of a bucket, one parameter after another."""
        if state.names not in self._flat:
            for key in [key for key in self._flat if not set(key).isdisjoint(state.names)]:
                old, flat = self._flat.pop(key)
                self._pieces.update(zip(old.names, flat.split(list(old.numels)), strict=True))
            blank = torch.zeros_like(state.residual)
            for name, room in zip(state.names, blank.split(list(state.numels)), strict=True):
                if (piece := self._pieces.pop(name, None)) is not None:
                    room.copy_(piece)
                    record_stream(piece)  # from a checkpoint it is of another stream, and dropped here
            self._flat[state.names] = (state, blank)
        return self._flat[state.names][1]
