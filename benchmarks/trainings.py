"""The trainings whose memory is measured: each is a generator, a step per ``next``; Lean's yield the model."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.ddp.reducer import unwrap
from anabranch.exchange.compression import Compress
from anabranch.exchange.sparse.select import add_pairs
from anabranch.lean.options import KEPT, Activations, Lean, OptimizerFactory
from anabranch.parallel import DataParallel
from anabranch.planning.footprint import BUCKET_NBYTES, StepProfile, TrainingMode, buckets_by_size
from anabranch.tools.predict.memory.probe import Loss
from anabranch.tools.predict.memory.training_modes import DDP, NAIVE, OUR_MODES
from anabranch.values.kinds.names import DENSE, OKTOPK, kind_of
from anabranch.values.kinds.options import OkTopk
from anabranch.values.plan import Bucket, Plan


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
ON_ONE_RANK = (DDP, NAIVE)  # the modes that a single rank can run


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


def data_parallel(setup: TrainingSetup, mode: TrainingMode) -> Generator[None, None, None]:
    """DataParallel with an exchange that compresses."""
    wrapped = _wrapped(setup, mode, gradient_as_bucket_view=True)
    try:
        yield from _steps(wrapped, setup)
    finally:
        wrapped.close()


def lean(
    setup: TrainingSetup, mode: TrainingMode, activations: Activations = KEPT, within_nbytes: int | None = None
) -> Generator[Any, None, None]:
    """DataParallel with Lean, which it yields; with a budget Lean chooses how it stores residuals and activations."""
    memory = Lean(setup.optimizer, mode.residuals, activations, within_nbytes)
    wrapped = _wrapped(setup, mode, memory=memory)
    try:
        while True:
            setup.loss(wrapped).backward()
            yield wrapped
    finally:
        wrapped.close()


def _wrapped(setup: TrainingSetup, mode: TrainingMode, **options: Any) -> Any:
    compress: Compress = None if mode.exchange == DENSE else mode.exchange
    if mode.exchange == OKTOPK:
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
    if mode not in OUR_MODES:
        return {DDP: ddp, NAIVE: naive}[mode]
    ours = OUR_MODES[mode]
    return partial(lean, mode=ours, activations=activations) if ours.lean else partial(data_parallel, mode=ours)


def top_count(numel: int, density: float) -> int:
    """k: at least one value, at most all."""
    return min(numel, max(1, round(density * numel)))


def top_pairs(values: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [k, 2]: the bits and positions of the k largest magnitudes, in order of position."""
    return pairs_at(values, torch.topk(values.abs(), k, sorted=False).indices.sort().values)


def pairs_at(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int32 [m, 2]: the bits of the values at these positions, and the positions."""
    return torch.stack([values[positions].view(torch.int32), positions.to(torch.int32)], dim=-1)


def compressed_plan(profile: StepProfile, mode: str, density: float, bucket_nbytes: int = BUCKET_NBYTES) -> Plan:
    """Buckets in the order of backward, of the size and kind that ``planning.footprint`` assumes for this mode."""
    training = OUR_MODES[mode]
    buckets = buckets_by_size(profile, bucket_nbytes, training.compresses)
    kind = kind_of(density) if training.exchange == OKTOPK else training.exchange
    names = {bucket: tuple(profile.gradients[index].name for index in bucket.indices) for bucket in buckets}
    in_order = sorted(buckets, key=lambda bucket: bucket.last_index)
    return Plan(tuple(Bucket(names[bucket], 0, kind if bucket.compressed else DENSE) for bucket in in_order))
