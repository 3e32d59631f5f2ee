"""Training on an emulated network: DDP, DataParallel, and whole programs that know nothing of it."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from anabranch.observe.measure import measure
from anabranch.tools.lab.emulation.settings import EmulatedNetwork, environment
from parallel.twins import SCENARIOS, different, plain_train, scattered, sgd, steps
from ranks import on_ranks, patience
from tools.lab.emulation.emulated_groups import emulated, real

FAST = EmulatedNetwork(3, 1e12, 0.0)


class Normed(nn.Sequential):
    """With buffers, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))


def ddp_twins(rank: int, hook: bool) -> list[str]:
    torch.manual_seed(rank)
    module, twin = Normed(), Normed()
    twin.load_state_dict(module.state_dict())
    models = [DistributedDataParallel(module, process_group=real())]
    models.append(DistributedDataParallel(twin, process_group=emulated(FAST), find_unused_parameters=not hook))
    apart: list[str] = []
    for model in models:
        if hook:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            plain_train(model, optimizer, step)
        apart += different(models[0], models[1], 0.0)
    return apart


@pytest.mark.parametrize("hook", [False, True], ids=["DDP's own", "fp16 hook"])
def test_ddp_trains_as_on_a_real_network(hook: bool) -> None:
    assert on_ranks(ddp_twins, 2, hook) == [[], []]


def compiled(rank: int) -> list[str]:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(6, 6), process_group=emulated(FAST))
    faster: Any = torch.compile(model, backend="eager")
    for step in range(3):
        plain_train(faster, sgd(model), step)
    return [repr(parameter.tolist()) for parameter in model.parameters()]


@pytest.mark.slow
def test_a_compiled_ddp_trains() -> None:
    first, second = on_ranks(compiled, 2)
    assert first == second


def whole_course(rank: int) -> dict[str, Any]:
    group = emulated(FAST)
    torch.manual_seed(7)
    theirs = DistributedDataParallel(Normed(), process_group=real())
    torch.manual_seed(7)
    ours = DataParallel(
        Normed(), process_group=group, planner=scattered, profile_steps=2, policy=SCENARIOS["keeps the plan"]
    )
    before = ours.explain()
    optimizers = [sgd(model) for model in (theirs, ours)]
    apart: list[str] = []
    for step in steps(ours):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        apart += different(theirs, ours, 0.0)
    answer = {"apart": apart, "before": before, "after": ours.explain(), "planned": ours.plan is not None}
    ours.close()
    return answer


def test_data_parallel_takes_its_whole_course_and_says_what_it_ran_on() -> None:
    note = "emulated: 3 hosts, 1000 Gbit/s, 0 µs (delays, not a real network)"
    for answer in on_ranks(whole_course, 2):
        assert answer["apart"] == [] and answer["planned"]
        assert f"Network ({note}): not measured." in answer["before"]
        assert "running" in answer["after"].splitlines()[0]
        assert f"Network ({note}): 2 ranks" in answer["after"]


def measured(rank: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the machine may be busy
        network = measure([emulated(FAST)], torch.device("cpu"), largest_nbytes=1 << 12, budget_s=0.05)
    return [str(network.meta["emulated"])]


def test_a_measured_network_says_that_it_was_emulated() -> None:
    for (note,) in on_ranks(measured, 2):
        assert note.startswith("emulated: 3 hosts")


# -------------------------------------------------------------------------------------------------- whole programs

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
folder, rank, dies = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "dies"
def meet(name):
    dist.init_process_group("gloo", f"file://{folder}/{name}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
meet("first")
model = DistributedDataParallel(torch.nn.Linear(1000, 100))
model(torch.ones(4, 1000)).sum().backward()
begun = time.monotonic()
for step in range(3):
    if step == 1 and rank == 1 and dies:
        os.kill(os.getpid(), 9)
    model(torch.ones(4, 1000)).sum().backward()
print(type(dist.group.WORLD).__name__, time.monotonic() - begun)
dist.barrier()
del model
dist.destroy_process_group()
meet("second")
dist.all_reduce(torch.ones(1 << 21), async_op=True).get_future()
"""


def program(folder: Path, fault: str, variables: dict[str, str]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each of two ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(rank), fault],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=100 * patience()) for process in ranks]
        return [(process.returncode, *text) for process, text in zip(ranks, texts, strict=True)]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.campaign
def test_a_program_that_knows_nothing_of_it_is_emulated_and_ends_with_works_under_way(tmp_path: Path) -> None:
    """It trains, leaves its group, and ends while an all-reduce of another group has 3 s to go."""
    rate_bit_s = 20e6
    for status, out, err in program(tmp_path, "none", environment([rate_bit_s] * 2, 1e-3)):
        assert status == 0, err
        kind, took_s = out.split()
        assert kind == "EmulatedProcessGroup"
        assert float(took_s) >= 3 * (2e-3 + 100_100 * 4 * 8 / rate_bit_s)


@pytest.mark.campaign
def test_a_dead_rank_is_an_error_and_no_hang(tmp_path: Path) -> None:
    (status, _, err), (died, _, _) = program(tmp_path, "dies", environment([1e9] * 2, 1e-3))
    assert died == -signal.SIGKILL
    assert status == 1 and "RuntimeError" in err and "onnection" in err
