"""The state of a rank's buckets with residuals between steps: residuals by parameter name, regions by bucket.

A bucket's flat buffer is its parameters one after another. A residual belongs to its parameter, not to the bucket: when
the plan changes, residuals move to the new buckets by name, exactly. Regions belong to the bucket, and a new bucket
balances its own.

A piece may come from another stream than the one that reads it last, so whoever drops one that a stream may
still read records the stream.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from struct import unpack
from typing import Any

import torch

from anabranch.exchange.interface import record_stream
from anabranch.exchange.quantised.exchange import steps_for
from anabranch.exchange.residuals.checkpoint import VERSION
from anabranch.values.kinds.formats import BlockFormat

log = logging.getLogger("anabranch")


@dataclass(frozen=True)
class PackedResidual:
    """The values of one bucket's residual between exchanges: in bfloat16, or as int8 with a scale per block.

    They are rounded up or down at random, so that the mean of many roundings is the value: errors do not add up in one
    direction. The random bits depend on rank, step and bucket alone, so that a run can be repeated; and what was stored
    is the same after it is read and stored again, so that a resumed run continues bit by bit.
    """

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
        """Store these values, rounded, after ``step`` steps of the bucket of these parameters."""
        if len(values):
            text = f"{self.rank} {step} residual {' '.join(names)}"
            seed: int = unpack("<2i", blake2b(text.encode(), digest_size=8).digest())[0]
            self.message.copy_(steps_for(values).quantise(values, None, 1, self.form, seed))


@dataclass
class BucketState:
    """One bucket on one rank. All tensors are on the device.

    residual               float32: what this rank accumulated and has not sent, one parameter after another; empty
                           while it is ``packed``
    boundaries             int64 [P+1]: divide the bucket into regions
    threshold_bias         float32 scalar: log of this owner's threshold over that of its own share
    step                   sparse steps so far
    fresh                  regions were never balanced; the same on every rank
    held                   residuals of frozen parameters by name; they are 0 in ``residual``
    velocity               float32: what is sent in place of gradients, where there is momentum (``momentum.py``)
    accumulates_in_place   gradients are added to the residual as they come. The gradient's memory is then zeros, and an
                           owner may add its sums there.
    packed                 the residual between exchanges, where it is stored rounded; else None

    ``local_threshold``, ``offered`` and ``applied`` are those of the last step: how many values passed on this rank,
    and at all owners together.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    residual: torch.Tensor
    boundaries: torch.Tensor
    threshold_bias: torch.Tensor
    step: int = 0
    fresh: bool = True
    velocity: torch.Tensor | None = None
    accumulates_in_place: bool = False
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    packed: PackedResidual | None = None
    local_threshold: torch.Tensor = field(init=False)
    offered: torch.Tensor = field(init=False)
    applied: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.local_threshold = torch.zeros((), dtype=torch.float32, device=self.residual.device)
        self.offered = torch.zeros((), dtype=torch.int32, device=self.residual.device)
        self.applied = self.offered.clone()

    @classmethod
    def of(
        cls, residual: torch.Tensor, ranks: int, names: Sequence[str] = ("",), numels: Sequence[int] = ()
    ) -> "BucketState":
        """A fresh state around a residual; as one parameter, if no names are given."""
        zero = torch.zeros((), dtype=torch.float32, device=residual.device)
        numels = tuple(numels or [len(residual)])
        boundaries = uniform_boundaries(sum(numels), ranks, residual.device)
        return cls(tuple(names), numels, residual, boundaries, zero)

    def sent_velocity(self) -> torch.Tensor:
        """``velocity``, which begins as zeros."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(self.residual)
        return self.velocity

    def pieces(self, flat: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The part of each parameter in ``flat``, or in the unpacked residual, as views."""
        whole = self.residual if flat is None else flat
        return dict(zip(self.names, whole.split(list(self.numels)), strict=True))

    def unpack(self, target: torch.Tensor) -> None:
        """Read a packed residual into ``target``, which is the residual until ``pack()``."""
        assert self.packed is not None
        self.packed.read(target)
        self.residual = target

    def pack(self) -> None:
        """Round the residual, and drop it in float32."""
        assert self.packed is not None
        self.packed.write(self.residual, self.step, self.names)
        self.residual = self.residual.new_empty(0)

    def store_as(self, form: BlockFormat | None, rank: int) -> None:
        """From now on the residual is stored in this format between exchanges; None: as it is, on the device."""
        whole = self.current().to(self.boundaries.device)
        self.packed = None if form is None else PackedResidual.zeros(len(whole), form, rank, whole.device)
        self.residual = whole
        if self.packed is not None:
            self.pack()

    def current(self) -> torch.Tensor:
        """The residual in float32, to be read only; between two exchanges, or in the middle of one."""
        if self.packed is None or len(self.residual):
            return self.residual
        return self.packed.read(self.residual.new_empty(sum(self.numels)))

    @contextmanager
    def whole(self) -> Iterator[torch.Tensor]:
        """The residual in float32, to be changed between two exchanges."""
        if self.packed is not None:
            self.unpack(self.residual.new_empty(sum(self.numels)))
        try:
            yield self.residual
        finally:
            if self.packed is not None:
                self.pack()

    def hold(self, names: Collection[str]) -> None:
        """Hold the residuals of these parameters, and put those of all others back; between two exchanges."""
        if self.held.keys() == set(names):
            return
        with self.whole():
            for name, piece in self.pieces().items():
                if name in names and name not in self.held:
                    self.held[name] = piece.clone()
                    piece.zero_()
                elif name not in names and name in self.held:
                    piece.add_(held := self.held.pop(name))
                    record_stream(held)

    def take_back(self, average: torch.Tensor, factor: float = 1.0) -> None:
        """Add an average that nobody applied, times ``factor``, where it is finite.

        Every rank adds it to its own residual, so that the sum of residuals over the ranks is what it was. Where an
        average is not finite, the exchange has put back its own already.
        """
        with self.whole() as residual:
            residual.add_(torch.where(average.isfinite(), average, 0.0).mul_(factor).to(residual.device))


