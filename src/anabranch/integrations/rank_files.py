"""The communication state of every rank as files in the folder of a checkpoint, one per rank.

    anabranch_rank3.pt   {"ranks": 8, "state": what ``comm_state_dict()`` returned on rank 3}
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabranch.errors import FileError
from anabranch.files import brief
from anabranch.integrations.distributed_checkpoint import Model

log = logging.getLogger("anabranch")


def save_rank_file(model: Model, folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Write this rank's communication state; call it on every rank. ``name`` tells several models apart."""
    path = _path(folder, name, dist.get_rank(model.process_group))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # a crash leaves no half of a file under the name that is loaded
    torch.save({"ranks": dist.get_world_size(model.process_group), "state": model.comm_state_dict()}, unfinished)
    unfinished.replace(path)


def load_rank_files(model: Model, folder: str | os.PathLike[str], name: str = "anabranch") -> None:
    """Load this rank's state, or all ranks' if their number has changed; call it on every rank.

    A checkpoint without files of ours, such as one of a training with DistributedDataParallel, has nothing to load.
    """
    rank, ranks = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    nearest = [path for path in (_path(folder, name, rank), _path(folder, name, 0)) if path.is_file()]
    if not nearest:
        if model.comm_state_dict():
            log.warning("anabranch: %s has no file %s_rank….pt: training goes on without residuals", folder, name)
        return
    saved_by = _read(nearest[0])["ranks"]
    wanted = [rank] if saved_by == ranks else range(saved_by)
    states = [_read(_path(folder, name, number))["state"] for number in wanted]
    if any(states):
        model.load_comm_state_dict(*states)


def _path(folder: str | os.PathLike[str], name: str, rank: int) -> Path:
    return Path(folder) / f"{name}_rank{rank}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"{path} is missing: expected one of every rank; load a checkpoint that all ranks have saved")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.keys() != {"ranks", "state"}:
        raise FileError(f"{path} holds {brief(content)}: expected the state of a rank that anabranch has saved")
    return content
