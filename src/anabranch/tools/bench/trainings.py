"""The ways to train whose memory is measured: each is a generator, a step per ``next``; Lean's yield the model.

On one rank, ``ReplicatedCommunicator`` stands for a world of ranks that all send what this one sends, so that messages
have the sizes of that world.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from anabranch.ddp.reducer import unwrap
from anabranch.exchange.communicator import Communicator, ZeroBuffer
from anabranch.exchange.compression import Compress
from anabranch.exchange.residuals.state import BucketState
from anabranch.exchange.sparse.oktopk import fixed_size_version
from anabranch.exchange.sparse.select import add_pairs
from anabranch.lean.activations.policy import Activations
from anabranch.lean.options import KEPT, Lean, OptimizerFactory
from anabranch.parallel import DataParallel
from anabranch.planning.memory import TrainingMode
from anabranch.tools.bench.baselines import top_count, top_pairs
from anabranch.tools.predict.memory.modes import DDP, NAIVE, OKTOPK, OUR_MODES
from anabranch.tools.predict.memory.probe import Loss
from anabranch.values.kinds.names import DENSE
from anabranch.values.kinds.oktopk import OkTopk
from anabranch.values.plan import Plan


class TrainingSetup(NamedTuple):
    """What is trained and how gradients are exchanged; ``plan`` is used by the modes that take one."""

    model: nn.Module
    loss: Loss
    optimizer: OptimizerFactory
    ranks: int
    density: float
    plan: Plan | None = None
    group: dist.ProcessGroup | None = None


Training = Callable[[TrainingSetup], Generator[Any, None, None]]
ON_ONE_RANK = (DDP, NAIVE, OKTOPK)  # the modes that a single rank can run


class _Done:
    def wait(self) -> bool:
        return True


class ReplicatedCommunicator(ZeroBuffer):
    """A communicator of ``size`` ranks that all send what this one sends. Messages have their sizes; none is sent."""

    rank = 0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor, phase: str, *_: Any) -> Any:  # noqa: ARG002
        output.view(self.size, -1).copy_(given.view(self.size, -1)[:1].expand(self.size, -1))
        return _Done()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> Any:  # noqa: ARG002
        """This rank's part, and zeros for the others: positions in this rank's region need not be in theirs."""
        output.zero_().view(self.size, -1)[0].copy_(part.view(-1))
        return _Done()

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: Any = None) -> Any:  # noqa: ARG002
        tensor.mul_(self.size)
        return _Done()


def ddp(setup: TrainingSetup) -> Generator[None, None, None]:
    """Stock DDP, gradients being views of its buckets."""
    wrapped = DistributedDataParallel(setup.model, gradient_as_bucket_view=True, process_group=setup.group)
    try:
        yield from _steps(wrapped, setup)
    finally:
        unwrap(wrapped)


def naive(setup: TrainingSetup) -> Generator[None, None, None]:
    """Top-k of the whole model after backward, as in published code: all its buffers exist at the same time."""
    parameters = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
    optimizer = setup.optimizer(parameters)
    numel = sum(parameter.numel() for parameter in parameters)
    residual = torch.zeros(numel, device=parameters[0].device)
    while True:
        optimizer.zero_grad(set_to_none=True)
        setup.loss(setup.model).backward()
        naive_exchange(parameters, residual, setup.ranks, top_count(numel, setup.density), setup.group)
        optimizer.step()
        yield


def naive_exchange(
    parameters: Sequence[nn.Parameter],
    residual: torch.Tensor,
    ranks: int,
    k: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace gradients by the average of the k largest of each rank; the others are kept in ``residual``.

    The residual is first added to a flat copy of the gradients. Where the group has fewer than ``ranks`` ranks, all
    are assumed to send what this one sends.
    """
    total = torch.cat([cast(torch.Tensor, parameter.grad).flatten() for parameter in parameters])
    total = total.to(residual.dtype).add_(residual)
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


def data_parallel(setup: TrainingSetup, way: TrainingMode) -> Generator[None, None, None]:
    """DataParallel with an exchange that compresses; Ok-Topk's on one rank with replicated ranks."""
    if way.exchange == OKTOPK and dist.get_world_size(setup.group) == 1:
        yield from _oktopk_on_one_rank(setup)
        return
    wrapped = _wrapped(setup, way, gradient_as_bucket_view=True)
    try:
        yield from _steps(wrapped, setup)
    finally:
        wrapped.close()


def _oktopk_on_one_rank(setup: TrainingSetup) -> Generator[None, None, None]:
    """DDP whose buckets are exchanged by Ok-Topk with fixed-size messages, without another rank.

    The first step exchanges nothing: it has one bucket, and DDP rebuilds its buckets after it.
    """
    wrapped = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)
    states: dict[int, BucketState] = {}
    rebuilt = False
    ranks, density, comm = setup.ranks, setup.density, cast(Communicator, ReplicatedCommunicator(setup.ranks))
    options = OkTopk(density=density)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
        nonlocal rebuilt
        buffer = bucket.buffer()
        if rebuilt:
            if buffer.data_ptr() not in states:
                states[buffer.data_ptr()] = BucketState.of(torch.zeros_like(buffer), ranks)
            run = fixed_size_version(buffer, options)
            for work in run(buffer, states[buffer.data_ptr()], comm, float(ranks), density, options):
                work.wait()
        rebuilt = rebuilt or bucket.is_last()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    wrapped.register_comm_hook(None, hook)
    try:
        yield from _steps(wrapped, setup)
    finally:
        unwrap(wrapped)


def lean(
    setup: TrainingSetup, way: TrainingMode, activations: Activations = KEPT, within_nbytes: int | None = None
) -> Generator[Any, None, None]:
    """DataParallel with Lean, which it yields; with a budget Lean chooses how it stores residuals and activations."""
    memory = Lean(setup.optimizer, way.residuals, activations, within_nbytes)
    wrapped = _wrapped(setup, way, memory=memory)
    try:
        while True:
            setup.loss(wrapped).backward()
            yield wrapped
    finally:
        wrapped.close()


def _wrapped(setup: TrainingSetup, way: TrainingMode, **options: Any) -> Any:
    compress: Compress = None if way.exchange == DENSE else way.exchange
    if way.exchange == OKTOPK:
        compress = OkTopk(density=setup.density, warmup_steps=0)
    return DataParallel(
        setup.model, plan=setup.plan, profile_steps=0, process_group=setup.group, compress=compress, **options
    )


def _steps(wrapped: nn.Module, setup: TrainingSetup) -> Generator[None, None, None]:
    optimizer = setup.optimizer(list(setup.model.parameters()))
    while True:
        optimizer.zero_grad(set_to_none=True)
        setup.loss(wrapped).backward()
        optimizer.step()
        yield


def training_of(mode: str, activations: Activations = KEPT) -> Training:
    """The training of this mode; ``activations`` applies to Lean's modes."""
    if mode in OUR_MODES:
        way = OUR_MODES[mode]
        return partial(lean, way=way, activations=activations) if way.lean else partial(data_parallel, way=way)
    return {DDP: ddp, NAIVE: naive}[mode]
