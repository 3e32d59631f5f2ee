"""What a rank remembers of its sparse buckets between steps, by the names of their parameters.

A bucket's flat buffer is its parameters one after another. What was not sent belongs to the parameters, not to the
bucket: another plan parts and joins it by name, exactly. Regions belong to the bucket and are balanced again when
the bucket is another.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from anabranch.sparse import regions
from anabranch.sparse.residual_monitor import SAMPLE_PERIOD, ResidualMonitor

VERSION = 1
log = logging.getLogger("anabranch")


@dataclass
class BucketState:
    """One bucket on one rank. ``fresh`` (the same on every rank): its regions are yet to be balanced.

    ``boundaries`` (int64 [P+1]) part it into regions and ``threshold_bias`` (a float32 scalar) is how much this owner's threshold
    differs from its share's. Of the last step, for reports: ``local_threshold`` and ``global_threshold``, and how many
    values passed, ``offered`` here and ``applied`` on all owners together. All are on the device. ``waiting``, if it is
    kept: how much has waited since when. ``accumulates_in_place``: gradients are added to what waits as they come, so that the memory
    of the gradient is zeros, and an owner may add its sums up there.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    residual: torch.Tensor
    boundaries: torch.Tensor
    threshold_bias: torch.Tensor
    step: int = 0
    fresh: bool = True
    waiting: ResidualMonitor | None = None
    accumulates_in_place: bool = False
    local_threshold: torch.Tensor = field(init=False)
    global_threshold: torch.Tensor = field(init=False)
    offered: torch.Tensor = field(init=False)
    applied: torch.Tensor = field(init=False)

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

    def pieces(self) -> dict[str, torch.Tensor]:
        """The residual of each parameter; views."""
        return dict(zip(self.names, self.residual.split(list(self.numels)), strict=True))

    def record_norms(self, gradient: torch.Tensor) -> None:
        """Show the residual monitor this step's gradient, whole or piece by piece."""
        if self.residual_monitor is not None:
            self.residual_monitor.look(self.step, gradient, self.residual)


