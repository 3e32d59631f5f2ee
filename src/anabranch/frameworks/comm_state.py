"""Communication state in checkpoints: of torch.distributed.checkpoint, and as a file per rank in a folder.

``CommState``, the state of a DataParallel, as tensors by rank:

    anabranch/rank3/residuals/layer.weight  the residual of that parameter on rank 3
    anabranch/rank3/numbers                 the rest of ``comm_state_dict()``: JSON, as bytes in a uint8 tensor

torch.distributed.checkpoint silently drops one of two entries with one key: hence the rank in the key. It would pickle
what is not a tensor: hence the bytes.

``ReplicationState``, the state of a ``Replication``, as DTensors by node:

    anabranch/node1/residuals/layer.weight   the residual of that parameter in node 1, sharded as the parameter is
    anabranch/node1/shard0/numbers           the rest of the state of one rank
    anabranch/node1/shard0/padding/residuals residuals in the zeros at the end of its shards, one after another

Residuals are DTensors like their parameters, so that torch.distributed.checkpoint gives every rank its shard, however
many ranks a node has. If the number of nodes has changed, residuals are added up, and their sum over the nodes is
conserved. Padding belongs to no parameter, but int4 rounds blocks of values, and what is rounded in it counts for its
neighbours in the next step: as many nodes of as many ranks get it back, so that they go on bit by bit.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from anabranch.exchange.residuals.checkpoint import refused
from anabranch.values.errors import FileError
from anabranch.values.files import brief

if TYPE_CHECKING:
    from anabranch.fsdp.replicate import Replication
    from anabranch.tuning.tuned_model import Tuned

TENSORS = ("residuals", "velocities")  # by parameter; everything else is numbers and strings

REMEDY = "load a checkpoint that CommState saved"
AnyEntry = TypeVar("AnyEntry")
SavedAt = str | os.PathLike[str] | StorageReader
log = logging.getLogger("anabranch")


class CommState(Stateful):
    """The communication state of a ``DataParallel`` for ``torch.distributed.checkpoint``.

        dcp.save({"model": ..., "comm": ab.CommState(model)}, checkpoint_id=path)
        dcp.load({"model": ..., "comm": ab.CommState(model, path)}, checkpoint_id=path)

    model      the DataParallel
    saved_at   only to load: the checkpoint's path, or its ``StorageReader``. Which entries to read depends on how many
               ranks wrote it
    name       the prefix of the keys, for checkpoints of several models
    """

    def __init__(self, model: "Tuned", saved_at: SavedAt | None = None, name: str = "anabranch") -> None:
        self._model = model
        self._saved_at = saved_at
        self._name = name

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The entries to save; with ``saved_at``, empty entries to read into.

        Those are this rank's, or all ranks' if the world size has changed.
        """
        if self._saved_at is None:
            rank = dist.get_rank(self._model.process_group)
            return {f"{self._name}/rank{rank}/{key}": value for key, value in packed(self._model.comm_state_dict())}
        here = self._saved_at
        saved = self._by_rank(_saved_tensors(here), f"the checkpoint at {here}")
        ranks = 1 + max(saved)
        same = ranks == dist.get_world_size(self._model.process_group)
        wanted = [dist.get_rank(self._model.process_group)] if same else list(range(ranks))
        if missing := [rank for rank in wanted if rank not in saved]:
            raise ValueError(
                f"the checkpoint at {here} has no entry {self._name}/rank{missing[0]}/…: expected one of every rank "
                f"from 0 to {ranks - 1}; load a checkpoint that all ranks have saved"
            )
        return {
            f"{self._name}/rank{rank}/{key}": torch.empty(entry.size, dtype=entry.properties.dtype)
            for rank in wanted
            for key, entry in saved[rank].items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the entries that were read into the model."""
        ranks = self._by_rank(state_dict, "what CommState was given")
        states = [unpacked(ranks[rank], f"{self._name}/rank{rank}") for rank in sorted(ranks)]
        self._model.load_comm_state_dict(*states)

    def _by_rank(self, entries: Mapping[str, AnyEntry], what: str) -> dict[int, dict[str, AnyEntry]]:
        """Our entries, at any depth of the user's dictionary, by rank and by the rest of the key."""
        ranks: dict[int, dict[str, AnyEntry]] = {}
        for key, entry in entries.items():
            if (match := re.search(rf"(?:^|\.){re.escape(self._name)}/rank(\d+)/(.*)$", key)) is not None:
                ranks.setdefault(int(match[1]), {})[match[2]] = entry
        if not ranks:
            raise ValueError(
                f"{what} has no entry {self._name}/rank…, but {sorted(entries)[:4]}: expected what CommState(model, "
                f"name={self._name!r}) has saved; give the name= that it was saved with, or load it without CommState"
            )
        return ranks


class ReplicationState(Stateful):
    """The state of a ``Replication`` for ``torch.distributed.checkpoint``; all ranks of all nodes save and load it.

        dcp.save({"model": ..., "comm": ab.ReplicationState(replication)}, checkpoint_id=path)
        dcp.load({"model": ..., "comm": ab.ReplicationState(replication, path)}, checkpoint_id=path)

    saved_at   only to load: the checkpoint's path, or its ``StorageReader``. Which entries to read depends on how many
               nodes wrote it
    name       the prefix of the keys, for checkpoints of several models
    """

    def __init__(self, replication: "Replication", saved_at: SavedAt | None = None, name: str = "anabranch") -> None:
        self._replication = replication
        self._saved_at = saved_at
        self._name = name
        self._saved: _SavedLayout | None = None  # by whom, once that was read

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The entries to save; with ``saved_at``, empty entries to read into, which is collective."""
        if self._saved_at is None:
            return self._own_entries()
        # A rank that cannot read the checkpoint would leave the others waiting, in torch.distributed.checkpoint.
        with self._replication.together("reading the checkpoint"):
            return self._wanted_entries(self._saved_at)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the entries that were read."""
        here, saved = self._replication, self._saved
        if saved is None:
            raise ValueError("ReplicationState was made to save: give it saved_at=, the checkpoint's path, to load")
        states, found = [], set[str]()
        for node, shard in saved.numbers_for(here):
            entries = {"numbers": state_dict[f"{self._name}/node{node}/shard{shard}/numbers"]}
            for kind in TENSORS:
                padding = state_dict.get(f"{self._name}/node{node}/shard{shard}/padding/{kind}")
                for name in here.known:  # also frozen ones: their residuals are kept
                    if (read := state_dict.get(f"{self._name}/node{node}/{kind}/{name}")) is not None:
                        assert isinstance(read, DTensor)
                        shard_read = here.padded(name, read.to_local().flatten())
                        if padding is not None:
                            own, padding = padding.tensor_split([here.padding(name)])
                            shard_read[len(shard_read) - len(own) :] = own
                        entries[f"{kind}/{name}"] = shard_read
                        found.add(name)
            state = unpacked(entries, f"{self._name}/node{node}")
            # Regions and thresholds belong to shards of the old size.
            states.append(state if saved.is_like(here) or not state else {**state, "buckets": []})
        here.load_state_dict(*states)
        here.save_also(found)

    def _own_entries(self) -> dict[str, torch.Tensor]:
        here = self._replication
        state, prefix = here.state_dict(), f"{self._name}/node{here.node}"
        entries: dict[str, torch.Tensor] = {f"{prefix}/shard{here.shard}/numbers": dict(packed(state))["numbers"]}
        for kind in TENSORS:
            if not here.any_in_node(bool(state.get(kind))):
                continue
            tails = []
            for name, parameter in here.parameters.items():  # all of them: ranks must save the same entries
                piece = state.get(kind, {}).get(name)
                local = parameter.to_local()
                tails.append(torch.zeros(here.padding(name)) if piece is None else piece[local.numel() :])
                held = torch.zeros(local.numel()) if piece is None else piece[: local.numel()]
                entries[f"{prefix}/{kind}/{name}"] = DTensor.from_local(
                    held.to(local.device).view(local.shape),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            entries[f"{prefix}/shard{here.shard}/padding/{kind}"] = torch.cat([tail.cpu() for tail in tails])
        return entries

    def _wanted_entries(self, saved_at: SavedAt) -> dict[str, torch.Tensor]:
        saved, here = _saved_tensors(saved_at), self._replication
        layout = self._saved = _SavedLayout.found(saved, self._name)
        wanted: dict[str, torch.Tensor] = {}
        for node, shard in layout.numbers_for(here):
            numbers = saved[f"{layout.prefix}/node{node}/shard{shard}/numbers"]
            wanted[f"{self._name}/node{node}/shard{shard}/numbers"] = torch.empty(numbers.size, dtype=torch.uint8)
            for kind in TENSORS if layout.is_like(here) else ():
                if (entry := saved.get(f"{layout.prefix}/node{node}/shard{shard}/padding/{kind}")) is not None:
                    wanted[f"{self._name}/node{node}/shard{shard}/padding/{kind}"] = torch.empty(entry.size)
        for node in layout.nodes_for(here):
            for kind in TENSORS:
                for name, parameter in here.known.items():
                    if f"{layout.prefix}/node{node}/{kind}/{name}" in saved:
                        empty = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                        wanted[f"{self._name}/node{node}/{kind}/{name}"] = empty
        return wanted


class _SavedLayout(NamedTuple):
    """How many nodes of how many ranks have saved a checkpoint, and under which prefix of the user's dictionary."""

    prefix: str
    nodes: int
    shards: int

    @classmethod
    def found(cls, keys: Collection[str], name: str) -> "_SavedLayout":
        """From the keys of a checkpoint."""
        pattern = re.compile(rf"^((?:.*\.)?{re.escape(name)})/node(\d+)/shard(\d+)/numbers$")
        found = [match for key in keys if (match := pattern.match(key)) is not None]
        if not found:
            raise ValueError(
                f"the checkpoint has no entry {name}/node…/shard…/numbers, but {sorted(keys)[:4]}: expected one that "
                f"ReplicationState(replication, name={name!r}) saved; load any other without it"
            )
        return cls(found[0][1], 1 + max(int(match[2]) for match in found), 1 + max(int(match[3]) for match in found))

    def is_like(self, here: "Replication") -> bool:
        """Whether as many nodes of as many ranks are here."""
        return (self.nodes, self.shards) == (here.node_count, here.shard_count)

    def numbers_for(self, here: "Replication") -> list[tuple[int, int]]:
        """Node and shard of the entries of numbers that this rank reads: its own, or one of each node."""
        return [(here.node, here.shard)] if self.is_like(here) else [(node, 0) for node in range(self.nodes)]

    def nodes_for(self, here: "Replication") -> range:
        """The nodes whose residuals become this node's."""
        return range(here.node, self.nodes, here.node_count)


def _saved_tensors(saved_at: SavedAt) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by key, without their values."""
    reader = saved_at if isinstance(saved_at, StorageReader) else FileSystemReader(saved_at)
    entries = reader.read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def packed(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold a rank's ``comm_state_dict()``, by key."""
    numbers = {name: value for name, value in state.items() if name not in TENSORS}
    yield "numbers", torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8).clone()
    for kind in TENSORS:
        for name, piece in state.get(kind, {}).items():
            yield f"{kind}/{name}", piece


def unpacked(entries: Mapping[str, torch.Tensor], where: str = "") -> dict[str, Any]:
    """The ``comm_state_dict()`` that ``packed`` was given; ``where`` names its origin in errors."""
    content = entries.get("numbers")
    numbers = _numbers(content)
    if numbers is None or not numbers.keys().isdisjoint(TENSORS):
        raise refused(f"{where}/numbers", content, f"a JSON object without {' and '.join(TENSORS)}, as bytes", REMEDY)
    found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        if numbers and kind in found and name and isinstance(value, torch.Tensor):
            found[kind][name] = value
        elif key != "numbers":
            raise refused(f"{where}/{key}", value, f"tensors of {' and '.join(TENSORS)}, and numbers", REMEDY)
    return {**numbers, **found} if numbers else {}


def _numbers(content: Any) -> dict[str, Any] | None:
    """The dictionary in the entry of numbers and strings; None if it is none."""
    try:
        numbers = json.loads(bytes(content.tolist()))
    except (AttributeError, TypeError, ValueError, RecursionError):
        return None
    return numbers if isinstance(numbers, dict) else None


def save_rank_file(model: "Tuned", folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Write this rank's communication state; call it on every rank. ``name`` tells several models apart."""
    path = _rank_path(folder, name, dist.get_rank(model.process_group))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # a crash leaves no half of a file under the name that is loaded
    torch.save(model.comm_state_dict(), unfinished)
    unfinished.replace(path)


def load_rank_files(model: "Tuned", folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Load this rank's state, or all ranks' if their number has changed; call it on every rank.

    A checkpoint without files of ours, such as one of a training with DistributedDataParallel, has nothing to load.
    """
    own, first = (_rank_path(folder, name, rank) for rank in (dist.get_rank(model.process_group), 0))
    if not own.is_file() and not first.is_file():
        if model.comm_state_dict():
            log.warning("anabranch: %s has no file %s: training goes on without residuals", folder, own.name)
        return
    # Rank 0's file says how many count: others may be older, of more ranks. Nodes may not share the folder.
    state = _read_rank_file(first if first.is_file() else own)
    if state and state["world_size"] != dist.get_world_size(model.process_group):
        model.load_comm_state_dict(
            *(_read_rank_file(_rank_path(folder, name, rank)) for rank in range(state["world_size"]))
        )
    elif state:
        model.load_comm_state_dict(_read_rank_file(own))


def _rank_path(folder: str | os.PathLike[str], name: str, rank: int) -> Path:
    return Path(folder) / f"{name}_rank{rank}.pt"


def _read_rank_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"{path} is missing: expected one of every rank; load a checkpoint that all ranks have saved")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or (content and not isinstance(content.get("world_size"), int)):
        raise FileError(f"{path} holds {brief(content)}: expected what comm_state_dict() returned on a rank")
    return content
