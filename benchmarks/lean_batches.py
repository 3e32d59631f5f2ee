"""A model to train at a batch: its plan and its predicted peak, which need no GPU, and what a few steps of it show."""

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.peak_memory import drain, release_memory, settle
from benchmarks.trainings import compressed_plan
from torch import nn
from torch.utils._pytree import tree_map_only

import anabranch as ab
from anabranch.lean.activations.recompute import recompute
from anabranch.planning.footprint import Setting, StepProfile
from anabranch.tools.bench.zoo import SEQUENCES, build_at
from anabranch.tools.cli.user_function import load_function
from anabranch.tools.predict.memory.estimator import MAX_BATCH, largest_batch
from anabranch.tools.predict.memory.probe import Build, Loss, probe
from anabranch.tools.predict.memory.training_modes import DDP, OUR_MODES, modes_of, predict

ON_GPU = torch.cuda.is_available()  # a CPU is enough to try everything but the measured memory
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DENSITY = 0.01
FP32, BF16, PURE = PRECISIONS = ("fp32", "bf16", "pure-bf16")
MARGIN = 0.92  # of the limit: what predictions do not know, and what the allocator cannot use
ENOUGH_S = 4.0  # of timed steps, where the network is slow
WATCHED_S = 0.12  # NCCL's watchdog, which frees what was sent, looks every 0.1 s
WARM, WARM_CHOOSING = 2, 4  # steps; Lean chooses after two
EXPECTED = "a model of the zoo, or module:function, where function(batch, device) returns a model and its loss"


@cache
def build_of(name: str, precision: str) -> Callable[[int], Build]:
    """By batch, what makes a model of the zoo, or one of module:function."""
    if precision == PURE:
        made = build_of(name, FP32)
        return lambda batch: in_bfloat16(made(batch))
    if ":" not in name:
        return partial(build_at, name)
    function = load_function(name, EXPECTED)
    return lambda batch: lambda device: function(batch, device)


