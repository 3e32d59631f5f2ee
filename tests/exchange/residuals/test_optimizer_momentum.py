"""An optimizer's own momentum beside velocities that arrive: each gradient gets momentum once."""

import gc
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import anabranch as ab
from anabranch.exchange.residuals.momentum import not_shareable, share_momentum
from ranks import on_ranks

STEPS, FIRST = 9, 4  # from this step on, the first parameter's gradients are velocities
BETAS = (0.9, 0.99)
ADAMS: dict[str, Callable[..., Optimizer]] = {
    "Adam": partial(Adam, lr=0.01, betas=BETAS),
    "Adam, L2": partial(Adam, lr=0.01, betas=BETAS, weight_decay=0.1),
    "AdamW": partial(AdamW, lr=0.01, betas=BETAS, weight_decay=0.1),
    "AdamW, fused": partial(AdamW, lr=0.01, betas=BETAS, weight_decay=0.1, fused=True),
    "AdamW, foreach": partial(AdamW, lr=0.01, betas=BETAS, foreach=True),
    "AMSGrad": partial(AdamW, lr=0.01, betas=BETAS, amsgrad=True),
    "maximize": partial(Adam, lr=0.01, betas=BETAS, weight_decay=0.1, maximize=True),
}
SGDS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "L2": {"weight_decay": 0.1},
    "Nesterov": {"nesterov": True, "weight_decay": 0.1},
    "dampening": {"dampening": 0.9},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "foreach": {"foreach": True},
    "fused": {"fused": True, "weight_decay": 0.1},
}


def two_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((6, 5), (7,))]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def arriving(parameters: list[nn.Parameter], now: list[int]) -> Callable[[], Collection[nn.Parameter]]:
    return lambda: parameters[:1] if now[0] >= FIRST else []


@pytest.mark.parametrize("name", ADAMS)
def test_adam_applies_velocities_as_without_momentum_and_has_its_own_for_all_else(name: str) -> None:
    ours, twins, now = two_parameters(), two_parameters(), [0]
    optimizer = ADAMS[name](ours)
    share_momentum(optimizer, arriving(ours, now))
    first, second = ADAMS[name](twins[:1]), ADAMS[name](twins[1:])
    for now[0] in range(STEPS):
        if now[0] == FIRST:
            first.param_groups[0]["betas"] = (0.0, BETAS[1])
        for parameters in (ours, twins):
            give_gradients(parameters, now[0])
        for one in (optimizer, first, second):
            one.step()
        for mine, twin in zip(ours, twins, strict=True):
            torch.testing.assert_close(mine, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SGDS)
def test_sgd_applies_velocities_as_often_as_it_counts_a_gradient_in_all(name: str) -> None:
    ours, twins, now, options = two_parameters(), two_parameters(), [0], SGDS[name]
    optimizer = SGD(ours, lr=0.01, momentum=0.9, **options)
    share_momentum(optimizer, arriving(ours, now))
    first, second = (SGD(part, lr=0.01, momentum=0.9, **options) for part in (twins[:1], twins[1:]))
    plain = {key: value for key, value in options.items() if key not in ("nesterov", "dampening")}
    after = SGD(twins[:1], lr=0.01 * (1 - options.get("dampening", 0)) / (1 - 0.9), **plain)
    for now[0] in range(STEPS):
        for parameters in (ours, twins):
            give_gradients(parameters, now[0])
        for one in (optimizer, after if now[0] >= FIRST else first, second):
            one.step()
        for mine, twin in zip(ours, twins, strict=True):
            torch.testing.assert_close(mine, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [partial(AdamW, lr=0.01), partial(SGD, lr=0.01, momentum=0.9)])
