"""The state of a rank's buckets with residuals between steps: residuals by parameter name, regions by bucket.

A bucket's flat buffer is its parameters one after another. A residual belongs to its parameter, not to the bucket: when
the plan changes, residuals move to the new buckets by name, exactly. Regions belong to the bucket, and a new bucket
balances its own.

The buffer of a two-level bucket is a share of each parameter, summed over the ranks of a node, and its residual is in
the same units. So what is still to be sent of an element is the sum of all ranks' residuals, flat or on two levels.
When flat buckets follow, residuals are widened with zeros. After other changes a rank may have elements that its new
buckets do not have: they stay unbucketed, and join the next gradient.

A piece may come from another stream than the one that reads it last, so whoever drops one that a stream may
still read records the stream.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from struct import unpack
from typing import Any

import torch

from anabranch.exchange.interface import record_stream
from anabranch.exchange.quantised.exchange import steps_for
from anabranch.exchange.residuals.checkpoint import VERSION
from anabranch.exchange.residuals.pieces import Piece, add_piece
from anabranch.exchange.shares import WHOLE, Share, within
from anabranch.values.kinds.formats import BlockFormat
from anabranch.values.nodes import Nodes

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
    boundaries             int64 [P+1]: divide the bucket into regions, one per rank of the exchange
    threshold_bias         float32 scalar: log of this owner's threshold over that of its own share
    step                   sparse steps so far
    fresh                  regions were never balanced; the same on every rank
    held                   residuals of frozen parameters by name; they are 0 in ``residual``
    velocity               float32: what is sent in place of gradients, where there is momentum (``momentum.py``)
    accumulates_in_place   gradients are added to the residual as they come. The gradient's memory is then zeros, and an
                           owner may add its sums there.
    packed                 the residual between exchanges, where it is stored rounded; else None
    share                  the part of each parameter that this rank exchanges; gradients in it are sums over as many
                           ranks as there are parts

    ``numels`` are the sizes of the parameters, ``elements`` what the bucket has of each, and ``numel`` of all.
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
    share: Share = WHOLE
    elements: dict[str, range] = field(init=False)
    numel: int = field(init=False)
    local_threshold: torch.Tensor = field(init=False)
    offered: torch.Tensor = field(init=False)
    applied: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.elements = {name: self.share.of(numel) for name, numel in zip(self.names, self.numels, strict=True)}
        self.numel = sum(map(len, self.elements.values()))
        self.local_threshold = torch.zeros((), dtype=torch.float32, device=self.residual.device)
        self.offered = torch.zeros((), dtype=torch.int32, device=self.residual.device)
        self.applied = self.offered.clone()

    @classmethod
    def of(
        cls,
        residual: torch.Tensor,
        ranks: int,
        names: Sequence[str] = ("",),
        numels: Sequence[int] = (),
        share: Share = WHOLE,
    ) -> "BucketState":
        """A fresh state around a residual, for an exchange of ``ranks``; as one parameter, if no names are given."""
        zero = torch.zeros((), dtype=torch.float32, device=residual.device)
        numels = tuple(numels or [len(residual)])
        boundaries = uniform_boundaries(sum(len(share.of(numel)) for numel in numels), ranks, residual.device)
        return cls(tuple(names), numels, residual, boundaries, zero, share=share)

    def sent_velocity(self) -> torch.Tensor:
        """``velocity``, which begins as zeros."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(self.residual)
        return self.velocity

    def pieces(self, flat: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The part of each parameter in ``flat``, or in the unpacked residual, as views."""
        whole = self.residual if flat is None else flat
        return dict(zip(self.names, whole.split([len(part) for part in self.elements.values()]), strict=True))

    def placed(self, parts: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
        """Parts of parameters, as ``pieces`` gives them, with where they belong; without those of no elements."""
        numels = dict(zip(self.names, self.numels, strict=True))
        return {name: Piece(part, self.elements[name].start, numels[name]) for name, part in parts.items() if len(part)}

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
        return self.packed.read(self.residual.new_empty(self.numel))

    @contextmanager
    def whole(self) -> Iterator[torch.Tensor]:
        """The residual in float32, to be changed between two exchanges."""
        if self.packed is not None:
            self.unpack(self.residual.new_empty(self.numel))
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

        Every rank adds it to its own residual, so that the sum of residuals over the ranks is what it was. Only one
        rank of each node has a share, and adds it for all of them. Where an average is not finite, the exchange has put
        back its own already.
        """
        with self.whole() as residual:
            back = torch.where(average.isfinite(), average, 0.0).mul_(factor * self.share.parts)
            residual.add_(back.to(residual.device))


def uniform_boundaries(numel: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """Boundaries of regions of equal size, ±1."""
    return torch.arange(ranks + 1, dtype=torch.int64, device=device) * numel // ranks


class BucketStates:
    """The states of all buckets with residuals of one model on one rank.

    unbucketed   residuals of parameters, or of parts of them, that are in no such bucket now
    velocities   velocities of those parameters
    flushing     residuals added to gradients whose average is not yet known to be finite
    scale        loss scale of the residuals, once ``rescale`` has been called
    loaded       description of the loaded checkpoint, line by line; must be the same on all ranks

    ``form``: how residuals are rounded between exchanges; None: not at all. ``nodes``: those of two-level buckets, if
    there may be some; ``share`` is then this rank's part of a parameter.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        form: BlockFormat | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._form = form
        self.rank = rank
        self.use_nodes(nodes)
        self.world_size = world_size
        self.device = device
        self.unbucketed: dict[str, Piece] = {}
        self.velocities: dict[str, Piece] = {}
        self.flushing: dict[str, Piece] = {}
        self.scale: float | None = None
        self.loaded = ["nothing"]
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._settings: dict[tuple[str, ...], Mapping[str, Any]] = {}  # loaded, of buckets that were not used yet
        self._settings_of: Nodes | None = None  # the nodes of the ranks that saved them
        self._step = 0  # the most steps of any former bucket: a new one continues the schedules

    def use_nodes(self, nodes: Nodes | None) -> None:
        """Two-level buckets are exchanged among these nodes; before the first one."""
        self._nodes = nodes
        self.share = WHOLE if nodes is None else Share.on(nodes, self.rank)

    def bucket(self, names: Sequence[str], numels: Sequence[int], share: Share = WHOLE) -> BucketState:
        """The state of the bucket of this share of these parameters, in this order; ``numels`` are their sizes.

        A new bucket takes the residuals of its parameters from the buckets that had them, where it has all their
        elements. All other residuals of those buckets become unbucketed. All ranks must ask for the same buckets in the
        same order.
        """
        key, sizes = tuple(names), tuple(numels)
        known = self._buckets.get(key)
        if known is not None and (known.numels, known.share) == (sizes, share):
            return known
        if known is not None and known.numels != sizes:
            raise ValueError(
                f"the parameters of bucket {key[0]} … have {known.numels} elements, and were given as {sizes}"
            )
        if len(set(key)) != len(key) or len(key) != len(sizes):
            raise ValueError(f"a bucket needs distinct parameter names with one size each: found {key} with {sizes}")
        self._dissolve(key)
        self._buckets[key] = self._new_bucket(key, sizes, share)
        return self._buckets[key]

    def keep_buckets_of(self, kept: Mapping[str, range]) -> None:
        """Only these elements are in buckets with residuals from now on; all others become unbucketed."""
        parts = [part for state in self._buckets.values() for part in state.elements.items()]
        self._dissolve({name for name, elements in parts if name not in kept or not within(elements, kept[name])})

    def begin_flush(self, name: str) -> torch.Tensor | None:
        """The unbucketed residual of a parameter, to be added to its gradient; None if it has none."""
        piece = self.unbucketed.pop(name, None)
        if piece is None:
            return None
        whole = piece.expanded()
        record_stream(piece.values)
        add_piece(self.flushing, name, piece)
        return whole

    def put_back(self, name: str, rest: torch.Tensor) -> None:
        """Return ``rest``, of the size of the parameter, to the unbucketed ones: it was not added to the gradient."""
        flushed = self.flushing[name]
        own = flushed.room_in(rest)  # elsewhere nothing was flushed
        self.flushing[name] = replace(flushed, values=flushed.values - own.to(flushed.values.device))
        self.unbucketed[name] = replace(flushed, values=own)

    def mark_sent(self, name: str, where: torch.Tensor) -> None:
        """Of a flushed residual these elements, of all of its parameter, were sent; ``end_flush`` keeps the others."""
        flushed = self.flushing[name]
        values = flushed.values.masked_fill(flushed.room_in(where).to(flushed.values.device), 0.0)
        self.flushing[name] = replace(flushed, values=values)

    def end_flush(self, sent: Collection[str]) -> None:
        """The flushed residuals of these parameters were sent; those of the others become residuals again."""
        flushed, self.flushing = self.flushing, {}
        kept = {name: piece for name, piece in flushed.items() if name not in sent}
        for state in self._buckets.values():
            fitting = [n for n in state.names if n in kept and within(kept[n].elements, state.elements[n])]
            if fitting:
                with state.whole() as residual:
                    parts = state.pieces()
                    for name in fitting:
                        piece = kept.pop(name)
                        values = piece.values.to(residual.device)
                        piece.room_in(parts[name], state.elements[name].start).add_(values)
                        record_stream(values)
        for name, piece in kept.items():
            add_piece(self.unbucketed, name, piece)

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
                for values in state.held.values():
                    values.mul_(scale / self.scale)
            for piece in (*self.unbucketed.values(), *self.flushing.values(), *self.all_velocities().values()):
                piece.values.mul_(scale / self.scale)
        self.scale = scale

    def buckets(self) -> list[BucketState]:
        """The buckets of the plan in force."""
        return list(self._buckets.values())

    def residuals(self) -> dict[str, Piece]:
        """The residual of each parameter, to be read only."""
        found = dict(self.unbucketed)
        for state in self._buckets.values():
            for name, piece in state.placed(state.pieces(state.current())).items():
                add_piece(found, name, piece)
        return found

    def all_velocities(self) -> dict[str, Piece]:
        """The velocity of each parameter that has one, as views."""
        found = dict(self.velocities)
        for state in self._buckets.values():
            if state.velocity is not None:
                found.update(state.placed(state.pieces(state.velocity)))
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
        residuals = self.residuals()
        held = [item for state in self._buckets.values() for item in state.placed(state.held).items()]
        for name, piece in (*self.flushing.items(), *held):
            add_piece(residuals, name, piece)
        pieces = {
            "residuals": {name: piece for name, piece in residuals.items() if piece.values.any()},
            "velocities": self.all_velocities(),
        }
        balanced = [state for state in self._buckets.values() if not state.fresh]
        saved: dict[str, Any] = {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": max([self._step, *(state.step for state in self._buckets.values())]),
            "scale": self.scale,
            "buckets": [_checkpoint_settings(state) for state in balanced],
            **{kind: {name: piece.values.clone() for name, piece in found.items()} for kind, found in pieces.items()},
        }
        slices = {kind: _slices(found) for kind, found in pieces.items()}
        if any(slices.values()):
            saved["slices"] = slices
        if self._nodes is not None and any(state.share != WHOLE for state in balanced):
            saved["nodes"] = [list(node) for node in self._nodes.ranks]
        return saved

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned: this rank's, or all ranks' (in any order) if the world size has changed.

        At the same world size, with the same nodes, everything continues bit by bit. At another world size old rank r's
        residuals are added to those of new rank r mod world size, further ranks start at zero, and regions are balanced
        again. The sum of the residuals over the ranks is conserved, up to float32 rounding where residuals are added.
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
                slices = state.get("slices", {}).get(kind, {})
                for name, piece in state.get(kind, {}).items():
                    own = piece.detach().to(torch.float32).flatten()  # stays on its own device until its bucket is used
                    add_piece(pieces, name, Piece(own.clone(), *slices.get(name, (0, len(own)))))
        self._step = states[0]["step"]
        self.scale = states[0].get("scale")
        if same:
            self._settings = {tuple(one["names"]): one for one in mine[0]["buckets"]}
            self._settings_of = None if states[0].get("nodes") is None else Nodes(states[0]["nodes"])
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
            for name, piece in state.placed(state.pieces(state.current())).items():
                add_piece(self.unbucketed, name, replace(piece, values=piece.values.clone()))
            if state.velocity is not None:
                self.velocities.update(state.placed(state.pieces(state.velocity)))
            record_stream(state.residual, *([] if state.packed is None else [state.packed.message]))

    def _new_bucket(self, names: tuple[str, ...], numels: tuple[int, ...], share: Share) -> BucketState:
        state = BucketState.of(torch.zeros(0, device=self.device), self.world_size // share.parts, names, numels, share)
        known = self._joined_pieces(self.unbucketed, state)
        state.step, state.velocity = self._step, self._joined_pieces(self.velocities, state)
        for name in names:  # velocities of other elements: the bucket's begin at zero again
            self.velocities.pop(name, None)
        settings = self._settings.pop(names, None)
        # Ranks of one place must have the same regions: with other nodes they would come from several places.
        same_nodes = share == WHOLE or self._settings_of == self._nodes
        if settings is not None and same_nodes and len(settings["boundaries"]) == len(state.boundaries):
            state.threshold_bias.fill_(settings["tilt"])
            state.boundaries.copy_(torch.tensor(settings["boundaries"], dtype=torch.int64))
            state.step = settings["step"]
            state.fresh = False
        if self._form is not None:
            state.packed = PackedResidual.zeros(state.numel, self._form, self.rank, self.device)
        if known is not None:
            state.residual = known
            if state.packed is not None:
                state.pack()
        elif state.packed is None:
            state.residual = torch.zeros(state.numel, dtype=torch.float32, device=self.device)
        return state

    def _joined_pieces(self, pieces: dict[str, Piece], state: BucketState) -> torch.Tensor | None:
        """Take the pieces of which a bucket has all elements, as one tensor, 0 where none is; None if none is."""
        for name, numel in zip(state.names, state.numels, strict=True):
            if name in pieces and (found := pieces[name].numel) != numel:
                raise ValueError(f"parameter {name} has {numel} elements, and its residual has {found}")
        taken = [name for name, own in state.elements.items() if name in pieces and within(pieces[name].elements, own)]
        if not taken:
            return None
        flat = torch.zeros(state.numel, dtype=torch.float32, device=self.device)
        parts = state.pieces(flat)
        for name in taken:
            piece = pieces.pop(name)
            piece.room_in(parts[name], state.elements[name].start).copy_(piece.values)
            record_stream(piece.values)
        return flat


def common_lines(state: Mapping[str, Any]) -> list[str]:
    """Describe, line by line, what the states of all ranks of one checkpoint have in common."""
    trained, scale, nodes = state.get("steps_trained"), state.get("scale"), state.get("nodes")
    head = f"step {state['step']} of {state['world_size']} ranks, {trained} steps trained, loss scale {scale}"
    lines = [head] if nodes is None else [head, f"nodes {nodes}"]
    for bucket in state["buckets"]:
        # Two-level buckets have other regions for each place in a node.
        regions = "" if _is_two_level(bucket, state["world_size"]) else f", regions {bucket['boundaries']}"
        lines.append(f"bucket to {bucket['names'][-1]}: step {bucket['step']}{regions}")
    return lines


def _is_two_level(saved: Mapping[str, Any], world_size: int) -> bool:
    """Whether a saved bucket has one region per node, and not one per rank."""
    return len(saved["boundaries"]) != world_size + 1


def _slices(pieces: Mapping[str, Piece]) -> dict[str, list[int]]:
    """Of each piece that has only some elements of its parameter: its first element, and the parameter's size."""
    return {name: [piece.low, piece.numel] for name, piece in pieces.items() if len(piece.values) < piece.numel}


def _checkpoint_settings(state: BucketState) -> dict[str, Any]:
    return {
        "names": list(state.names),
        "tilt": state.threshold_bias.item(),
        "boundaries": state.boundaries.tolist(),
        "step": state.step,
    }
