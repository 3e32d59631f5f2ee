"""The engine in unusual situations: nested backward passes, frozen parameters, failed steps, freed wrappers."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.values.errors import CollectiveError
from lean.launches import Answers, each_on_ranks
from ranks import cases_on_ranks, on_ranks

WIDTH = 16


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Chain(nn.Module):
    """Layers one after another; ``reentrant``: each is computed again in backward, in that way of the two."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(layer(x) if self.reentrant is None else self.again(layer, x))
        return x

    def again(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)
        return again


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def planned(model: nn.Module, kind: str = "dense") -> ab.Plan:
    """Matrices by ``kind`` in two buckets, vectors dense."""
    named = list(reversed(list(model.named_parameters())))
    matrices, vectors = [n for n, p in named if p.dim() > 1], [n for n, p in named if p.dim() < 2]
    half = len(matrices) // 2
    parts = [(matrices[:half], kind), (vectors, "dense"), (matrices[half:], kind)]
    return ab.Plan(tuple(ab.Bucket(tuple(names), collective=kind) for names, kind in parts))


def wrapped(model: nn.Module, kind: str = "dense", factory: Callable[..., Any] = sgd, **lean: Any) -> Any:
    options = None if kind == "dense" else ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
    return ab.DataParallel(
        model, plan=planned(model, kind), compress=options, profile_steps=0, memory=ab.Lean(factory, **lean)
    )


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), theirs in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def computed_again(rank: int, reentrant: bool) -> int:
    models = [Chain(reentrant), Chain()]
    leans = [wrapped(model) for model in models]
    for step in range(3):
        for lean in leans:
            lean(batch(step, rank)).pow(2).sum().backward()
    assert_same(*models)
    made: int = leans[0]._tuner.steps_done
    for lean in leans:
        lean.close()
    return made


def test_checkpointed_parts_make_one_step() -> None:
    """A reentrant one runs callbacks when it ends, long before backward does."""
    assert each_on_ranks(computed_again, 2, [(True,), (False,)]) == [[3, 3]] * 2


def asked_for_gradients(rank: int) -> int:
    """autograd.grad() through the wrapper, and one backward of two forwards."""
    model = Chain()
    lean = wrapped(model)
    x = batch(0, rank).requires_grad_()
    before = copy.deepcopy(model)
    torch.autograd.grad(lean(x).sum(), x)
    assert_same(model, before)
    (lean(batch(1, rank)).sum() + lean(batch(2, rank)).sum()).backward()
    made: int = lean._tuner.steps_done
    lean.close()
    return made


def test_only_a_backward_is_a_step(launched: Answers) -> None:
    assert launched["asked_for_gradients"] == [1, 1]


def permuted(rank: int, kind: str, fused: bool) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    theirs = copy.deepcopy(ours)

    def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, fused=fused)

    lean, optimizer = wrapped(ours, kind, adamw), adamw(list(theirs.parameters()))
    options = None if kind == "dense" else ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
    plain = ab.DataParallel(theirs, plan=planned(theirs, kind), compress=options, profile_steps=0)
    for step in range(3):
        image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step * 10 + rank))
        image = image.to(memory_format=torch.channels_last)
        lean(image).pow(2).sum().backward()
        plain(image).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(ours, theirs)
    waits, expected = (each.comm_state_dict().get("residuals", {}) for each in (lean, plain))
    assert all(torch.equal(waits[name], piece) for name, piece in expected.items())
    lean.close()
    plain.close()


def test_channels_last() -> None:
    """A residual is in the order of its parameter's memory, as under DDP; so is what a fused optimizer gets."""
    each_on_ranks(permuted, 2, [("dense", True), ("oktopk:0.1", False)])


def frozen(rank: int) -> float:
    model = Chain()
    lean = wrapped(model, factory=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1))
    lean(batch(0, rank)).sum().backward()
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model.layers[0])
    lean(batch(1, rank)).sum().backward()
    assert_same(model.layers[0], before)
    lean.close()
    return 0.0


def test_frozen_parameters_are_not_updated(launched: Answers) -> None:
    assert "frozen" in launched  # its own assertions hold on every rank


def broken_off(rank: int) -> list[str]:
    model = Chain()
    lean = wrapped(model)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    handle = model.get_parameter("layers.1.weight").register_hook(fail)
    with pytest.raises(ArithmeticError):
        lean(batch(0, rank)).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError) as caught:
        lean(batch(1, rank))
    lean.close()
    again = wrapped(model)
    again(batch(1, rank)).sum().backward()
    again.close()
    return [str(caught.value)]


def test_after_a_failed_backward_the_next_forward_raises() -> None:
    assert all("broken off" in answers[0] and "wrap again" in answers[0] for answers in on_ranks(broken_off, 2))


def dropped(rank: int, within: int | None) -> bool:
    model = Chain()
    lean = wrapped(model, within=within)
    lean(batch(0, rank)).sum().backward()
    gone = weakref.ref(lean)
    del lean
    gc.collect()
    hooks = [model._forward_pre_hooks, *(p._post_accumulate_grad_hooks for p in model.parameters())]
    return gone() is None and not any(hooks)


