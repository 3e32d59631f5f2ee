"""Updates of buckets: with parameters that no rank used, and with gradients that are not finite; on any device."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.lean import bucket_update as update
from anabranch.lean.bucket_update import BucketUpdater
from anabranch.lean.buckets import LiveBucket
from anabranch.lean.optimizers import BucketOptimizer, BucketOptimizers
from lean.launches import each_on_ranks

WIDTH, LAYERS = 8, 6


class Skipping(nn.Module):
    """Layers of which each forward leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == left_out else torch.tanh(layer(x))
        return x


def wrapped(model: nn.Module, fused: bool) -> Any:
    """A bucket for each layer: there are more than slots. The plan may be that of more ranks, on nodes."""
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    kinds = ("dense", "dense@nodes")
    plan = ab.Plan(tuple(ab.Bucket((name,), 0, kinds[i % 2]) for i, name in enumerate(names)))
    return ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(partial(adamw, fused=fused)))


def adamw(params: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=fused)


def given(step: int, device: str) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


def skipping(rank: int, device: str, fused: bool) -> None:
    """One rank, which needs nobody's word on what is unused: the same as without any wrapper."""
    model = Skipping().to(device)
    alone = copy.deepcopy(model)
    optimizer = adamw(alone.parameters(), fused)
    lean = wrapped(model, fused)
    for step in range(2 * LAYERS):
        left_out = step % LAYERS
        lean(given(step, device), left_out).square().sum().backward()
        alone(given(step, device), left_out).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), (step, name)
    assert lean.skipped == 0
    lean.close()


def poisoned(rank: int, device: str, fused: bool) -> None:
    """A step with NaNs changes nothing, and is counted; the next one goes on."""
    model = Skipping().to(device)
    lean = wrapped(model, fused)
    for step, poison in enumerate((False, True, False)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x = given(step, device) * (float("nan") if poison else 1.0)
        lean(x, -1).square().sum().backward()
        for a, b in zip(before, model.parameters(), strict=True):
            assert torch.equal(a, b) == poison and bool(b.isfinite().all())
    assert lean.skipped == LAYERS
    lean.close()


@pytest.mark.parametrize("training", [skipping, poisoned])
def test_steps_with_and_without_gradients(training: Any) -> None:
    each_on_ranks(training, 1, [("cpu", True), ("cpu", False)])


class Fused(torch.optim.SGD):
    """As a fused one on a GPU: its step can be told to do nothing."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad.as_subclass(torch.Tensor)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True

    def to_sparse(self) -> torch.Tensor:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():  # a sparse tensor cannot be of this class
            return super().to_sparse()


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """A context in which tensors that say they are on a GPU can be updated."""
    cuda = {name: mock.MagicMock() for name in ("Event", "Stream", "stream", "current_stream")}
    as_copied = mock.patch.object(update, "_to_host", lambda answer: answer.as_subclass(torch.Tensor).clone())
    recorded = mock.patch.object(update, "record_stream", lambda *_: None)
    with mock.patch.multiple(torch.cuda, **cuda), as_copied, recorded:
        yield


def bucket_of_each(parameters: list[nn.Parameter]) -> list[LiveBucket]:
    named = {str(i): p for i, p in enumerate(parameters)}
    made = BucketOptimizers(lambda params: Fused(params, lr=1.0), named)
    return [LiveBucket(ab.Bucket((name,)), [one], made.for_bucket([one])) for name, one in named.items()]


def stepped(
    updates: BucketUpdater, bucket: LiveBucket, average: torch.Tensor, used: torch.Tensor | None = None
) -> None:
    """The update of a bucket behind an exchange that leaves this average."""
    alone: Any = None
    with mock.patch.object(torch.distributed, "all_reduce"), mock.patch.object(update, "issued", lambda work: work):
        assert list(updates.update(bucket, average, used, alone)) == [mock.ANY] * (used is not None)


class Residual:
    """The residual of a bucket, as far as updates ask."""

    packed = None

    def __init__(self) -> None:
        self.tensor = torch.zeros(40)

    def take_back(self, average: torch.Tensor, factor: float) -> None:
        self.tensor += torch.where(average.isfinite(), average, 0.0) * factor


@pytest.mark.parametrize("poison", [False, True])
def test_a_held_average_leaves_its_slot_before_it_is_used_again(poison: bool) -> None:
    """Sparse averages in two slots, a dense one in memory of its own; a bad one puts all sparse ones back."""
    parameters = [nn.Parameter(torch.zeros(40)) for _ in range(5)]
    each, residuals = bucket_of_each(parameters), [Residual() for _ in parameters]
    for index in (0, 2, 3, 4):
        each[index].residual = residuals[index]  # type: ignore[assignment]
    with pretended_gpu():
        updates = BucketUpdater(1e9, parameters)
        updates.loss_scale = 2.0
        ring = cycle([torch.zeros(40), torch.zeros(40)])
        for index, bucket in enumerate(each):
            updates.launch_pending(keep=1)  # as the engine does before it takes the next slot
            slot = torch.zeros(40) if index == 1 else next(ring).zero_()
            slot[index] = float("inf") if poison and index == 3 else 2.0 * (index + 1)
            stepped(updates, bucket, slot.as_subclass(OnGpu))
        updates.finish_step()
    assert updates.skipped() == (5 if poison else 0)
    applied = torch.stack([-parameter.detach() for parameter in parameters])
    expected = torch.diag(torch.arange(1.0, 6.0))
    assert torch.equal(applied[:, :5], torch.zeros(5, 5) if poison else expected) and not applied[:, 5:].any()
    back = torch.stack([residual.tensor for residual in residuals]).sum(0)
    assert back[:5].tolist() == ([2.0, 0.0, 6.0, 0.0, 10.0] if poison else [0.0] * 5)
    assert updates.grad_norm is not None
    if not poison:
        assert float(updates.grad_norm) == pytest.approx(math.sqrt(1 + 4 + 9 + 16 + 25))


@pytest.mark.parametrize("poison", [False, True])
def test_held_steps_of_fused_optimizers_are_left_out_by_the_device(poison: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    with pretended_gpu(), mock.patch.object(BucketOptimizer, "step") as step:
        updates = BucketUpdater(1.0, parameters)
        for index, bucket in enumerate(bucket_of_each(parameters)):
            stepped(
                updates, bucket, torch.full((4,), float("nan") if poison and index == 2 else 1.0).as_subclass(OnGpu)
            )
        assert step.call_count == 0
        updates.finish_step()
    assert [float(call.kwargs["found_inf"]) for call in step.call_args_list] == [float(poison)] * 3
    assert updates.skipped() == (3 if poison else 0)
    if not poison:
        given = torch.cat([call.args[0] for call in step.call_args_list])
        assert float(given.norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_slot_is_not_used_again_before_the_step_that_reads_it() -> None:
    """One bucket's step waits for the host, the next one's does not: the third gets the first one's slot."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    each = bucket_of_each(parameters)
    with pretended_gpu():
        updates = BucketUpdater()
        slots = [torch.zeros(4), torch.zeros(4)]
        for index, bucket in enumerate(each):
            updates.launch_pending(keep=1)  # as the engine does before it takes the next slot
            slot = slots[index % 2].fill_(index + 1.0)
            bucket.missing = bucket.planned.names if index == 0 else ()
            stepped(updates, bucket, slot.as_subclass(OnGpu), torch.ones(1) if index == 0 else None)
        updates.launch_pending()
    assert [float(-parameter.detach()[0]) for parameter in parameters] == [1.0, 2.0, 3.0]
