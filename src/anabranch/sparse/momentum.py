"""Momentum before sending: each rank averages its own gradients over time, and sends that.

A value that waits a hundred steps and then arrives at once is new to the optimizer's momentum, which smears it over the
steps after; meanwhile every other step brings zeros. Averaged before it is sent, it arrives as it is to be applied, and
the optimizer needs no momentum of its own. Where a value was sent, its momentum begins anew, so that what is late does
not push on. Y. Lin et al., *Deep gradient compression*, ICLR 2018, call this momentum correction and factor masking.
"""

from collections.abc import Mapping

import torch

from anabranch.comm.exchange import Steps
from anabranch.sparse.state import BucketState


class Momentum:
    """Velocities of the sparse buckets of one model on one rank; by parameter, so that buckets can change.

    ``share`` is how much of a velocity is left after a step; 0 does nothing at all. ``rounds``: what travels is
    rounded, so that something is left to wait where a value was sent.
    """

    def __init__(self, share: float, rounds: bool = False) -> None:
        self._share, self._rounds = share, rounds
        self._flat: dict[tuple[str, ...], tuple[BucketState, torch.Tensor]] = {}
        self._pieces: dict[str, torch.Tensor] = {}  # of buckets that are no more, or from a checkpoint

    def around(self, exchange: Steps, gradient: torch.Tensor, state: BucketState) -> Steps:
        """The exchange of velocities in the position of gradients; what is not finite leaves no trace in them."""
        if self._share == 0.0:
            yield from exchange
            return
        velocity = self._of(state)
        velocity.mul_(self._share).add_(gradient, alpha=1 - self._share)
        gradient.copy_(velocity)
        yield from exchange
        sent = state.residual == 0
        if self._rounds:
            sent |= gradient != 0  # where anyone's was; and everywhere, where gradients were not finite
        velocity.masked_fill_(sent, 0.0).nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, ratio: float) -> None:
        """Gradients are so many times larger from now on."""
        for tensor in self.state_dict().values():
            tensor.mul_(ratio)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Velocities by parameter; views."""
        found = dict(self._pieces)
        for state, flat in self._flat.values():
            found.update(zip(state.names, flat.split(list(state.numels)), strict=True))
        return found

    def load_state_dict(self, *states: Mapping[str, torch.Tensor]) -> None:
        """Take over this rank's, or the sum of several old ranks'."""
        self._flat, self._pieces = {}, {}
        for state in states:
            for name, piece in state.items():
                own = piece.detach().float().flatten()
                self._pieces[name] = self._pieces[name] + own if name in self._pieces else own.clone()

    def _of(self, state: BucketState) -> torch.Tensor:
        """The bucket's, one parameter after another."""
        if state.names not in self._flat:
            for key in [key for key in self._flat if not set(key).isdisjoint(state.names)]:
                old, flat = self._flat.pop(key)
                self._pieces.update(zip(old.names, flat.split(list(old.numels)), strict=True))
            blank = torch.zeros_like(state.residual)
            for name, room in zip(state.names, blank.split(list(state.numels)), strict=True):
                if (piece := self._pieces.pop(name, None)) is not None:
                    room.copy_(piece)
            self._flat[state.names] = (state, blank)
        return self._flat[state.names][1]
