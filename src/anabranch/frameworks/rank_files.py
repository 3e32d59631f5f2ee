"""The communication state of every rank in the folder of a checkpoint: a file per rank, such as anabranch_rank3.pt."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabranch.frameworks.distributed_checkpoint import Model
from anabranch.values.errors import FileError
from anabranch.values.files import brief

log = logging.getLogger("anabranch")


def save_rank_file(model: Model, folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Write this rank's communication state; call it on every rank. ``name`` tells several models apart."""
    path = _path(folder, name, dist.get_rank(model.process_group))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # a crash leaves no half of a file under the name that is loaded
    torch.save(model.comm_state_dict(), unfinished)
    unfinished.replace(path)


def load_rank_files(model: Model, folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Load this rank's state, or all ranks' if their number has changed; call it on every rank.

    A checkpoint without files of ours, such as one of a training with DistributedDataParallel, has nothing to load.
    """
    own, first = (_path(folder, name, rank) for rank in (dist.get_rank(model.process_group), 0))
    if not own.is_file() and not first.is_file():
        if model.comm_state_dict():
            log.warning("anabranch: %s has no file %s: training goes on without residuals", folder, own.name)
        return
    # Rank 0's file says how many count: others may be older, of more ranks. Nodes may not share the folder.
    state = _read(first if first.is_file() else own)
    if state and state["world_size"] != dist.get_world_size(model.process_group):
        model.load_comm_state_dict(*(_read(_path(folder, name, rank)) for rank in range(state["world_size"])))
    elif state:
        model.load_comm_state_dict(_read(own))


def _path(folder: str | os.PathLike[str], name: str, rank: int) -> Path:
    return Path(folder) / f"{name}_rank{rank}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"{path} is missing: expected one of every rank; load a checkpoint that all ranks have saved")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or (content and not isinstance(content.get("world_size"), int)):
        raise FileError(f"{path} holds {brief(content)}: expected what comm_state_dict() returned on a rank")
    return content
