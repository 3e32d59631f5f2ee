"""The communication state of every rank as entries of a torch.distributed.checkpoint: tensors, by rank.

    anabranch/rank3/residuals/layer.weight  the residual of that parameter on rank 3
    anabranch/rank3/numbers                 the rest of ``comm_state_dict()``: JSON, as bytes in a uint8 tensor

torch.distributed.checkpoint takes one key on two ranks for one entry and silently drops one of them: hence the rank in
the key. It would pickle what is not a tensor: hence the bytes.
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
    """The part of a ``DataParallel`` that is used here."""

    process_group: dist.ProcessGroup

    def comm_state_dict(self) -> dict[str, Any]:
        """This rank's communication state."""
        ...

    def load_comm_state_dict(self, *states: Any) -> None:
        """Load the state of this rank, or those of all ranks."""
        ...


TENSORS = ("residuals", "velocities")  # by parameter; everything else is numbers and strings


class CommState(Stateful):
    """The communication state of a ``DataParallel`` for ``torch.distributed.checkpoint``.

        dcp.save({"model": ..., "comm": ab.CommState(model)}, checkpoint_id=path)
        dcp.load({"model": ..., "comm": ab.CommState(model, path)}, checkpoint_id=path)

    model      the DataParallel
    saved_at   only to load: the checkpoint's path, or its ``StorageReader``. Which entries to read depends on how many
               ranks wrote it
    name       the prefix of the keys, for checkpoints of several models
    """

    def __init__(
        self, model: Model, saved_at: str | os.PathLike[str] | StorageReader | None = None, name: str = "anabranch"
    ) -> None:
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
        reader = here if isinstance(here, StorageReader) else FileSystemReader(here)
        saved = self._entries(reader.read_metadata())
        if not saved:
            raise ValueError(
                f"the checkpoint at {here} has no entry {self._name}/rank…: it was saved without CommState(model, "
                f"name={self._name!r}); load it without one, too"
            )
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
        ranks: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state_dict.items():
            if (parts := self._parts(key)) is not None:
                ranks.setdefault(parts[0], {})[parts[1]] = value
        if not ranks:
            raise ValueError(
                f"CommState was given no entry {self._name}/rank…, but {sorted(state_dict)[:4]}: expected what its "
                f"state_dict() names; give the name= that the checkpoint was saved with"
            )
        states = [unpacked(ranks[rank], f"{self._name}/rank{rank}") for rank in sorted(ranks)]
        self._model.load_comm_state_dict(*states)

    def _entries(self, metadata: Metadata) -> dict[int, dict[str, TensorStorageMetadata]]:
        """The entries by rank, then by key."""
        found: dict[int, dict[str, TensorStorageMetadata]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if (parts := self._parts(key)) is not None and isinstance(entry, TensorStorageMetadata):
                found.setdefault(parts[0], {})[parts[1]] = entry
        return found

    def _parts(self, key: str) -> tuple[int, str] | None:
        """Rank and rest of a key of ours, at any depth of the user's dictionary; None for any other key."""
        match = re.search(rf"(?:^|\.){re.escape(self._name)}/rank(\d+)/(.*)$", key)
        return (int(match[1]), match[2]) if match is not None else None


def packed(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold a rank's ``comm_state_dict()``, by key."""
    numbers = {name: value for name, value in state.items() if name not in TENSORS}
    yield "numbers", torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8).clone()
    for kind in TENSORS:
        for name, piece in state.get(kind, {}).items():
            yield f"{kind}/{name}", piece


def unpacked(entries: Mapping[str, torch.Tensor], where: str = "") -> dict[str, Any]:
    """The ``comm_state_dict()`` that ``packed`` was given; ``where`` names its origin in errors."""
    if "numbers" not in entries:
        raise _refused(f"{where}/numbers", "missing", "one, written by CommState")
    numbers = _numbers(entries["numbers"], f"{where}/numbers")
    found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        if key == "numbers":
            continue
        if kind not in TENSORS or not name or not isinstance(value, torch.Tensor):
            raise _refused(f"{where}/{key}", type(value).__name__, f"tensors under {' and '.join(TENSORS)} only")
        if not numbers:
            raise _refused(f"{where}/{key}", "there", "nothing beside numbers that are empty")
        found[kind][name] = value
    return {**numbers, **found} if numbers else {}


def _numbers(content: Any, where: str) -> dict[str, Any]:
    """The dictionary in the entry of numbers and strings."""
    if not isinstance(content, torch.Tensor) or content.dtype != torch.uint8 or content.dim() != 1:
        shown = f"{content.dtype} {list(content.shape)}" if isinstance(content, torch.Tensor) else repr(content)[:80]
        raise _refused(where, shown, "a flat tensor of bytes")
    try:
        numbers = json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _refused(where, f"not JSON ({str(error)[:80]})", "a JSON object") from error
    if not isinstance(numbers, dict) or not numbers.keys().isdisjoint(TENSORS):
        raise _refused(where, repr(numbers)[:80], f"a JSON object without {' and '.join(TENSORS)}")
    return numbers


def _refused(entry: str, found: str, expected: str) -> ValueError:
    return ValueError(
        f"the entry {entry} of the checkpoint is {found}: expected {expected}; load a checkpoint that CommState saved"
    )
