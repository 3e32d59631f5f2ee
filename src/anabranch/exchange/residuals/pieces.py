"""Pieces: what a rank keeps between steps of one parameter, or of a part of it.

What is still to be sent of an element is the sum of all ranks' pieces that have it, whatever else they have. So a piece
may be added to a wider one, or to the gradient of its parameter, and nothing is lost.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from anabranch.exchange.interface import record_stream


@dataclass(frozen=True, eq=False)
class Piece:
    """``values`` of a parameter's elements from ``low`` on, flat and float32; the parameter has ``numel`` elements."""

    values: torch.Tensor
    low: int
    numel: int

    @classmethod
    def whole(cls, values: torch.Tensor) -> "Piece":
        """The values of all elements of a parameter."""
        return cls(values, 0, len(values))

    @property
    def elements(self) -> range:
        """The elements of the parameter that it has."""
        return range(self.low, self.low + len(self.values))

    def room_in(self, target: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The part for its elements in ``target``, which begins with element ``first``; as a view."""
        return target[self.low - first :][: len(self.values)]

    def plus(self, other: "Piece") -> "Piece":
        """The sum of both, over the elements of both; on the device of this one."""
        low = min(self.low, other.low)
        total = self.values.new_zeros(max(self.elements.stop, other.elements.stop) - low)
        self.room_in(total, low).copy_(self.values)
        other.room_in(total, low).add_(other.values.to(total.device))
        record_stream(self.values, other.values)
        return Piece(total, low, self.numel)

    def expanded(self) -> torch.Tensor:
        """The values of the whole parameter, 0 where this has none."""
        if len(self.values) == self.numel:
            return self.values
        whole = self.values.new_zeros(self.numel)
        self.room_in(whole).copy_(self.values)
        return whole


def add_piece(pieces: MutableMapping[str, Piece], name: str, piece: Piece) -> None:
    """Add a piece to that of the same parameter, if there is one."""
    before = pieces.get(name)
    pieces[name] = piece if before is None else before.plus(piece)