def test_velocities_may_come_first_and_gradients_may_be_missing(make: Callable[..., Optimizer]) -> None:
    ours, twins = two_parameters(), two_parameters()
    optimizer = make(ours)
    share_momentum(optimizer, lambda: ours)
    twin = (
        AdamW(twins, lr=0.01, betas=(0.0, 0.999)) if isinstance(optimizer, AdamW) else SGD(twins, lr=0.01 / (1 - 0.9))
    )
    for step in range(3):
        for parameters in (ours, twins):
            give_gradients(parameters, step)
            if step == 1:
                parameters[1].grad = None
        optimizer.step()
        twin.step()
        for mine, other in zip(ours, twins, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_an_sgd_without_momentum_and_a_second_call_change_nothing() -> None:
    ours, twins = two_parameters(), two_parameters()
    optimizer, twin = SGD(ours, lr=0.1), SGD(twins, lr=0.1)
    for _ in range(2):
        share_momentum(optimizer, lambda: ours)
    for step in range(2):
        give_gradients(ours, step)
        give_gradients(twins, step)
        optimizer.step()
        twin.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, twins, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_under_a_loss_scaler_velocities_are_unscaled_and_a_skipped_step_changes_nothing(kind: Any, fused: bool) -> None:
    options = {"lr": 0.01, "fused": fused} | ({"momentum": 0.9} if kind is SGD else {})
    ours, twins = two_parameters(), two_parameters()
    optimizer, twin = kind(ours, **options), kind(twins, **options)
    share_momentum(optimizer, lambda: ours)
    share_momentum(twin, lambda: twins)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    scaler.scale(torch.ones(()))  # it is set up by its first use
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(twins, step)
        for parameter in ours:
            assert parameter.grad is not None
            parameter.grad.mul_(scaler.get_scale())
        if step == 2:
            assert ours[0].grad is not None
            ours[0].grad[0, 0] = torch.inf
        else:
            twin.step()
        scaler.step(optimizer)
        scaler.update()
    for mine, other in zip(ours, twins, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [partial(AdamW, lr=0.01), partial(SGD, lr=0.01, momentum=0.9)])
def test_nothing_of_a_velocity_is_applied_once_more_when_gradients_come_again(make: Callable[..., Optimizer]) -> None:
    (ours, _), comes = two_parameters(), [True]
    optimizer = make([ours], weight_decay=0.0)
    share_momentum(optimizer, lambda: [ours] if comes[0] else [])
    for step in range(3):
        give_gradients([ours], step)
        optimizer.step()
    before, comes[0] = ours.detach().clone(), False
    for _ in range(3):
        ours.grad = torch.zeros_like(ours)
        optimizer.step()
    assert torch.equal(ours, before)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_makes_the_gradients_of_its_step(by_name: bool) -> None:
    ours, twins = two_parameters(), two_parameters()
    optimizer, twin = AdamW(ours, lr=0.01), AdamW(twins, lr=0.01)
    share_momentum(optimizer, lambda: ours)
    share_momentum(twin, lambda: twins)
    for step in range(4):

        def closure(step: int = step) -> float:
            give_gradients(ours, step)
            return 0.5 + step

        told = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert told == 0.5 + step
        give_gradients(twins, step)
        twin.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, twins, strict=True))


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_an_sgd_begins_with_velocities_beside_gradients(way: str, dampening: float) -> None:
    """torch's fused one raises where one parameter has a buffer and another has none."""
    ours, twins = two_parameters(), two_parameters()
    options: dict[str, Any] = {"lr": 0.01, "dampening": dampening}
    optimizer = SGD(ours, momentum=0.9, **{way: True}, **options)
    share_momentum(optimizer, lambda: ours[:1])
    own = SGD(twins[1:], momentum=0.9, **options)
    plain = SGD(twins[:1], lr=0.01 * (1 - dampening) / (1 - 0.9))
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(twins, step)
        for one in (optimizer, own, plain):
            one.step()
    for mine, other in zip(ours, twins, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_first_step_that_a_loss_scaler_skips_leaves_nothing_infinite(kind: Any) -> None:
    ours = two_parameters()
    optimizer = kind(ours, lr=0.01, fused=True, **({"momentum": 0.9} if kind is SGD else {}))
    comes = [ours]
    share_momentum(optimizer, lambda: comes[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        give_gradients(ours, step)
        if step == 0:
            for parameter in ours:
                assert parameter.grad is not None
                parameter.grad.fill_(torch.inf)
        comes[0] = ours if step == 0 else []
        scaler.step(optimizer)
        scaler.update()
    assert all(bool(parameter.isfinite().all()) for parameter in ours)


def test_an_optimizer_is_freed_by_its_last_user() -> None:
    parameters = two_parameters()
    optimizer = AdamW(parameters, lr=0.01)
    share_momentum(optimizer, lambda: parameters)
    give_gradients(parameters, 0)
    optimizer.step()
    optimizer.step(lambda: 0.0)
    freed = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("given", [torch.optim.RMSprop(two_parameters()), object(), None])
def test_other_optimizers_are_refused_with_what_to_do(given: Any) -> None:
    with pytest.raises(ValueError, match=r"expected an optimizer of torch, one of Adam, AdamW, SGD.*momentum=0\.0"):
        share_momentum(given, list)


@pytest.mark.parametrize(
    ("options", "found"), [({"momentum": 1.0}, "momentum=1.0"), ({"differentiable": True}, "diff")]
)
def test_optimizers_whose_buffers_cannot_be_set_are_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"an optimizer with {found}.*momentum=0"):
        share_momentum(SGD(two_parameters(), lr=0.1, **options), list)


def test_frameworks_learn_which_optimizers_to_leave_alone() -> None:
    parameters = two_parameters()
    for optimizer in (Adam(parameters), AdamW(parameters), SGD(parameters, lr=0.1, momentum=0.9)):
        assert not_shareable(optimizer) is None
    assert "momentum=1.0" in str(not_shareable(SGD(parameters, lr=0.1, momentum=1.0)))
    assert "RMSprop" in str(not_shareable(torch.optim.RMSprop(parameters)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(x).tanh())
        return hidden.square().mean()


def wrapped(model: nn.Module, *buckets: ab.Bucket) -> ab.DataParallel:
    options = ab.OkTopk(density=0.2, warmup_steps=0, momentum=0.9)
    return ab.DataParallel(model, plan=ab.Plan(buckets), compress=options, profile_steps=0)


def trained(rank: int) -> list[str]:
    """The parameters that have no momentum after each step."""
    matrices, biases = ("second.weight", "first.weight"), ("second.bias", "first.bias")
    model = Model()
    parallel = wrapped(model, ab.Bucket(matrices, collective="oktopk:0.2"), ab.Bucket(biases))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    parallel.share_momentum(optimizer)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        parallel(torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        optimizer.step()
        means = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
        found.append(" ".join(name for name, mean in means.items() if not mean.any()))
    parallel.close()
    optimizer.step()  # nothing is asked of a model that was closed
    return found


def test_of_a_live_model_matrices_that_travel_sparse_come_as_velocities_and_biases_have_adams() -> None:
    for found in on_ranks(trained, 2):
        assert found == ["first.weight second.weight"] * 5


def residuals_after(rank: int, shares: bool) -> list[float]:
    """The norm of all residuals after each step; after the fifth backward DDP's own buckets are asked for."""
    model = Model()
    names = ("second.weight", "first.weight")
    parallel = wrapped(model, ab.Bucket(names, collective="oktopk:0.2"), ab.Bucket(("second.bias", "first.bias")))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    if shares:
        parallel.share_momentum(optimizer)
    found = []
    for step in range(8):
        optimizer.zero_grad()
        parallel(torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        if step == 4:
            assert parallel._tuner is not None
            parallel._tuner.runner.use_plan(None)
        optimizer.step()
        kept = parallel.comm_state_dict()["residuals"].values()
        found.append(sum(float(piece.norm()) for piece in kept))
    parallel.close()
    return found


def test_residuals_are_sent_when_a_plan_ends_as_without_it() -> None:
    for shares in (True, False):
        for found in on_ranks(residuals_after, 2, shares):
            assert found[4] > 0 and found[5:] == [0.0] * 3


def beside_int4(rank: int) -> list[str]:
    model = Model()
    first = ab.Bucket(("second.weight", "second.bias"), collective="int4")
    parallel = wrapped(model, first, ab.Bucket(("first.weight",), collective="oktopk:0.2"), ab.Bucket(("first.bias",)))
    for step in range(3):
        parallel(torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
    kept = sorted(parallel.comm_state_dict()["velocities"])
    parallel.close()
    return kept


def test_rounded_buckets_beside_sparse_ones_have_no_velocities() -> None:
    assert on_ranks(beside_int4, 2) == [["first.weight"]] * 2