def test_a_dropped_wrapper_is_freed() -> None:
    scenarios = [(None,), (1 << 30,)]
    assert each_on_ranks(dropped, 2, scenarios) == [[True, True]] * 2


def left_over(rank: int, residuals: str) -> list[list[str]]:
    """From sparse to dense buckets, the last of which is not finite on rank 1 in the first step."""
    model = Chain()
    lean = wrapped(model, "oktopk:0.1", residuals=residuals)
    for step in range(3):
        lean(batch(step, rank)).pow(2).sum().backward()
    dense = planned(model)
    lean._tuner.runner.use_plan(dense)
    waits, at = [], 3
    bad = model.get_parameter(dense.buckets[2].names[0])
    bad.register_hook(lambda g: g * float("inf") if rank == 1 and at == 3 else g)
    for at in range(3, 5):
        lean(batch(at, rank)).pow(2).sum().backward()
        waits.append(sorted(lean.comm_state_dict()["residuals"]))
    lean.close()
    return waits


def test_residuals_of_an_old_plan_are_sent_with_buckets_that_are_updated() -> None:
    last = sorted(planned(Chain()).buckets[2].names)
    assert each_on_ranks(left_over, 2, [("in place",), ("int8",)]) == [[[last, []]] * 2] * 2


def as_programs_are(rank: int) -> float:
    """No optimizer, a scheduler and no optimizer.step(), second derivatives: warnings are errors here."""
    ab.DataParallel(Chain(), profile_steps=0, memory=None).close()
    model = Chain()
    model.register_buffer("own", torch.zeros(2 + rank))
    model._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
    lean = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(lean.optimizer, 1, 0.5)
    loss = lean(batch(0, rank)).pow(2).sum()
    with pytest.warns(UserWarning, match="create_graph"):
        loss.backward(create_graph=True)
    scheduler.step()
    lean(batch(1, rank)).pow(2).sum().backward()
    lean.close()
    return float(scheduler.get_last_lr()[0])


def test_ordinary_programs_work_unchanged(launched: Answers) -> None:
    assert launched["as_programs_are"] == [0.05, 0.05]


class Failing(torch.optim.SGD):
    """Cannot step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no room for its state")


class Counting(torch.optim.SGD):
    """Counts its steps where only settings belong."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def failing(rank: int, optimizer: str) -> str:
    kind = {"failing": Failing, "counting": Counting}[optimizer]
    lean = wrapped(Chain(), factory=lambda params: kind(params, lr=0.1))
    with pytest.raises((RuntimeError, CollectiveError)) as caught:  # where it is waited for, or by the next bucket
        lean(batch(0, rank)).sum().backward()
    lean.close()
    return str(caught.value)


def test_an_optimizer_that_fails_is_named() -> None:
    (failed,), (counted,) = each_on_ranks(failing, 1, [("failing",), ("counting",)])
    assert "the optimizer's step failed on this rank" in failed and "no room for its state" in failed
    assert "changes 'count' in its parameter groups" in counted


def with_nothing(rank: int) -> None:
    """A bucket whose only parameter has no elements."""
    model = Chain()
    names = tuple(name for name, _ in model.named_parameters())
    model.empty = nn.Parameter(torch.zeros(0, 4))
    plan = ab.Plan((ab.Bucket(names), ab.Bucket(("empty",))))
    lean: Any = ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(sgd))
    (lean(batch(0, rank)).sum() + model.empty.sum()).backward()
    assert lean.skipped == 0
    lean.close()


def test_a_parameter_without_elements(launched: Answers) -> None:
    assert "with_nothing" in launched  # its own assertions hold on every rank


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


def test_a_backward_through_the_module_alone_is_no_step(launched: Answers) -> None:
    assert "own_affair" in launched  # its own assertions hold on every rank


def frozen_later(rank: int) -> list[int]:
    """How many gradients of the first bucket are alive when the last one comes, before and after a layer is frozen.

    Only the first bucket is looked at: a later one's update may run just then, and gives its gradients for that long.
    """
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    parts = [names[:2], *([name] for name in names[2:])]
    plan = ab.Plan(tuple(ab.Bucket(tuple(part)) for part in parts))
    lean: Any = ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(sgd))
    alive: list[int] = []
    layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: alive.append(sum(layer.weight.grad is not None for layer in layers[4:]))
    )
    for frozen in (False, True):
        layers[5].requires_grad_(not frozen)
        before = layers[5].weight.detach().clone()
        lean(torch.randn(2, WIDTH)).sum().backward()
        assert torch.equal(before, layers[5].weight) == frozen
    lean.close()
    return alive


def test_what_is_frozen_later_keeps_no_gradient_alive(launched: Answers) -> None:
    assert launched["frozen_later"] == [[0, 0], [0, 0]]


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    asked_for_gradients,
    frozen,
    as_programs_are,
    with_nothing,
    own_affair,
    frozen_later,
)
