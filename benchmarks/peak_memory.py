"""Measures the allocator's peak of each mode of training over a few steps on a GPU, to check the predicted peaks.

One rank is enough for DDP and naive sparse; the other modes need several, which may share the GPU in a lab.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.trainings import ON_ONE_RANK, TrainingSetup, compressed_plan, training_of
from torch._C._distributed_c10d import HashStore

from anabranch.lean.options import KEPT, Activations, OptimizerFactory
from anabranch.tools.bench.contestants import PLAN_WARMUP_STEPS
from anabranch.tools.predict.memory.probe import Build, probe
from anabranch.tools.predict.memory.training_modes import DEFAULT_MODES, OUR_MODES

FIRST, STEPS = 2 * PLAN_WARMUP_STEPS, 3  # after FIRST steps the plan is used, and older memory is freed


def runnable_modes(modes: Sequence[str] = DEFAULT_MODES) -> list[str]:
    """Those of these modes that can run here: all where there are real ranks; one rank runs only some."""
    return [mode for mode in modes if dist.get_world_size() > 1 or mode in ON_ONE_RANK]


class Peak(NamedTuple):
    """Peaks of the allocator in bytes: of the first steps, and of the steps after them."""

    first: int
    steady: int


def peak(
    build: Build, mode: str, optimizer: OptimizerFactory, ranks: int, density: float, activations: Activations = KEPT
) -> Peak:
    """The peaks of a mode on this GPU; ``activations`` applies to Lean's modes.

    DDP rebuilds its buckets in the second step, while NCCL still holds those of the first. The peak of the first steps
    therefore contains the buckets twice.
    """
    plan = compressed_plan(probe(build), mode, density) if mode in OUR_MODES else None
    device = torch.device("cuda", torch.cuda.current_device())
    release_memory()
    drain()
    before = torch.cuda.memory_allocated()
    training = training_of(mode, activations)(TrainingSetup(*build(device), optimizer, ranks, density, plan))
    found = []
    try:
        for steps in (FIRST, STEPS):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                next(training)
            drain()
            found.append(int(torch.cuda.max_memory_allocated()) - before)
    finally:
        training.close()
    return Peak(*found)


def release_memory() -> None:
    """Release what earlier trainings have left in the caches of torch, cuBLAS and pinned memory."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def drain() -> None:
    """Wait until nothing of earlier steps is in memory, and empty torch's cache."""
    settle(0.3)
    torch.cuda.empty_cache()


def settle(pause_s: float) -> None:
    """Wait until all work is done and NCCL has released the last message, which it keeps until it sends another."""
    for _ in range(2):
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        sleep(pause_s)


@contextmanager
def world(backend: str = "nccl") -> Iterator[int]:
    """Join the ranks that torchrun or the lab started, or be a world of one rank; yields the number of ranks."""
    if dist.is_initialized():
        yield dist.get_world_size()
        return
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()