def in_bfloat16(build: Build) -> Build:
    """The same model with weights of bfloat16, and so gradients and the optimizer's state; inputs are cast."""

    def lowered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor

    def built(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = build(device)
        model = model.bfloat16()
        model.register_forward_pre_hook(
            lambda _, args, kwargs: tree_map_only(torch.Tensor, lowered, (args, kwargs)), with_kwargs=True
        )
        return model, loss

    return built


@cache
def weights_nbytes(name: str, precision: str) -> int:
    """Bytes of the model's parameters."""
    model, _ = build_of(name, precision)(1)(torch.device("meta"))
    return sum(parameter.nbytes for parameter in model.parameters())


@dataclass(frozen=True)
class Case:
    """A model to train at a batch.

    precision      one of ``PRECISIONS``: bf16 by autocast; pure: the weights, too
    ranks          of the world
    buckets        of Lean's plans: more need less memory
    steps          to time, at most
    budget_nbytes  for what Lean chooses
    """

    name: str
    batch: int
    precision: str
    ranks: int
    buckets: int
    steps: int
    budget_nbytes: int | None = None

    @property
    def speaks(self) -> bool:
        """Whether it is a language model."""
        return self.name in SEQUENCES

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all parameters."""
        return weights_nbytes(self.name, self.precision)

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        """As people train such a model."""
        if self.speaks:
            return partial(torch.optim.AdamW, lr=1e-4, fused=True)
        return partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)

    @property
    def optimizer_name(self) -> str:
        """For a reader."""
        return "AdamW" if self.speaks else "SGD with momentum"

    @property
    def casting(self) -> AbstractContextManager[object]:
        """For forward: bfloat16 by autocast; else images in TF32, as cuDNN does by itself."""
        return torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.precision == BF16)

    def model_and_loss(self) -> tuple[nn.Module, Loss]:
        """The model and its loss, which is computed in the precision of the case."""
        model, loss = build_of(self.name, self.precision)(self.batch)(DEVICE)

        def in_precision(wrapped: nn.Module) -> torch.Tensor:
            with self.casting:
                return loss(wrapped)

        return model, in_precision


Training = Callable[[Case], Generator[Any, None, None]]  # a step per ``next``


def plan_of(case: Case, mode: str) -> ab.Plan:
    """The buckets that Lean exchanges in a mode of the account, whatever it does with residuals."""
    mode = modes_of(OUR_MODES[mode].exchange)[0]
    return compressed_plan(_order(case.name, case.precision), mode, DENSITY, case.weights_nbytes // case.buckets)


@cache
def _order(name: str, precision: str) -> StepProfile:
    return probe(build_of(name, precision)(1))


@cache
def _profile(name: str, batch: int, precision: str, recomputed: bool) -> StepProfile:
    def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """One that needs as little beside its state as a fused one."""
        if name in SEQUENCES:
            return torch.optim.AdamW(parameters, foreach=False)
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False)

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = build_of(name, precision)(batch)(device)
        if recomputed:
            recompute(model)
        return model, loss

    return probe(build, optimizer, half=precision == BF16)


def predicted_nbytes(case: Case, mode: str, recomputed: bool) -> int:
    """The peak that ``anabranch memory`` predicts for a mode."""
    buckets = [bucket.names for bucket in plan_of(case, mode).buckets] if mode in OUR_MODES else None
    setting = Setting(ranks=case.ranks, density=DENSITY, buckets=buckets)
    return predict(_profile(case.name, case.batch, case.precision, recomputed), mode, setting).nbytes


def predicted_batch(case: Case, mode: str, recomputed: bool, limit_nbytes: int) -> int:
    """The batch whose predicted peak leaves a margin within the limit; 0 where none does.

    DDP lays its buckets out anew in its second step, while NCCL may still have the old ones: once more the gradients.
    """
    more_nbytes = case.weights_nbytes if mode == DDP else 0

    def nbytes_at(batch: int) -> int:
        return predicted_nbytes(replace(case, batch=batch), mode, recomputed) + more_nbytes

    first = 1 if case.speaks else 8
    return largest_batch(nbytes_at, int(MARGIN * limit_nbytes), first, MAX_BATCH)


class Shown(NamedTuple):
    """What a training has shown.

    first_nbytes       the allocator's peak over the first steps; 0 on a CPU
    peak_nbytes        that over the steps behind them
    seconds            of these steps
    chosen             within a budget: what Lean has chosen, and the peak that it has predicted for that
    """

    first_nbytes: int
    peak_nbytes: int
    seconds: list[float]
    chosen: str = ""
    predicted_nbytes: int | None = None


def timed(training: Training, case: Case) -> Shown:
    """Train for a few steps."""
    before_nbytes = _rested()
    running = training(case)
    seconds: list[float] = []
    try:
        for _ in range(WARM if case.budget_nbytes is None else WARM_CHOOSING):
            next(running)
        first_nbytes = _peak(before_nbytes)
        while len(seconds) < case.steps and (len(seconds) < 2 or sum(seconds) <= ENOUGH_S):
            barrier()
            begun = perf_counter()
            lean = next(running)
            if ON_GPU:
                torch.cuda.synchronize()
            slowest = torch.tensor([perf_counter() - begun], device=DEVICE)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds.append(float(slowest))
        peak_nbytes = _peak(before_nbytes)
        if case.budget_nbytes is None:
            return Shown(first_nbytes, peak_nbytes, seconds)
        chosen, agreed = lean.explain().splitlines()[-1], lean._activations.agreed
        return Shown(first_nbytes, peak_nbytes, seconds, chosen, agreed["peak_nbytes"])
    finally:
        running.close()


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(device_ids=[0] if ON_GPU else None)


def _peak(before_nbytes: int) -> int:
    """The allocator's peak until now, beyond what was there before; the next one begins now."""
    if not ON_GPU:
        return 0
    settle(WATCHED_S)
    nbytes = int(torch.cuda.max_memory_allocated()) - before_nbytes
    torch.cuda.reset_peak_memory_stats()
    return nbytes


def _rested() -> int:
    """Release what trainings before have left; returns what is still allocated."""
    if not ON_GPU:
        gc.collect()
        return 0
    release_memory()
    drain()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())
