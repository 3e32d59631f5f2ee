"""The state of a ``Replication`` as entries of a torch.distributed.checkpoint: DTensors, by node.

    anabranch/node1/residuals/layer.weight   the residual of that parameter in node 1, sharded as the parameter is
    anabranch/node1/shard0/numbers           the rest of the state of one rank: JSON, as bytes in a uint8 tensor
    anabranch/node1/shard0/padding/residuals what waits in the zeros at the end of its shards, one after another

Residuals are DTensors like their parameters, so that torch.distributed.checkpoint gives every rank its shard, however
many ranks a node has. If the number of nodes has changed, residuals are added up, and their sum over the nodes is
conserved. Padding belongs to no parameter, but int4 rounds blocks of values, and what is rounded in it counts for its
neighbours in the next step: as many nodes of as many ranks get it back, so that they go on bit by bit.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from anabranch.frameworks.distributed_checkpoint import TENSORS, packed, unpacked
from anabranch.fsdp.replicate import Replication


class ReplicationState(Stateful):
    """The state of a ``Replication`` for ``torch.distributed.checkpoint``; all ranks of all nodes save and load it.

        dcp.save({"model": ..., "comm": ab.ReplicationState(replication)}, checkpoint_id=path)
        dcp.load({"model": ..., "comm": ab.ReplicationState(replication, path)}, checkpoint_id=path)

    saved_at   only to load: the checkpoint's path, or its ``StorageReader``. Which entries to read depends on how many
               nodes wrote it
    name       the prefix of the keys, for checkpoints of several models
    """

    def __init__(
        self,
        replication: Replication,
        saved_at: str | os.PathLike[str] | StorageReader | None = None,
        name: str = "anabranch",
    ) -> None:
        self._replication = replication
        self._saved_at = saved_at
        self._name = name
        self._saved: _Saved | None = None  # by whom, once that was read

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
                for name in here.known:  # also frozen ones: what waits for them is kept
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

    def _wanted_entries(self, saved_at: str | os.PathLike[str] | StorageReader) -> dict[str, torch.Tensor]:
        reader = saved_at if isinstance(saved_at, StorageReader) else FileSystemReader(saved_at)
        saved = {
            key: entry
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        here = self._replication
        layout = self._saved = _Saved.found(saved, self._name)
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


class _Saved(NamedTuple):
    """Who has saved a checkpoint: how many nodes of how many ranks; and where in the user's dictionary."""

    prefix: str
    nodes: int
    shards: int

    @classmethod
    def found(cls, keys: Collection[str], name: str) -> "_Saved":
        """From the keys of a checkpoint."""
        pattern = re.compile(rf"^((?:.*\.)?{re.escape(name)})/node(\d+)/shard(\d+)/numbers$")
        found = [match for key in keys if (match := pattern.match(key)) is not None]
        if not found:
            raise ValueError(
                f"the checkpoint has no entry {name}/node…/shard…/numbers, but {sorted(keys)[:4]}: expected one that "
                f"ReplicationState(replication, name={name!r}) saved; load any other without it"
            )
        return cls(found[0][1], 1 + max(int(match[2]) for match in found), 1 + max(int(match[3]) for match in found))

    def is_like(self, here: Replication) -> bool:
        """Whether as many nodes of as many ranks are here."""
        return (self.nodes, self.shards) == (here.node_count, here.shard_count)

    def numbers_for(self, here: Replication) -> list[tuple[int, int]]:
        """Node and shard of the entries of numbers that this rank reads: its own, or one of each node."""
        return [(here.node, here.shard)] if self.is_like(here) else [(node, 0) for node in range(self.nodes)]

    def nodes_for(self, here: Replication) -> range:
        """The nodes whose residuals become this node's."""
        return range(here.node, self.nodes, here.node_count)