def uniform_boundaries(numel: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """Boundaries of regions of equal size, ±1."""
    return torch.arange(ranks + 1, dtype=torch.int64, device=device) * numel // ranks


class BucketStates:
    """The states of all buckets with residuals of one model on one rank.

    unbucketed   residuals of parameters that are in no such bucket now
    velocities   velocities of those parameters
    flushing     residuals added to gradients whose average is not yet known to be finite
    scale        loss scale of the residuals, once ``rescale`` has been called
    loaded       description of the loaded checkpoint, line by line; must be the same on all ranks

    ``form``: how residuals are rounded between exchanges; None: not at all.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device | None = None, form: BlockFormat | None = None
    ) -> None:
        self._form = form
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.unbucketed: dict[str, torch.Tensor] = {}
        self.velocities: dict[str, torch.Tensor] = {}
        self.flushing: dict[str, torch.Tensor] = {}
        self.scale: float | None = None
        self.loaded = ["nothing"]
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._settings: dict[tuple[str, ...], Mapping[str, Any]] = {}  # loaded, of buckets that were not used yet
        self._step = 0  # the most steps of any former bucket: a new one continues the schedules

    def bucket(self, names: Sequence[str], numels: Sequence[int]) -> BucketState:
        """The state of the bucket of these parameters, in this order.

        A new bucket takes the residuals of its parameters from the buckets that had them. Residuals of other parameters
        of those buckets become unbucketed. All ranks must ask for the same buckets in the same order.
        """
        key, sizes = tuple(names), tuple(numels)
        known = self._buckets.get(key)
        if known is not None and known.numels == sizes:
            return known
        if known is not None:
            raise ValueError(
                f"the parameters of bucket {key[0]} … have {known.numels} elements, and were given as {sizes}"
            )
        if len(set(key)) != len(key) or len(key) != len(sizes):
            raise ValueError(f"a bucket needs distinct parameter names with one size each: found {key} with {sizes}")
        self._dissolve(key)
        self._buckets[key] = self._new_bucket(key, sizes)
        return self._buckets[key]

    def keep_buckets_of(self, names: Collection[str]) -> None:
        """Only these parameters are in buckets with residuals from now on; those of all others become unbucketed."""
        self._dissolve({name for key in self._buckets for name in key}.difference(names))

    def begin_flush(self, name: str) -> torch.Tensor | None:
        """The residual of an unbucketed parameter, to be added to its gradient; None if it has none."""
        piece = self.unbucketed.pop(name, None)
        if piece is not None:
            self.flushing[name] = piece + self.flushing[name].to(piece.device) if name in self.flushing else piece
        return piece

    def put_back(self, name: str, rest: torch.Tensor) -> None:
        """Return ``rest`` of a flushed residual to the unbucketed ones: it was not added to the gradient."""
        self.flushing[name] = self.flushing[name] - rest.to(self.flushing[name].device)
        self.unbucketed[name] = rest

    def end_flush(self, sent: Collection[str]) -> None:
        """The flushed residuals of these parameters were sent; those of the others become residuals again."""
        flushed, self.flushing = self.flushing, {}
        kept = {name: piece for name, piece in flushed.items() if name not in sent}
        for state in self._buckets.values():
            if mine := [name for name in state.names if name in kept]:
                with state.whole() as residual:
                    for name in mine:
                        state.pieces()[name].add_(piece := kept.pop(name).to(residual.device))
                        record_stream(piece)
        for name, piece in kept.items():
            if name in self.unbucketed:
                self.unbucketed[name].add_(piece.to(self.unbucketed[name].device))
                record_stream(piece)
            else:
                self.unbucketed[name] = piece

    def store_as(self, form: BlockFormat | None) -> None:
        """From now on residuals are stored in this format."""
        self._form = form
        for state in self._buckets.values():
            state.store_as(form, self.rank)

    def rescale(self, scale: float) -> None:
        """From now on gradients are those of a loss times ``scale``: rescale residuals and velocities to match."""
        if self.scale is not None and self.scale != scale:
            for state in self._buckets.values():
                with state.whole() as residual:
                    residual.mul_(scale / self.scale)
            held = [piece for state in self._buckets.values() for piece in state.held.values()]
            for piece in (*held, *self.unbucketed.values(), *self.flushing.values(), *self.all_velocities().values()):
                piece.mul_(scale / self.scale)
        self.scale = scale

    def buckets(self) -> list[BucketState]:
        """The buckets of the plan in force."""
        return list(self._buckets.values())

    def residuals(self) -> dict[str, torch.Tensor]:
        """The residual of each parameter, to be read only."""
        found = dict(self.unbucketed)
        for state in self._buckets.values():
            found.update(state.pieces(state.current()))
        return found

    def all_velocities(self) -> dict[str, torch.Tensor]:
        """The velocity of each parameter that has one, as views."""
        found = dict(self.velocities)
        for state in self._buckets.values():
            if state.velocity is not None:
                found.update(state.pieces(state.velocity))
        return found

    def clear(self) -> None:
        """Drop all residuals, velocities and buckets."""
        self._buckets = {}
        self._settings = {}
        self.flushing = {}
        self.unbucketed = {}
        self.velocities = {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name, numbers and strings. Can be read without pickle."""
        residuals = {name: piece.detach().clone() for name, piece in self.residuals().items()}
        for name, piece in (*self.flushing.items(), *(item for s in self._buckets.values() for item in s.held.items())):
            residuals[name] = residuals[name] + piece.to(residuals[name].device) if name in residuals else piece.clone()
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": max([self._step, *(state.step for state in self._buckets.values())]),
            "scale": self.scale,
            "residuals": {name: piece for name, piece in residuals.items() if piece.any()},
            "buckets": [_checkpoint_settings(state) for state in self._buckets.values() if not state.fresh],
            "velocities": {name: piece.clone() for name, piece in self.all_velocities().items()},
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned: this rank's, or all ranks' (in any order) if the world size has changed.

        At the same world size everything continues bit by bit. At another, old rank r's residuals are added to those
        of new rank r mod world size, further ranks start at zero, and regions are balanced again. The sum of the
        residuals over the ranks is conserved, up to float32 rounding where residuals are added.
        """
        states = tuple(state for state in states if state)  # a run without any state saved {}
        if not states:
            self.loaded = ["nothing"]
            return
        mine, same = self._own_states(states)
        self.loaded = common_lines(states[0])
        self.clear()
        for state in mine:
            for pieces, kind in ((self.unbucketed, "residuals"), (self.velocities, "velocities")):
                for name, piece in state.get(kind, {}).items():
                    own = piece.detach().to(torch.float32).flatten()  # stays on its own device until its bucket is used
                    before = pieces.get(name)
                    pieces[name] = own.clone() if before is None else before + own.to(before.device)
        self._step = states[0]["step"]
        self.scale = states[0].get("scale")
        if same:
            self._settings = {tuple(settings["names"]): settings for settings in mine[0]["buckets"]}
        elif self.rank == 0:
            log.warning(
                "anabranch: residuals of %d ranks were loaded on %d: their sum is conserved, regions are new",
                states[0]["world_size"],
                self.world_size,
            )

    def _own_states(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
        """The states that become this rank's, and whether the world size is the old one."""
        old = {state["rank"]: state for state in states}
        if len(old) < len(states):
            ranks = sorted(state["rank"] for state in states)
            raise ValueError(f"the sparse states given are of ranks {ranks}: give that of each rank once")
        for state in states[1:]:
            for first, other in zip_longest(common_lines(states[0]), common_lines(state), fillvalue="no more buckets"):
                if first != other:
                    raise ValueError(
                        f"the sparse states given are from different checkpoints: rank {states[0]['rank']}'s says "
                        f"{first}, rank {state['rank']}'s says {other}: give those of one run at one step"
                    )
        size = states[0]["world_size"]
        same = size == self.world_size
        if not (self.rank in old if same else set(old) == set(range(size))):
            raise ValueError(
                f"rank {self.rank} of {self.world_size} was given the sparse state of ranks {sorted(old)} of {size}"
                ": give its own, or those of all ranks if their number has changed"
            )
        return [old[self.rank]] if same else [old[r] for r in range(self.rank, size, self.world_size)], same

    def _dissolve(self, names: Collection[str]) -> None:
        """Remove the buckets that hold any of these parameters; their residuals become unbucketed."""
        for key in [key for key in self._buckets if not set(names).isdisjoint(key)]:
            state = self._buckets.pop(key)
            state.hold(())
            self._step = max(self._step, state.step)
            self.unbucketed.update((name, piece.clone()) for name, piece in state.pieces(state.current()).items())
            if state.velocity is not None:
                self.velocities.update(state.pieces(state.velocity))
            record_stream(state.residual, *([] if state.packed is None else [state.packed.message]))

    def _new_bucket(self, names: tuple[str, ...], numels: tuple[int, ...]) -> BucketState:
        form, numel = self._form, sum(numels)
        packed = None if form is None else PackedResidual.zeros(numel, form, self.rank, self.device)
        known = self._joined_pieces(self.unbucketed, names, numels)
        residual = known
        if residual is None:
            residual = torch.zeros(numel if packed is None else 0, dtype=torch.float32, device=self.device)
        state = BucketState.of(residual, self.world_size, names, numels)
        state.step, state.velocity = self._step, self._joined_pieces(self.velocities, names, numels)
        if (settings := self._settings.pop(names, None)) is not None:
            state.threshold_bias.fill_(settings["tilt"])
            state.boundaries.copy_(torch.tensor(settings["boundaries"], dtype=torch.int64))
            state.step = settings["step"]
            state.fresh = False
        if packed is not None:
            state.packed = packed
            if known is not None:
                state.pack()
        return state

    def _joined_pieces(
        self, pieces: dict[str, torch.Tensor], names: Sequence[str], numels: Sequence[int]
    ) -> torch.Tensor | None:
        """Take the pieces of these parameters, and return them as one tensor, 0 where none is; None if none is."""
        if pieces.keys().isdisjoint(names):
            return None
        flat = torch.zeros(sum(numels), dtype=torch.float32, device=self.device)
        for name, room in zip(names, flat.split(list(numels)), strict=True):
            if (piece := pieces.pop(name, None)) is not None:
                if len(piece) != len(room):
                    raise ValueError(f"parameter {name} has {len(room)} elements, and its residual has {len(piece)}")
                room.copy_(piece)
                record_stream(piece)
        return flat


def common_lines(state: Mapping[str, Any]) -> list[str]:
    """Describe, line by line, what the states of all ranks of one checkpoint have in common."""
    trained, scale = state.get("steps_trained"), state.get("scale")
    head = f"step {state['step']} of {state['world_size']} ranks, {trained} steps trained, loss scale {scale}"
    return [
        head,
        *(f"bucket to {b['names'][-1]}: step {b['step']}, regions {b['boundaries']}" for b in state["buckets"]),
    ]


def _checkpoint_settings(state: BucketState) -> dict[str, Any]:
    return {
        "names": list(state.names),
        "tilt": state.threshold_bias.item(),
        "boundaries": state.boundaries.tolist(),
        "step": state.step,
    }
