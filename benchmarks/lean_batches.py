"""A model to train within a limit of memory: its peak, its steps' seconds, and the largest batch that fits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anabranch.bench.memory import release_memory
from anabranch.bench.zoo import SEQUENCES as SEQUENCE_MODELS
from anabranch.bench.zoo import model_and_loss
from anabranch.estimate.largest_batch import MAX_BATCH, largest_batch
from anabranch.estimate.probe import Loss

DEVICE = torch.device("cuda", 0)
MARGIN = 0.92  # of the limit: what the line through two peaks does not say, and what the allocator cannot use
GROWTH = 4  # from one batch to the next at most: peaks need not grow from the start
CLOSE = 0.95  # of that is enough
ENOUGH_S = 6.0  # of timed steps, where the network is slow
WARM, WARM_MIX, TIMED = 2, 4, 3  # steps; Lean chooses its mix after two
IMAGES, SEQUENCES = 8, 1  # samples to begin with
BUCKETS = 12  # few, as sparse exchanges like it

Step = Callable[[], None]


@cache
def _sizes(name: str) -> tuple[int, ...]:
    return tuple(parameter.nbytes for parameter in model_and_loss(name, torch.device("meta"), 1)[0].parameters())


@dataclass(frozen=True)
class Case:
    """A model to train at a batch, on the ranks of a group, within a limit; ``half``: in bfloat16, by autocast."""

    name: str
    batch: int
    group: dist.ProcessGroup
    limit_nbytes: int
    host_nbytes: int
    half: bool
    dense: bool = False  # by DDP
    budget_nbytes: int | None = None  # for a mix of what is done with activations, or for all that Lean chooses
    buckets: int = BUCKETS
    steps: int = TIMED

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its parameters."""
        return _sizes(self.name)

    @property
    def speaks(self) -> bool:
        """Whether it is a language model."""
        return self.name in SEQUENCE_MODELS

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        """As people train such a model."""
        if self.speaks:
            return partial(torch.optim.AdamW, lr=1e-4, fused=True)
        return partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)

    @property
    def precision(self) -> AbstractContextManager[object]:
        """bfloat16 by autocast; else images in TF32, as cuDNN does by itself."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.half)

    def model_and_loss(self) -> tuple[nn.Module, Loss]:
        """The model and its loss."""
        return model_and_loss(self.name, DEVICE, self.batch)


System = Callable[[Case], tuple[Step, Callable[[], None]]]


def largest(make: System, case: Case, plain: System | None = None) -> int:
    """The batch of a system that fills the limit, the same on every rank; 0 where none fits.

    ``plain`` is the same without reuse, for a system that puts all that is saved into host memory.
    """
    first = SEQUENCES if case.speaks else IMAGES
    most = MAX_BATCH if plain is None else int(case.host_nbytes / kept_nbytes(plain, replace(case, batch=first)))
    limit_nbytes = MARGIN * case.limit_nbytes
    return largest_batch(
        lambda batch: fitting(make, replace(case, batch=batch)) or 2 * case.limit_nbytes,
        int(limit_nbytes),
        first,
        most,
        CLOSE * limit_nbytes,
        GROWTH,
    )


def fitting(make: System, case: Case) -> int:
    """What each rank needs, found on each alone, the most of them; 0 if some rank had not enough.

    DDP lays its buckets out anew while NCCL still has the old ones, so there is one gradient more for a moment, which
    is seen by chance where nothing is sent. So its later steps are looked at, and that is added.
    """
    twice = sum(case.sizes) if case.dense else 0
    try:
        peak_nbytes = later_peak(make, case) + twice
    except torch.OutOfMemoryError as error:
        print(f"rank {dist.get_rank()}, batch {case.batch}: {str(error)[:400]}", file=sys.stderr, flush=True)
        peak_nbytes = 2 * case.limit_nbytes
    agreed = torch.tensor([peak_nbytes], device=DEVICE)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return int(agreed) if agreed <= case.limit_nbytes else 0


def kept_nbytes(plain: System, case: Case) -> float:
    """What a sample leaves on the device where nothing is reused; all of the limit, where two do not fit."""
    one, two = (fitting(plain, replace(case, batch=number * case.batch)) for number in (1, 2))
    return max((two - one) / case.batch, 1.0) if two else float(case.limit_nbytes)


@contextmanager
def warm(make: System, case: Case) -> Iterator[Step]:
    """A training that has made its first steps."""
    release_memory()
    step, close = make(case)
    try:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM if case.budget_nbytes is None else WARM_MIX):
            step()
        torch.cuda.synchronize()
        yield step
    finally:
        close()


def later_peak(make: System, case: Case) -> int:
    """The allocator's peak of a step after the first ones."""
    with warm(make, case) as step:
        torch.cuda.reset_peak_memory_stats()
        step()
        return int(torch.cuda.max_memory_allocated())


def timed(make: System, case: Case) -> tuple[int, list[float]]:
    """The allocator's peak of all steps, and the seconds of those after the first ones."""
    seconds: list[float] = []
    with warm(make, case) as step:
        while len(seconds) < case.steps and (len(seconds) < 2 or sum(seconds) <= ENOUGH_S):
            dist.barrier(device_ids=[0])
            begun = perf_counter()
            step()
            torch.cuda.synchronize()
            slowest = torch.tensor([perf_counter() - begun], device=DEVICE)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds.append(float(slowest))
        return int(torch.cuda.max_memory_allocated()), seconds
