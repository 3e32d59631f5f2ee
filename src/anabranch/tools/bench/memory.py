"""Measures the allocator's peak of each mode of training over a few steps on a GPU, to check the predicted peaks.

One rank is enough for DDP and naive sparse; the other modes need several, which may share the GPU in a lab.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils._pytree import tree_map_only

from anabranch.lean.activations.policy import Activations
from anabranch.lean.options import KEPT, OptimizerFactory
from anabranch.planning.memory import BUCKET_NBYTES, StepProfile, buckets_by_size
from anabranch.tools.bench import zoo
from anabranch.tools.bench.contestants import PLAN_WARMUP_STEPS
from anabranch.tools.bench.trainings import ON_ONE_RANK, TrainingSetup, training_of
from anabranch.tools.predict.memory.modes import DEFAULT_MODES, OUR_MODES
from anabranch.tools.predict.memory.probe import Loss, probe
from anabranch.values.kinds.names import DENSE, OKTOPK, kind_of
from anabranch.values.plan import Bucket, Plan

FIRST, STEPS = 2 * PLAN_WARMUP_STEPS, 3  # after FIRST steps the plan is used, and older memory is freed
# foreach is the default on a GPU; it must be given for tensors on the meta device.
OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}

Build = Callable[[torch.device], tuple[nn.Module, Loss]]


def zoo_build(name: str, batch: int) -> Build:
    """A function that builds a model of the zoo, and its loss at this batch, on a device."""
    return lambda device: zoo.model_and_loss(name, device, batch)


def under_autocast(build: Build) -> Build:
    """The same model, whose loss is computed under autocast to bfloat16, on a GPU."""

    def built(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = build(device)

        def in_half(wrapped: nn.Module) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                return loss(wrapped)

        return model, in_half

    return built


def in_bfloat16(build: Build) -> Build:
    """The same model with weights of bfloat16, so gradients and the optimizer's state, too; inputs are cast."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
        return tree_map_only(torch.Tensor, lowered, (args, kwargs))

    def lowered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor

    def built(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = build(device)
        model = model.bfloat16()
        model.register_forward_pre_hook(cast, with_kwargs=True)
        return model, loss

    return built


def compressed_plan(profile: StepProfile, mode: str, density: float, bucket_nbytes: int = BUCKET_NBYTES) -> Plan:
    """Buckets in the order of backward, of the size and kind that ``planning.memory`` assumes for this mode."""
    training = OUR_MODES[mode]
    buckets = buckets_by_size(profile, bucket_nbytes, training.compresses)
    kind = kind_of(density) if training.exchange == OKTOPK else training.exchange
    names = {bucket: tuple(profile.gradients[index].name for index in bucket.indices) for bucket in buckets}
    in_order = sorted(buckets, key=lambda bucket: bucket.last_index)
    return Plan(tuple(Bucket(names[bucket], 0, kind if bucket.compressed else DENSE) for bucket in in_order))


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
