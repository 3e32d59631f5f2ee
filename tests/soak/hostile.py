"""Files that were damaged, and files that are being written when their writer is killed."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import anabranch as ab
from anabranch.tuning.cache_files import Entry, PlanCache
from parallel.twins import dtypes_of, scatter
from soak.journal import Journal
from soak.training import Training

SAVED = "saved-plan.json"
NOT_NUMBERS: tuple[Any, ...] = (None, "x", [], {}, -1, 1e400, float("nan"), 2**70, True)


def save_checkpoint(training: Training, folder: Path, rank: int, step: int) -> None:
    """This rank's part of a checkpoint, written aside and then renamed."""
    state = {
        "model": training.module.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "comm": training.model.comm_state_dict() if not training.control else {},
    }
    aside = folder / f"aside-{rank}"
    torch.save(state, aside)
    aside.rename(folder / f"checkpoint-{step}-{rank}")


def load_checkpoint(training: Training, folder: Path, rank: int) -> int:
    """Load the newest checkpoint that all ranks have; its number of steps, 0 if there is none."""
    import torch.distributed as dist

    steps = {int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")}
    whole = [step for step in steps if len(list(folder.glob(f"checkpoint-{step}-*"))) == dist.get_world_size()]
    if not whole:
        return 0
    state = torch.load(folder / f"checkpoint-{max(whole)}-{rank}", weights_only=True)
    training.module.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    if not training.control:
        training.model.load_comm_state_dict(state["comm"])
    return max(whole)


def save_through_torch(training: Training, folder: Path, rank: int, step: int) -> None:
    """A checkpoint of torch.distributed.checkpoint, whose metadata are written last; the optimizer's state aside."""
    torch.save(training.optimizer.state_dict(), folder / f"optimizer-{step}-{rank}")
    comm = {} if training.control else {"comm": ab.CommState(training.model)}
    save({"model": training.module.state_dict(), **comm}, checkpoint_id=folder / f"dcp-{step}")


def load_through_torch(training: Training, folder: Path, rank: int) -> int:
    """Load the newest of them that is whole; its number of steps, 0 if there is none."""
    step = max((int(path.parent.name.split("-")[1]) for path in folder.glob("dcp-*/.metadata")), default=0)
    if step:
        path = folder / f"dcp-{step}"
        model = training.module.state_dict()
        load({"model": model, "comm": ab.CommState(training.model, path)}, checkpoint_id=path)
        training.module.load_state_dict(model)
        training.optimizer.load_state_dict(torch.load(folder / f"optimizer-{step}-{rank}", weights_only=True))
    return step


def damaged_plan(folder: Path, chance: random.Random, rank: int) -> Path:
    """The path of a plan's file that rank 0 has cut, changed or filled with something else."""
    path = folder / "hostile-plan.json"
    if rank == 0:
        plan = scatter({f"{layer}.{kind}": "float32" for layer in range(4) for kind in ("weight", "bias")})
        ab.save(plan, path, force=True)
        path.write_bytes(damaged(path.read_bytes(), chance))
    return path


def damaged(text: bytes, chance: random.Random) -> bytes:
    """A file's bytes cut short, with a byte changed, or with a value of its JSON replaced."""
    way = chance.choice(["cut", "byte", "value", "value", "other"])
    if way == "cut":
        return text[: chance.randrange(len(text))]
    if way == "byte":
        at = chance.randrange(len(text))
        return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
    if way == "other":
        return chance.choice([b"", b"\0" * 100, b"[" * 100_000, b'{"format": "plan", "version": 1}', b"\x80\x04."])
    try:
        document = json.loads(text)
    except ValueError:  # it is not JSON
        return text[::-1]
    _change_somewhere(document, chance)
    return json.dumps(document).encode()


def damage_files(folder: Path, chance: random.Random) -> int:
    """Damage every file of a folder; how many there were."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        path.write_bytes(damaged(path.read_bytes() or b"{}", chance))
    return len(files)


def damaged_state(state: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A comm_state_dict() with one place of it missing or replaced."""
    copied: dict[str, Any] = _copied(state)
    _change_somewhere(copied, chance)
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _change_somewhere(document: Any, chance: random.Random) -> None:
    """Walk to a random place of nested dicts and lists, and drop it or put something else there."""
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    if not keys:
        return
    key = chance.choice(keys)
    value = document[key]
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        _change_somewhere(value, chance)
    elif chance.random() < 0.3:
        del document[key]
    elif isinstance(value, torch.Tensor):
        document[key] = chance.choice([value[:-1], value * float("nan"), value.double(), torch.zeros(3), "x", None])
    else:
        document[key] = chance.choice(NOT_NUMBERS)


def save_forever(training: Training, folder: Path) -> NoReturn:
    """Write one plan after the other into one file."""
    names = dtypes_of(training.module)
    seed = 0
    while True:
        ab.save(scatter(names, seed=seed), folder / SAVED, force=True)
        seed += 1


def kill_noted(journal: Journal) -> None:
    """Note the fault, then die."""
    journal.note("fault", step=0, stage="writing")
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A context in which this folder has no room for a cached plan: a page of memory, which needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "anabranch-soak", folder], check=True)
    try:
        (folder / "full").write_bytes(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def cache_problem(folder: Path) -> str:
    """Which file of a plan cache is not whole; empty if all are. What a killed writer had begun is left aside."""
    for path in PlanCache(folder).files():
        try:
            Entry.read(path)
        except Exception as error:
            return f"{path.name} is damaged: {error}"
    return ""


def saved_problem(folder: Path) -> str:
    """What is wrong with the file that was being written; empty if it is whole, or not there."""
    path = folder / SAVED
    if not path.exists():
        return ""
    try:
        ab.load(path)
    except Exception as error:
        return f"{path.name} is damaged: {error}"
    return ""
