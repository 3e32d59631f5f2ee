"""What Lean must not touch or mix up: gradients that others hold, other backward passes, scales, groups, slots."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.lean import buckets, update
from anabranch.lean.optimizers import BucketOptimizers
from anabranch.lean.update import BucketUpdater
from ranks import on_ranks

WIDTH = 8


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Positions(nn.Module):
    """At a batch of one, the gradient of ``places`` is a view of what flows on to ``before``."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.places = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(torch.tanh(self.before(x) + self.places.unsqueeze(0)))
        return found


class Sum(nn.Module):
    """Two parameters whose gradients are views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (self.one.view(WIDTH, WIDTH) + self.other.view(-1).view(WIDTH, WIDTH)))


def held_by_others(rank: int, which: type[nn.Module], size: int, residuals: Any) -> None:
    """With Lean and without: the same bits."""
    torch.manual_seed(0)
    plain_model = which()
    torch.manual_seed(0)
    lean_model = which()
    names = tuple(name for name, _ in reversed(list(plain_model.named_parameters())))
    given: dict[str, Any] = {
        "plan": ab.Plan((ab.Bucket(names, collective="oktopk:0.1"),)),
        "compress": ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True),
        "profile_steps": 0,
    }
    # Without views DDP would write both averages of Sum to the memory that autograd has given to both gradients.
    plain: Any = ab.DataParallel(plain_model, gradient_as_bucket_view=True, **given)
    optimizer = sgd(list(plain_model.parameters()))
    lean: Any = ab.DataParallel(lean_model, memory=ab.Lean(sgd, residuals=residuals), **given)
    for step in range(5):
        x = torch.randn(size, 6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
        lean(x).square().sum().backward()
        for (name, a), b in zip(plain_model.named_parameters(), lean_model.parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
    plain.close()
    lean.close()


@pytest.mark.parametrize("residuals", ["in place", "host"])
@pytest.mark.parametrize(("which", "size"), [(Positions, 1), (Positions, 2), (Sum, 1)])
def test_a_gradient_that_others_hold_is_left_alone(which: type[nn.Module], size: int, residuals: str) -> None:
    on_ranks(held_by_others, 2, which, size, residuals)


def test_large_gradients_are_added_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "CHUNK_NUMEL", 5)
    state = _State()
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = _live(parameter, state)
    gradient = torch.randn(4, 3, 2, 2)
    expected = state.residual.clone() + gradient.permute(0, 2, 3, 1).flatten()
    kept = gradient.clone()
    parameter.grad = gradient
    bucket.add("p", parameter)
    assert torch.equal(state.residual, expected) and torch.equal(gradient, kept)
    parameter.grad = gradient.clone()
    parameter.grad[3, 2, 1, 1] = float("nan")
    bucket.add("p", parameter)
    assert torch.equal(state.residual, expected)  # left out as a whole, not only the chunk with the NaN
    assert [bool(finite) for finite in bucket.finite] == [True, False]


class _State:
    """What a sparse exchange remembers, as far as additions ask."""

    def __init__(self) -> None:
        self.residual = torch.randn(48)

    def record_norms(self, gradient: torch.Tensor) -> None:
        assert gradient.numel() == 48


def _live(parameter: nn.Parameter, state: Any) -> buckets.LiveBucket:
    planned = ab.Bucket(("p",), collective="oktopk:0.1")
    return buckets.LiveBucket(planned, [parameter], mock.Mock(), True, state, {"p": state.residual})


def scaled_windows(rank: int) -> list[float]:
    """Windows of four micro-batches, while the scale grows after every second."""
    model = nn.Linear(4, 4, bias=False)
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(lambda params: torch.optim.SGD(params, lr=1.0)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    lean.follow(scaler)
    moved = []
    for _ in range(6):
        before = model.weight.detach().clone()
        for micro in range(4):
            with nullcontext() if micro == 3 else lean.no_sync():
                scaler.scale(lean(torch.ones(1, 4)).sum()).backward()
        moved.append(float((before - model.weight.detach())[0, 0]))
    assert scaler.get_scale() > 1024.0
    lean.close()
    return moved


def test_all_that_adds_up_until_a_step_has_one_scale() -> None:
    for moved in on_ranks(scaled_windows, 2):
        assert moved == pytest.approx([4.0] * 6, rel=1e-5)


def own_affair(rank: int) -> None:
    """One rank differentiates the module by itself, as it may under DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(sgd))
    lean(torch.ones(2, 4)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == 1:
        model(torch.ones(2, 4)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model.zero_grad()
    for _ in range(2):
        lean(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        theirs = parameter.detach().clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, parameter)
    lean.close()


def test_a_backward_through_the_module_alone_is_no_step() -> None:
    on_ranks(own_affair, 2)


def by_place(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": list(parameters[:-1]), "lr": 0.0}, {"params": list(parameters[-1:]), "lr": 1.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def grouped(rank: int) -> None:
    """A function that groups parameters by their places: what the user sees is what is done."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    plan = ab.Plan((ab.Bucket(("3.weight", "2.weight", "1.weight")), ab.Bucket(("0.weight",))))
    lean: Any = ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(by_place))
    rates = {id(p): group["lr"] for group in lean.optimizer.param_groups for p in group["params"]}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lean(torch.ones(2, 4)).sum().backward()
    for name, parameter in model.named_parameters():
        assert bool((before[name] != parameter).any()) == (rates[id(parameter)] > 0), name
    lean.close()


def test_groups_are_those_that_the_user_sees() -> None:
    on_ranks(grouped, 2)


def frozen_later(rank: int) -> list[int]:
    """How many gradients are alive when the last one comes, before and after a layer is frozen."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    parts = [names[:2], *([name] for name in names[2:])]
    plan = ab.Plan(tuple(ab.Bucket(tuple(part)) for part in parts))
    lean: Any = ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(sgd))
    alive: list[int] = []
    layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: alive.append(sum(parameter.grad is not None for parameter in model.parameters()))
    )
    for frozen in (False, True):
        layers[5].requires_grad_(not frozen)
        before = layers[5].weight.detach().clone()
        lean(torch.randn(2, WIDTH)).sum().backward()
        assert torch.equal(before, layers[5].weight) == frozen
    lean.close()
    return alive


def test_what_is_frozen_later_keeps_no_gradient_alive() -> None:
    for before, after in on_ranks(frozen_later, 2):
        assert before == after <= 1


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


def test_a_slot_is_not_used_again_before_the_step_that_reads_it() -> None:
    """One bucket's step waits for the host, the next one's does not: the third gets the first one's slot."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    made = BucketOptimizers(lambda params: Fused(params, lr=1.0), {str(i): p for i, p in enumerate(parameters)})
    each = [made.for_bucket([parameter]) for parameter in parameters]
    cuda = {name: mock.MagicMock() for name in ("Event", "Stream", "stream", "current_stream")}
    as_copied = mock.patch.object(update, "_to_host", lambda answer: answer.as_subclass(torch.Tensor).clone())
    unrecorded = mock.patch.object(update, "record_stream", lambda *_: None)
    with mock.patch.multiple(torch.cuda, **cuda), unrecorded, as_copied:
        updates = BucketUpdater(None)
        slots = [torch.zeros(4), torch.zeros(4)]
        for index, optimizer in enumerate(each):
            updates.launch_pending(keep=1)  # as the engine does before it takes the next slot
            slot = slots[index % 2].fill_(index + 1.0)
            used = torch.ones(1) if index == 0 else None
            assert not list(updates.exchange_and_step(iter(()), slot.as_subclass(OnGpu), optimizer, used))
        updates.launch_pending()
    assert [float(-parameter.detach()[0]) for parameter in parameters] == [1.0, 2.0, 3.0]


def huge(rank: int) -> None:
    """A gradient that is finite, and too large for any sum: the step is left out, and training goes on."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    lean: Any = ab.DataParallel(
        model,
        plan=ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),)),
        compress=ab.OkTopk(density=0.1, warmup_steps=0),
        profile_steps=0,
        memory=ab.Lean(sgd),
    )
    for step, factor in enumerate((1.0, 3e38, 1.0, 1.0)):
        before = model.weight.detach().clone()
        (lean(torch.ones(1, WIDTH)).sum() * factor).backward()
        assert torch.equal(before, model.weight) == (factor > 1), step
    assert lean.skipped == 1
    lean.close()


def test_a_huge_gradient_does_not_stay() -> None:
    on_ranks(huge, 2)


def only_empty(rank: int) -> None:
    """A sparse bucket without elements."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    plan = ab.Plan((ab.Bucket(("nothing",), collective="oktopk:0.1"), ab.Bucket(("weight",), collective="oktopk:0.1")))
    options = ab.OkTopk(density=0.1, warmup_steps=0)
    lean: Any = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=ab.Lean(sgd))
    (lean(torch.ones(1, WIDTH)).sum() + model.nothing.sum()).backward()  # type: ignore[operator]
    assert lean.skipped == 0
    lean.close()


def test_a_sparse_bucket_without_elements() -> None:
    on_ranks(only_empty, 2)


def test_a_scale_that_cannot_grow_stays() -> None:
    on_ranks(at_the_limit, 1)


def at_the_limit(rank: int) -> None:
    lean: Any = ab.DataParallel(nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(sgd))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    lean.follow(scaler)
    for _ in range(3):
        scaler.scale(lean(torch.ones(1, 4)).sum() * 2.0**-100).backward()
    assert scaler.get_scale() == 2.0**127
    lean.close()
