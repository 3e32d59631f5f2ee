"""Release: close(), garbage collection and the end of the program leave no thread, group or hook behind."""

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from parallel.twins import (
    SCENARIOS,
    batch,
    different,
    mlp,
    plain_train,
    planned,
    ring,
    scattered,
    sgd,
)
from ranks import on_ranks


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "anabranch" in thread.name]


def wrap_again(rank: int) -> dict[str, Any]:
    model = planned()
    running = threads()
    module = model.module
    model.close()
    model.close()
    left = threads()
    with pytest.raises(RuntimeError, match="closed: wrap the module again"):
        model(batch(0))
    explained = model.explain()
    again = planned(module)
    reference = DistributedDataParallel(copy.deepcopy(module))
    for candidate in (again, reference):
        plain_train(candidate, sgd(candidate), 3)
    apart = different(reference, again, 0.0)
    again.close()
    plain = DistributedDataParallel(module)  # a closed model's hooks are gone: plain DDP can have the module
    plain_train(plain, sgd(plain), 4)
    plain_train(reference, sgd(reference), 4)
    apart += different(reference, plain, 0.0)
    return {"running": running, "left": left, "apart": apart, "explained": explained, "at the end": threads()}


def test_close_and_wrap_again() -> None:
    for answer in on_ranks(wrap_again, 2):
        assert any("anabranch-lane" in name for name in answer["running"])
        assert answer["left"] == answer["at the end"] == answer["apart"] == []
        assert "closed" in answer["explained"]


def descriptors_kept(rank: int) -> int:
    """How many descriptors a closed model holds that is still referenced."""
    dist.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    model = planned()
    model.close()
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())) - before


def test_a_closed_model_holds_no_connections() -> None:
    assert on_ranks(descriptors_kept, 2) == [0, 0]


def closed_on_the_way(rank: int) -> int:
    """close() in every stage, with messages on their way; what was wrapped trains on alone."""
    closed = 0
    for count in range(1, 14, 2):
        model = DataParallel(
            mlp(), planner=scattered, network=ring(), profile_steps=2, policy=SCENARIOS["keeps the plan"]
        )
        optimizer = sgd(model)
        for step in range(count):
            plain_train(model, optimizer, step)
        module = model.module
        model.close()
        module(batch(0)).sum().backward()
        closed += not threads()
    return closed


def test_close_in_every_stage() -> None:
    assert on_ranks(closed_on_the_way, 2) == [7, 7]


def dropped(rank: int) -> list[Any]:
    model: DataParallel | None = planned()
    gone = weakref.ref(model)
    assert threads()
    model = None
    gc.collect()
    return [gone() is None, threads()]


def test_a_dropped_model_releases_its_threads() -> None:
    assert on_ranks(dropped, 2) == [[True, []], [True, []]]


def not_closed(rank: int) -> bool:
    """The program ends with a plan in force and without close(); on_ranks sees whether it hangs or aborts."""
    global forgotten
    forgotten = planned()
    return forgotten.plan is not None


forgotten: DataParallel | None = None


def test_a_program_may_end_without_close() -> None:
    assert on_ranks(not_closed, 2) == [True, True]


def groups_destroyed_first(rank: int, folder: str) -> list[str]:
    """destroy_process_group() before close(), and a new default group in between."""
    model = planned()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=2)
    model.close()
    return threads()


def test_close_after_the_process_group_is_gone(tmp_path: Any) -> None:
    assert on_ranks(groups_destroyed_first, 2, str(tmp_path)) == [[], []]