class SparseState:
    """All sparse buckets of one model on one rank.

    loose       what waits of parameters that are in no sparse bucket now
    lent        what was added to gradients of which nobody knows yet whether their average is finite
    scale       of the loss from which all that waits was computed, where someone says (``rescale``)
    loaded      what was loaded, as far as it must be the same on all ranks, line by line
    taken       the states that have become this rank's
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device | None = None, sample_period: int = SAMPLE_PERIOD
    ) -> None:
        self.rank, self.world_size, self.device, self._look_period = rank, world_size, device, sample_period
        self.loose: dict[str, torch.Tensor] = {}
        self.lent: dict[str, torch.Tensor] = {}
        self.scale: float | None = None
        self.loaded = ["nothing"]
        self.taken: list[Mapping[str, Any]] = []
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._settings: dict[tuple[str, ...], Mapping[str, Any]] = {}  # loaded regions that wait for their bucket
        self._step = 0  # of buckets that are no more: schedules go on where they were

    def bucket(self, names: Sequence[str], numels: Sequence[int]) -> BucketState:
        """The state of the bucket of these parameters, in this order.

        If it is not the bucket of the last step, its residual is put together from those of its parameters, wherever
        they were, and what the other parameters of their old buckets had waits for theirs. Call it on every rank alike.
        """
        key, sizes = tuple(names), tuple(numels)
        known = self._buckets.get(key)
        if known is not None and known.numels == sizes:
            return known
        if known is not None:
            raise ValueError(f"the parameters of bucket {key[0]} … have {known.numels} elements, not {sizes}")
        if len(set(key)) != len(key) or len(key) != len(sizes):
            raise ValueError(f"a bucket needs distinct parameter names with one size each, not {key} with {sizes}")
        self._dissolve(key)
        self._buckets[key] = self._built(key, sizes)
        return self._buckets[key]

    def release(self, kept: Collection[str]) -> None:
        """Only these parameters are in sparse buckets from now on: what waits of the others becomes loose."""
        self._dissolve({name for key in self._buckets for name in key}.difference(kept))

    def lend(self, name: str) -> torch.Tensor | None:
        """What waits of a parameter in no sparse bucket, to be added to its gradient; None if nothing does."""
        piece = self.loose.pop(name, None)
        if piece is not None:
            self.lent[name] = piece + self.lent[name].to(piece.device) if name in self.lent else piece
        return piece

    def settle(self, sent: Collection[str]) -> None:
        """What was lent of these parameters is on its way for good; that of the others waits again."""
        lent, self.lent = self.lent, {}
        waiting = self.residuals()
        for name, piece in lent.items():
            if name in sent:
                continue
            if name in waiting:
                waiting[name].add_(piece.to(waiting[name].device))
            else:
                self.loose[name] = piece

    def rescale(self, scale: float) -> None:
        """From now on gradients are those of a loss times ``scale``: so becomes all that waits."""
        if self.scale is not None and self.scale != scale:
            for state in self._buckets.values():
                state.residual.mul_(scale / self.scale)
            for piece in (*self.loose.values(), *self.lent.values()):
                piece.mul_(scale / self.scale)
        self.scale = scale

    def buckets(self) -> list[BucketState]:
        """Those of the last steps."""
        return list(self._buckets.values())

    def residuals(self) -> dict[str, torch.Tensor]:
        """What has not been sent, by parameter; views of the live tensors."""
        found = dict(self.loose)
        for state in self._buckets.values():
            found.update(state.pieces())
        return found

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name, numbers and texts; nothing that needs pickle to be read."""
        residuals = {name: piece.detach().clone() for name, piece in self.residuals().items()}
        for name, piece in self.lent.items():
            residuals[name] = residuals[name] + piece.to(residuals[name].device) if name in residuals else piece.clone()
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": max([self._step, *(state.step for state in self._buckets.values())]),
            "scale": self.scale,
            "residuals": {name: piece for name, piece in residuals.items() if piece.any()},
            "buckets": [_settings(state) for state in self._buckets.values() if not state.fresh],
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave: this rank's, or all ranks' (any order) if the world size has changed.

        At the same world size everything continues bit by bit. At another, old rank r's residuals are added to those
        of new rank r mod world size, further ranks start at zero, and regions are balanced again: the
        sum over the ranks of what waits is what it was, up to float32 rounding where ranks are added together.
        """
        states = tuple(state for state in states if state)  # a run without anything to remember has kept {}
        self.loaded, self.taken = ["nothing"], []
        if not states:
            return
        try:
            mine, same = self._own(states)
        except ValueError as error:
            self.loaded = [f"what it refused: {error}"]
            raise
        self.loaded, self.taken = shared(states[0]), mine
        self._buckets, self._settings, self.lent = {}, {}, {}
        self.loose.clear()
        for state in mine:
            for name, piece in state["residuals"].items():
                own = piece.detach().to(torch.float32).flatten()  # where it is: not all of it at once on the device
                self.loose[name] = (
                    self.loose[name] + own.to(self.loose[name].device) if name in self.loose else own.clone()
                )
        self._step, self.scale = int(states[0]["step"]), states[0].get("scale")
        if same:
            self._settings = {tuple(settings["names"]): settings for settings in mine[0]["buckets"]}
        elif self.rank == 0:
            words = (
                "anabranch: what waited on %d ranks now waits on %d: its sum is conserved, regions are balanced anew"
            )
            log.warning(words, int(states[0]["world_size"]), self.world_size)

    def _own(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
        """The states that become this rank's, and whether the world has the size it had."""
        for state in states:
            if state.get("version") != VERSION:
                raise ValueError(f"sparse state has version {state.get('version')}, and this anabranch reads {VERSION}")
        old = {int(state["rank"]): state for state in states}
        sizes = sorted({int(state["world_size"]) for state in states})
        if len(sizes) != 1:
            raise ValueError(f"the sparse states given come from worlds of {sizes} ranks: give those of one run")
        for state in states[1:]:
            for first, other in zip(shared(states[0]), shared(state), strict=False):
                if first != other:
                    raise ValueError(
                        f"the sparse states given are of different checkpoints: rank {states[0]['rank']}'s says "
                        f"{first}, rank {state['rank']}'s says {other}: give those of one run at one step"
                    )
        same = sizes[0] == self.world_size
        if not (self.rank in old if same else set(old) == set(range(sizes[0]))):
            raise ValueError(
                f"rank {self.rank} of {self.world_size} was given the sparse state of ranks {sorted(old)} of {sizes[0]}"
                ": give its own, or those of all ranks if their number has changed"
            )
        return [old[self.rank]] if same else [old[r] for r in range(self.rank, sizes[0], self.world_size)], same

    def _dissolve(self, names: Collection[str]) -> None:
        """Take apart the buckets that hold any of these parameters."""
        for key in [key for key in self._buckets if not set(names).isdisjoint(key)]:
            state = self._buckets.pop(key)
            self._step = max(self._step, state.step)
            self.loose.update((name, piece.clone()) for name, piece in state.pieces().items())

    def _built(self, names: tuple[str, ...], numels: tuple[int, ...]) -> BucketState:
        residual = torch.zeros(sum(numels), dtype=torch.float32, device=self.device)
        ends = [sum(numels[:i]) for i in range(len(numels) + 1)]
        for name, (low, high) in zip(names, pairwise(ends), strict=True):
            if (piece := self.loose.pop(name, None)) is not None:
                if len(piece) != high - low:
                    raise ValueError(f"parameter {name} has {high - low} elements, and its residual has {len(piece)}")
                residual[low:high].copy_(piece)
        state = BucketState.of(residual, self.world_size, names, numels)
        state.step, state.residual_monitor = self._step, ResidualMonitor(self.device, self._look_period)
        if (settings := self._settings.pop(names, None)) is not None:
            state.threshold_bias.fill_(settings["tilt"])
            state.boundaries.copy_(torch.tensor(settings["boundaries"], dtype=torch.int64))
            state.step, state.fresh = int(settings["step"]), False
        return state


def shared(state: Mapping[str, Any]) -> list[str]:
    """What the states of all ranks of one checkpoint have in common, line by line."""
    trained, scale = state.get("steps_trained"), state.get("scale")
    head = f"step {state['step']} of {state['world_size']} ranks, {trained} steps trained, loss scale {scale}"
    return [
        head,
        *(f"bucket to {b['names'][-1]}: step {b['step']}, regions {b['boundaries']}" for b in state["buckets"]),
    ]


def _settings(state: BucketState) -> dict[str, Any]:
    return {
        "names": list(state.names),
        "tilt": state.threshold_bias.item(),
        "boundaries": state.boundaries.tolist(),
        "step": state.step,
    }
