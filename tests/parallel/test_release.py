"""Release: close(), garbage collection and the end of the program leave no thread, group or hook behind."""

import atexit
import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from anabranch.values.errors import CollectiveError
from parallel.given_gradients import fresh, one_step, two_buckets
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
from ranks import cases_on_ranks, on_ranks, patience

Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario returns on each rank after which the ranks and their group are as before, in one launch."""
    scenarios = (wrap_again, descriptors_kept, closed_on_the_way, dropped, closed_memory)
    return cases_on_ranks({one.__name__: (one,) for one in scenarios}, 2)


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


def test_close_and_wrap_again(launched: Answers) -> None:
    for answer in launched["wrap_again"]:
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


def test_a_closed_model_holds_no_connections(launched: Answers) -> None:
    assert launched["descriptors_kept"] == [0, 0]


def left_by_the_other(rank: int) -> tuple[int, bool]:
    """The other rank leaves; this one fails in backward, and again in the next step. What is kept of the model then."""
    dist.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    model = planned()
    for kind in (RuntimeError, CollectiveError)[: 2 * (1 - rank)]:  # torch's, of a failed future; ours
        with pytest.raises(kind, match="did not get through"):
            model(batch(0)).sum().backward()
    wrapper = weakref.ref(model)
    model.close()
    del model
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())) - before, wrapper() is not None


def test_a_failed_step_keeps_no_connections() -> None:
    assert on_ranks(left_by_the_other, 2) == [(0, False), (0, False)]


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


def test_close_in_every_stage(launched: Answers) -> None:
    assert launched["closed_on_the_way"] == [7, 7]


def dropped(rank: int) -> list[Any]:
    model: DataParallel | None = planned()
    gone = weakref.ref(model)
    assert threads()
    model = None
    gc.collect()
    return [gone() is None, threads()]


def test_a_dropped_model_releases_its_threads(launched: Answers) -> None:
    assert launched["dropped"] == [[True, []], [True, []]]


def closed_memory(rank: int) -> list[list[str]]:
    """What close() frees of Ok-Topk's memory while the wrapper is still there; and what it does not."""
    model, parallel = fresh(two_buckets(0.1), momentum=0.9)
    for step in range(3):
        one_step(model, parallel, step, rank)
    collectives: Any = parallel._collectives
    exchanges, comms = collectives.residuals, list(collectives._families[0]._comms.values())
    memory = {f"residual of {state.names}": state.residual for state in exchanges.buckets()}
    memory |= {f"velocity of {state.names}": state.velocity for state in exchanges.buckets()}
    memory |= {f"zeros of {number}": comm._zeros for number, comm in enumerate(comms)}
    storages = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in memory.items()}
    del memory, exchanges, comms, collectives
    parallel.close()
    return [list(storages), [name for name, storage in storages.items() if not storage.expired()]]


def test_close_frees_residuals_while_the_wrapper_is_there(launched: Answers) -> None:
    for there, left in launched["closed_memory"]:
        assert len(there) == 3 and left == []


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


def forked_child(rank: int) -> list[int | None]:
    """A child that drops the model, as a DataLoader's worker may, and one that runs what programs run at their end."""
    model = planned()
    optimizer = sgd(model)
    codes = []
    for ending in (model.close, atexit._run_exitfuncs):
        codes.append(_exit_code_of_child(ending))
        plain_train(model, optimizer, 0)
    model.close()
    return codes


def _exit_code_of_child(ending: Callable[[], object]) -> int | None:
    child = os.fork()
    if child == 0:
        try:
            ending()
            gc.collect()
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20 * patience()
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_forked_child_ends_and_its_parent_goes_on() -> None:
    assert on_ranks(forked_child, 2) == [[0, 0], [0, 0]]


PROGRAM = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from parallel.twins import batch, mlp, planned

rank, folder = int(sys.argv[1]), sys.argv[2]
deadline = timedelta(seconds=300)
dist.init_process_group("gloo", init_method=f"file://{folder}/start", rank=rank, world_size=2, timeout=deadline)
model = planned()
if rank == 0:
    child = os.fork()
    if child == 0:
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threading.Thread(target=lambda: model(batch(0)).sum().backward(), daemon=True).start()
    time.sleep(0.5)
    open(f"{folder}/ends", "w").close()
else:
    time.sleep(300)
"""


@pytest.mark.campaign
def test_a_program_ends_while_a_thread_waits_for_another_rank(tmp_path: Path) -> None:
    """Not at the group's deadline; before, a forked child of this program ends, too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(60 * patience()) == 0
        assert (tmp_path / "ends").exists()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
