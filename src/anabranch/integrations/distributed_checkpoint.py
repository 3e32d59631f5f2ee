"""What waits on every rank, as entries of a torch.distributed.checkpoint: tensors alone, under keys of their rank.

    anabranch/rank3/residuals/layer.weight  what waits there of that parameter
    anabranch/rank3/numbers                 the rest of ``comm_state_dict()``: JSON, as bytes in a uint8 tensor

There one key on two ranks is one entry, and the other rank's is dropped without a word: hence the rank in the key. What
is no tensor would be pickled there: hence the bytes.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader


class Model(Protocol):
    """A ``DataParallel``."""

    process_group: dist.ProcessGroup

    def comm_state_dict(self) -> dict[str, Any]:
        """What this rank must keep."""
        ...

    def load_comm_state_dict(self, *states: Any) -> None:
        """Take it over, from this rank or from all."""
        ...


TENSORS = ("residuals", "velocities")  # by parameter; all else is numbers and texts


class CommState(Stateful):
    """The communication state of a ``DataParallel`` for ``torch.distributed.checkpoint``.

        dcp.save({"model": ..., "comm": ab.CommState(model)}, checkpoint_id=path)
        dcp.load({"model": ..., "comm": ab.CommState(model, path)}, checkpoint_id=path)

    model: the DataParallel. saved_at: to load, where the checkpoint is, or its ``StorageReader``: what there is to read
    depends on how many ranks wrote it. name: what keys begin with, for checkpoints of several models.
    """

    def __init__(
        self, model: Model, saved_at: str | os.PathLike[str] | StorageReader | None = None, name: str = "anabranch"
    ) -> None:
        self._model, self._name, self._saved_at = model, name, saved_at

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What to save; with ``saved_at``, room for what is to be read: this rank's, or all if their number changed."""
        if self._saved_at is None:
            rank = dist.get_rank(self._model.process_group)
            return {f"{self._name}/rank{rank}/{key}": value for key, value in packed(self._model.comm_state_dict())}
        here = self._saved_at
        reader = here if isinstance(here, StorageReader) else FileSystemReader(here)
        saved = self._entries(reader.read_metadata())
        if not saved:
            raise ValueError(
                f"the checkpoint at {here} has no entry {self._name}/rank…: it was saved without CommState(model, "
                f"name={self._name!r}); leave it out here, too"
            )
        ranks = 1 + max(saved)
        same = ranks == dist.get_world_size(self._model.process_group)
        wanted = [dist.get_rank(self._model.process_group)] if same else sorted(saved)
        return {
            f"{self._name}/rank{rank}/{key}": torch.empty(entry.size, dtype=entry.properties.dtype)
            for rank in wanted
            for key, entry in saved.get(rank, {}).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Give the model what was read."""
        ranks: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state_dict.items():
            if (parts := self._parts(key)) is not None:
                ranks.setdefault(parts[0], {})[parts[1]] = value
        self._model.load_comm_state_dict(*(unpacked(ranks[rank]) for rank in sorted(ranks)))

    def _entries(self, metadata: Metadata) -> dict[int, dict[str, TensorStorageMetadata]]:
        """By rank, then by key."""
        found: dict[int, dict[str, TensorStorageMetadata]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if (parts := self._parts(key)) is not None and isinstance(entry, TensorStorageMetadata):
                found.setdefault(parts[0], {})[parts[1]] = entry
        return found

    def _parts(self, key: str) -> tuple[int, str] | None:
        """Rank and the rest of one of our keys, wherever the user's dictionary holds them; None if it is another's."""
        match = re.search(rf"(?:^|\.){re.escape(self._name)}/rank(\d+)/(.*)$", key)
        return (int(match[1]), match[2]) if match is not None else None


def packed(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's ``comm_state_dict()`` as tensors."""
    numbers = {name: value for name, value in state.items() if name not in TENSORS}
    yield "numbers", torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8).clone()
    for kind in TENSORS:
        for name, piece in state.get(kind, {}).items():
            yield f"{kind}/{name}", piece


def unpacked(entries: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same ``comm_state_dict()`` again."""
    numbers: dict[str, Any] = json.loads(entries["numbers"].cpu().numpy().tobytes())
    found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        if name:
            found[kind][name] = value
    return {**numbers, **found} if numbers else {}
