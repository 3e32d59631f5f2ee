"""What a rank remembers of its sparse buckets between steps, by the names of their parameters.

A bucket's flat buffer is its parameters one after another. What was not sent belongs to the parameters, not to the
bucket: another plan parts and joins it by name, exactly. Regions belong to the bucket and are balanced again when
the bucket is another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from anabranch.sparse import regions

VERSION = 1


@dataclass
class BucketState:
    """One bucket on one rank. ``fresh`` (the same on every rank): its regions are yet to be balanced.

    ``boundaries`` (int64 [P+1]) part it into regions and ``tilt`` (a float32 scalar) is how much this owner's threshold
    differs from its share's. Of the last step, for reports: ``local_threshold`` and ``global_threshold``, and how many
    values passed, ``offered`` here and ``applied`` on all owners together. All are on the device.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    residual: torch.Tensor
    boundaries: torch.Tensor
    tilt: torch.Tensor
    step: int = 0
    fresh: bool = True
    local_threshold: torch.Tensor = field(init=False)
    global_threshold: torch.Tensor = field(init=False)
    offered: torch.Tensor = field(init=False)
    applied: torch.Tensor = field(init=False)
    _sums: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Nothing has passed before the first step."""
        self.local_threshold = torch.zeros((), dtype=torch.float32, device=self.residual.device)
        self.global_threshold = self.local_threshold.clone()
        self.offered = torch.zeros((), dtype=torch.int32, device=self.residual.device)
        self.applied = self.offered.clone()

    @classmethod
    def of(
        cls, residual: torch.Tensor, ranks: int, names: Sequence[str] = ("",), numels: Sequence[int] = ()
    ) -> "BucketState":
        """A fresh state around a residual; one parameter, if no names are given."""
        zero = torch.zeros((), dtype=torch.float32, device=residual.device)
        boundaries = regions.uniform(len(residual), ranks, residual.device)
        return cls(tuple(names), tuple(numels or [len(residual)]), residual, boundaries, zero)

    @property
    def ranks(self) -> int:
        """How many ranks share the bucket."""
        return len(self.boundaries) - 1

    def owner_buffer(self) -> torch.Tensor:
        """Zeros, as many as the widest region has elements; whoever adds into them leaves zeros behind."""
        widest = regions.widest_numel(len(self.residual), self.ranks)
        if self._sums is None:
            self._sums = torch.zeros(widest, dtype=torch.float32, device=self.residual.device)
        return self._sums

    def pieces(self) -> dict[str, torch.Tensor]:
        """The residual of each parameter; views."""
        return dict(zip(self.names, self.residual.split(list(self.numels)), strict=True))


class SparseState:
    """All sparse buckets of one model on one rank."""

    def __init__(self, rank: int, world_size: int, device: torch.device | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._loose: dict[str, torch.Tensor] = {}  # residuals of parameters that are in no sparse bucket now
        self._settings: dict[tuple[str, ...], Mapping[str, Any]] = {}  # loaded regions that wait for their bucket
        self._step = 0  # of buckets that are no more: schedules go on where they were

    def bucket(self, names: Sequence[str], numels: Sequence[int]) -> BucketState:
        """The state of the bucket of these parameters, in this order.

        If it is not the bucket of the last step, its residual is put together from those of its parameters, wherever
        they were, and what the other parameters of their old buckets had waits for theirs. Call it on every rank alike.
        """
        key = tuple(names)
        if len(set(key)) != len(key) or len(key) != len(numels):
            raise ValueError(
                f"a bucket needs distinct parameter names with one size each, not {key} with {tuple(numels)}"
            )
        if key not in self._buckets:
            self._dissolve(set(key))
            self._buckets[key] = self._built(key, tuple(numels))
        if self._buckets[key].numels != tuple(numels):
            raise ValueError(
                f"the parameters of bucket {key[0]} … have {self._buckets[key].numels} elements, not {tuple(numels)}"
            )
        return self._buckets[key]

    def buckets(self) -> list[BucketState]:
        """Those of the last steps."""
        return list(self._buckets.values())

    def residuals(self) -> dict[str, torch.Tensor]:
        """What has not been sent, by parameter; views of the live tensors."""
        found = dict(self._loose)
        for state in self._buckets.values():
            found.update(state.pieces())
        return found

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name, numbers and texts; nothing that needs pickle to be read."""
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": max([self._step, *(state.step for state in self._buckets.values())]),
            "residuals": {name: piece.detach().clone() for name, piece in self.residuals().items() if piece.any()},
            "buckets": [_settings(state) for state in self._buckets.values() if not state.fresh],
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave: this rank's, or all ranks' (any order) if the world size has changed.

        At the same world size everything continues bit by bit. At another, old rank r's residuals are added to those
        of new rank r mod world size, further ranks start at zero, and regions are balanced again: the
        sum over the ranks of what waits is what it was, up to float32 rounding where ranks are added together.
        """
        states = tuple(state for state in states if state)  # a run without anything to remember has kept {}
        if not states:
            return
        mine, same = self._own(states)
        self._buckets, self._loose, self._settings = {}, {}, {}
        for state in mine:
            for name, piece in state["residuals"].items():
                own = piece.detach().to(device=self.device, dtype=torch.float32).flatten()
                self._loose[name] = self._loose[name] + own if name in self._loose else own.clone()
        self._step = max((int(state["step"]) for state in states), default=0)
        if same:
            self._settings = {tuple(settings["names"]): settings for settings in mine[0]["buckets"]}

    def _own(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
        """The states that become this rank's, and whether the world has the size it had."""
        for state in states:
            if state.get("version") != VERSION:
                raise ValueError(f"sparse state has version {state.get('version')}, and this anabranch reads {VERSION}")
        old = {int(state["rank"]): state for state in states}
        sizes = sorted({int(state["world_size"]) for state in states})
        if len(sizes) != 1:
            raise ValueError(f"the sparse states given come from worlds of {sizes} ranks: give those of one run")
        same = sizes[0] == self.world_size
        if not (self.rank in old if same else set(old) == set(range(sizes[0]))):
            raise ValueError(
                f"rank {self.rank} of {self.world_size} was given the sparse state of ranks {sorted(old)} of {sizes[0]}"
                ": give its own, or those of all ranks if their number has changed"
            )
        return [old[self.rank]] if same else [old[r] for r in range(self.rank, sizes[0], self.world_size)], same

    def _dissolve(self, names: set[str]) -> None:
        """Take apart the buckets that hold any of these parameters."""
        for key in [key for key in self._buckets if not names.isdisjoint(key)]:
            state = self._buckets.pop(key)
            self._step = max(self._step, state.step)
            self._loose.update((name, piece.clone()) for name, piece in state.pieces().items())

    def _built(self, names: tuple[str, ...], numels: tuple[int, ...]) -> BucketState:
        residual = torch.zeros(sum(numels), dtype=torch.float32, device=self.device)
        ends = [sum(numels[:i]) for i in range(len(numels) + 1)]
        for name, (low, high) in zip(names, pairwise(ends), strict=True):
            if (piece := self._loose.pop(name, None)) is not None:
                if len(piece) != high - low:
                    raise ValueError(f"parameter {name} has {high - low} elements, and its residual has {len(piece)}")
                residual[low:high].copy_(piece)
        state = BucketState.of(residual, self.world_size, names, numels)
        state.step = self._step
        if (settings := self._settings.pop(names, None)) is not None:
            state.tilt.fill_(settings["tilt"])
            state.boundaries.copy_(torch.tensor(settings["boundaries"], dtype=torch.int64))
            state.step, state.fresh = int(settings["step"]), False
        return state


def _settings(state: BucketState) -> dict[str, Any]:
    return {
        "names": list(state.names),
        "tilt": state.tilt.item(),
        "boundaries": state.boundaries.tolist(),
        "step": state.step,
    }
