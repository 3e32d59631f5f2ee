"""The ways to train whose memory is measured: each is a generator of steps.

On one rank ``Mirror`` is a world of ranks that all send what this one sends, so that messages have the sizes of that
world.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from anabranch.activations.policy import Activations
from anabranch.bench.baselines import top_count, top_pairs
from anabranch.comm.communicator import Communicator, ZeroBuffer
from anabranch.ddp.reducer import unwrap
from anabranch.estimate.account import DDP, LEAN, LEAN_HOST, NAIVE, OKTOPK
from anabranch.estimate.probe import Loss
from anabranch.lean.options import KEPT, Lean, OptimizerFactory, ResidualPlacement
from anabranch.parallel import DataParallel
from anabranch.plan import Plan
from anabranch.sparse.oktopk import fixed_size_version
from anabranch.sparse.options import OkTopk
from anabranch.sparse.select import add_pairs
from anabranch.sparse.state import BucketState


class Subject(NamedTuple):
    """What is trained, and how it travels: as ``plan`` says where a training has one, on all ranks or on a group's."""

    model: nn.Module
    loss: Loss
    optimizer: OptimizerFactory
    ranks: int
    density: float
    plan: Plan | None = None
    group: dist.ProcessGroup | None = None


Training = Callable[[Subject], Generator[None, None, None]]


class _Done:
    def wait(self) -> bool:
        return True


class Mirror(ZeroBuffer):
    """A ``Communicator`` of ``size`` ranks that all offer what this one does. Messages have their size; none leaves."""

    rank = 0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor, phase: str, *_: Any) -> Any:  # noqa: ARG002
        """What every rank sends to the first."""
        output.view(self.size, -1).copy_(given.view(self.size, -1)[:1].expand(self.size, -1))
        return _Done()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> Any:  # noqa: ARG002
        """This rank's part; those of the others are zeros: places in this rank's region need not be in theirs."""
        output.zero_().view(self.size, -1)[0].copy_(part.view(-1))
        return _Done()

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: Any = None) -> Any:  # noqa: ARG002
        """A sum."""
        tensor.mul_(self.size)
        return _Done()


def ddp(subject: Subject) -> Generator[None, None, None]:
    """Stock DDP, gradients being views of its buckets."""
    wrapped = DistributedDataParallel(subject.model, gradient_as_bucket_view=True, process_group=subject.group)
    try:
        yield from _steps(wrapped, subject)
    finally:
        unwrap(wrapped)


def naive(subject: Subject) -> Generator[None, None, None]:
    """Top-k of the whole model after backward, as the published codes do it: every object beside every other."""
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    optimizer = subject.optimizer(parameters)
    numel = sum(parameter.numel() for parameter in parameters)
    residual = torch.zeros(numel, device=parameters[0].device)
    while True:
        optimizer.zero_grad(set_to_none=True)
        subject.loss(subject.model).backward()
        naive_exchange(parameters, residual, subject.ranks, top_count(numel, subject.density), subject.group)
        optimizer.step()
        yield


def naive_exchange(
    parameters: Sequence[nn.Parameter],
    residual: torch.Tensor,
    ranks: int,
    k: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Add what waits to a flat copy, send its k largest, keep the rest, and give back the average of all that came.

    Where the group has not so many ranks, all are taken to send what this one does.
    """
    total = torch.cat([cast(torch.Tensor, parameter.grad).flatten() for parameter in parameters]).add_(residual)
    pairs = top_pairs(total, k)
    residual.copy_(total)
    residual[pairs[:, 1].to(torch.int64)] = 0.0
    everyone = torch.empty(ranks, k, 2, dtype=torch.int32, device=residual.device)
    if dist.is_initialized() and ranks == dist.get_world_size(group):
        dist.all_gather_into_tensor(everyone, pairs[None], group=group)
    else:
        everyone.copy_(pairs)
    update = torch.zeros_like(residual)
    add_pairs(update, everyone, in_order=False)
    update.div_(ranks)
    for parameter, piece in zip(parameters, update.split([p.numel() for p in parameters]), strict=True):
        cast(torch.Tensor, parameter.grad).copy_(piece.view_as(parameter))


def oktopk(subject: Subject) -> Generator[None, None, None]:
    """DataParallel with Ok-Topk; on one rank the same exchange, in a mirror of ranks."""
    if dist.get_world_size(subject.group) == 1:
        yield from _mirrored(subject)
        return
    wrapped = _sparse(subject, gradient_as_bucket_view=True)
    try:
        yield from _steps(wrapped, subject)
    finally:
        wrapped.close()


def _mirrored(subject: Subject) -> Generator[None, None, None]:
    """DDP whose buckets travel by Ok-Topk's exchange of fixed-size messages, with no other rank.

    Not in the first step: then everything is in one bucket, which DDP parts before the second.
    """
    wrapped = DistributedDataParallel(subject.model, gradient_as_bucket_view=True)
    states: dict[int, BucketState] = {}
    parted = False
    ranks, density, comm = subject.ranks, subject.density, cast(Communicator, Mirror(subject.ranks))
    options = OkTopk(density=density)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
        nonlocal parted
        buffer = bucket.buffer()
        if parted:
            if buffer.data_ptr() not in states:
                states[buffer.data_ptr()] = BucketState.of(torch.zeros_like(buffer), ranks)
            run = fixed_size_version(buffer, options)
            for work in run(buffer, states[buffer.data_ptr()], comm, float(ranks), density, options):
                work.wait()
        parted = parted or bucket.is_last()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    wrapped.register_comm_hook(None, hook)
    try:
        yield from _steps(wrapped, subject)
    finally:
        unwrap(wrapped)


def lean(
    subject: Subject, residuals: ResidualPlacement = "in place", activations: Activations = KEPT
) -> Generator[None, None, None]:
    """DataParallel with Lean."""
    wrapped = _sparse(subject, memory=Lean(subject.optimizer, residuals, activations))
    try:
        while True:
            subject.loss(wrapped).backward()
            yield
    finally:
        wrapped.close()


def _sparse(subject: Subject, **further: Any) -> Any:
    options = OkTopk(density=subject.density, warmup_steps=0)
    return DataParallel(
        subject.model, plan=subject.plan, profile_steps=0, process_group=subject.group, compress=options, **further
    )


def _steps(wrapped: nn.Module, subject: Subject) -> Generator[None, None, None]:
    optimizer = subject.optimizer(list(subject.model.parameters()))
    while True:
        optimizer.zero_grad(set_to_none=True)
        subject.loss(wrapped).backward()
        optimizer.step()
        yield


def training_of(mode: str, activations: Activations = KEPT) -> Training:
    """The way to train that a mode names; ``activations`` as Lean's modes treat them."""
    trainings: Mapping[str, Training] = {
        DDP: ddp,
        NAIVE: naive,
        OKTOPK: oktopk,
        LEAN: partial(lean, activations=activations),
        LEAN_HOST: partial(lean, residuals="host", activations=activations),
    }
    return trainings[mode]
