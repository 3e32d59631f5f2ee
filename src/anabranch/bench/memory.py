"""The allocator's peak of every way to train, over a few steps on a GPU: what predictions are held against.

One rank is enough to see what a rank holds. Lean runs where there are real ranks, as does Ok-Topk itself.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from anabranch.activations.policy import Activations
from anabranch.bench import zoo
from anabranch.bench.contestants import PLANNED_AFTER
from anabranch.bench.trainings import Subject, training_of
from anabranch.estimate.account import BUCKET_NBYTES, LEAN, MODES
from anabranch.estimate.probe import Loss, probe
from anabranch.estimate.step_profile import buckets_by_size
from anabranch.lean.options import KEPT, OptimizerFactory
from anabranch.plan import Bucket, Plan
from anabranch.sparse.naming import kind_of

FIRST, STEPS = 2 * PLANNED_AFTER, 3  # a plan is in force, and nothing is left of what was before
# foreach is a GPU's default, and must be said where tensors have no device.
OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}

Build = Callable[[torch.device], tuple[nn.Module, Loss]]


def of_zoo(name: str, batch: int) -> Build:
    """What makes a model of the zoo, and its loss at a batch."""
    return lambda device: zoo.built(name, device, batch)


def sparse_plan(build: Build, density: float, bucket_nbytes: int = BUCKET_NBYTES) -> Plan:
    """Buckets in the order of backward, those of matrices sparse; of the size that ``account`` takes for granted."""
    profile = probe(build)
    buckets = sorted(buckets_by_size(profile, bucket_nbytes), key=lambda bucket: bucket.last_index)
    kinds = {True: kind_of(density), False: "dense"}
    return Plan(tuple(Bucket(tuple(profile.gradients[i].name for i in b.indices), 0, kinds[b.sparse]) for b in buckets))


def runnable() -> list[str]:
    """The modes that can run here: Lean where there are real ranks."""
    return [mode for mode in MODES if dist.get_world_size() > 1 or not mode.startswith(LEAN)]


class Peak(NamedTuple):
    """Of the allocator, in bytes: in the first steps, and in those after them."""

    first: int
    steady: int


def peak(
    build: Build, mode: str, optimizer: OptimizerFactory, ranks: int, density: float, activations: Activations = KEPT
) -> Peak:
    """What a mode needs on this GPU; ``activations`` as Lean's modes treat them.

    DDP lays its buckets out anew in its second step, when NCCL still has what it sent in the first: so for a moment it
    has its buckets twice. That is in the peak of the first steps.
    """
    plan = sparse_plan(build, density)
    device = torch.device("cuda", torch.cuda.current_device())
    tidy()
    _settle()
    before = torch.cuda.memory_allocated()
    training = training_of(mode, activations)(Subject(*build(device), optimizer, ranks, density, plan))
    found = []
    try:
        for steps in (FIRST, STEPS):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                next(training)
            _settle()
            found.append(int(torch.cuda.max_memory_allocated()) - before)
    finally:
        training.close()
    return Peak(*found)


def tidy() -> None:
    """Let go of what earlier trainings have left, so that the next one finds all memory free."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def _settle() -> None:
    """Until nothing is under way and NCCL holds no more than a word: it keeps what it sent until it sends again."""
    for _ in range(2):
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        sleep(0.3)
    torch.cuda.empty_cache()


@contextmanager
def world(backend: str = "nccl") -> Iterator[int]:
    """The ranks that torchrun or the lab started, or a world of one; yields their number."""
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
