"""Every mode, and the mix that follows from profiled steps, trains the same; ranks follow one choice."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.lean.activations import policy
from anabranch.lean.activations.cost_model import Action
from anabranch.lean.activations.policy import PROFILED_STEPS, Activations, ManagedActivations
from anabranch.lean.activations.solver import BudgetError
from anabranch.lean.activations.speeds import SpeedMeter, Speeds
from lean.activations.networks import (
    Attention,
    Net,
    SelfChoosing,
    Vgg,
    assert_same,
    inputs_of,
    one_thread,
    plainly,
    step_of,
    trained,
)

__all__ = ["one_thread"]


def test_profiled_steps_are_true_steps() -> None:
    def look(model: nn.Module) -> ManagedActivations:
        return SelfChoosing(model, Activations("auto", budget_nbytes=1 << 30, least_nbytes=256))

    for build in (Net, lambda: Net(drop=0.3), Attention, Vgg):
        assert_same(trained(build, steps=2), trained(build, plainly, look, steps=2))


@pytest.mark.parametrize(
    ("build", "budget"),
    [(Net, 90_000), (lambda: Net(drop=0.3), 140_000), (Vgg, 60_000), (Net, 1 << 20), (Vgg, 1 << 20)],
)
def test_the_chosen_mix_trains_the_same_to_the_bit(build: Callable[[], nn.Module], budget: int) -> None:
    made: list[ManagedActivations] = []

    def look(model: nn.Module) -> None:
        options = Activations("auto", budget, least_nbytes=256, window_nbytes=8192, ahead_nbytes=8192)
        made.append(SelfChoosing(model, options))

    assert_same(trained(build, steps=5), trained(build, plainly, look, steps=5))
    choice = made[0].choice
    assert choice is not None
    assert choice.forecast.peak_nbytes <= budget
    assert made[0].actions == choice.actions
    assert (set(choice.actions.values()) == {"keep"}) == (budget == 1 << 20)


@pytest.mark.parametrize("mode", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("build", [Net, Attention, Vgg])
def test_every_mode_trains_the_same_to_the_bit(build: Callable[[], nn.Module], mode: Any) -> None:
    made: list[ManagedActivations] = []

    def manage(model: nn.Module) -> None:
        made.append(ManagedActivations(model, Activations(mode, least_nbytes=256)))

    assert_same(trained(build), trained(build, plainly, manage))
    if mode == "offload":
        assert made[0].offloader is not None
        assert made[0].offloader.counts.offloaded_nbytes > 10 * 256


def test_undo_leaves_the_model_as_it_was() -> None:
    for mode in ("offload", "recompute", "auto"):
        model = Net()
        managed = ManagedActivations(model, Activations(mode, 1 << 30 if mode == "auto" else None, least_nbytes=256))
        step_of(model)()
        managed.undo()
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        step_of(model)()


def test_all_ranks_can_follow_one_choice() -> None:
    model = Net()
    theirs: dict[str, Action] = {"stage1.0": "recompute", "stage1.1": "join"}

    def agree(mine: dict[str, Any]) -> dict[str, Any]:
        return mine if "wait" in mine else {**mine, "actions": theirs}

    managed = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(4):
        managed.choose(agree)
        step_of(model)()
    assert managed.actions == theirs
    assert managed.choice is not None and managed.choice.actions == theirs
    managed.undo()


def test_ranks_wait_for_each_other_between_warming_up_and_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a machine share a bus: one that measures alone sees the speed of all of it."""
    seen: list[str] = []

    class Meter(SpeedMeter):
        def __init__(self, device: torch.device) -> None:
            seen.append("warm")
            super().__init__(device, 1 << 10)

        def measure(self) -> Speeds:
            seen.append("measured")
            return super().measure()

    monkeypatch.setattr(policy, "SpeedMeter", Meter)
    model = Net()
    managed = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(PROFILED_STEPS):
        managed.choose(barrier=lambda: seen.append("wait"))
        step_of(model)()
    assert seen == ["wait"] * PROFILED_STEPS  # for another rank, which may have seen enough
    managed.choose(barrier=lambda: seen.append("together"))
    assert seen[PROFILED_STEPS:] == ["warm", "together", "measured"] and managed.choice is not None
    managed.undo()


def test_no_rank_waits_for_one_that_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(device: torch.device) -> SpeedMeter:
        raise RuntimeError(f"no pinned memory for {device}")

    monkeypatch.setattr(policy, "SpeedMeter", without_memory)
    model, waited = Net(), []
    managed = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(PROFILED_STEPS):
        managed.choose()
        step_of(model)()
    with pytest.raises(BudgetError, match="RuntimeError: no pinned memory for cpu"):
        managed.choose(barrier=lambda: waited.append(True))
    assert waited == [True]
    managed.undo()


def test_a_budget_that_is_too_small_is_refused_in_every_forward_and_told_to_all_ranks() -> None:
    model, told = Net(), []

    def agree(mine: dict[str, Any]) -> dict[str, Any]:
        told.append(mine)
        return mine

    managed = ManagedActivations(model, Activations("auto", 10, least_nbytes=256))
    for _ in range(PROFILED_STEPS):
        managed.choose(agree)
        step_of(model)()
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"with nothing offloaded, budget_nbytes is 10: .*of 10 for copies under"):
            managed.choose(agree)
    assert [list(each) for each in told] == [["wait"], ["wait"], ["error"], ["error"]]
    managed.undo()
    step_of(model)()


def test_a_rank_follows_where_it_would_have_found_nothing_itself() -> None:
    model = Net()
    wide = SelfChoosing(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(3):
        step_of(model)()
    assert wide.choice is not None
    choice = wide.choice._asdict()
    wide.undo()
    managed = ManagedActivations(model, Activations("auto", 10, least_nbytes=256))
    managed.choose(lambda _: choice)  # also before it has seen anything
    step_of(model)()
    assert managed.choice == wide.choice


def test_a_model_without_blocks_is_profiled_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.other(torch.tanh(self.one(given)))
            return result

    for budget, fits in ((1 << 20, True), (10, False)):
        model = Two()
        managed = SelfChoosing(model, Activations("auto", budget, least_nbytes=256))
        with nullcontext() if fits else pytest.raises(BudgetError):
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
        assert (managed.choice is not None) == fits
        managed.undo()


def test_a_forward_that_someone_else_has_replaced_is_refused() -> None:
    model = Net()
    model.__dict__["forward"] = lambda given: Net.forward(model, given)
    with pytest.raises(ValueError, match="the forward of a Net is already replaced"):
        ManagedActivations(model, Activations("offload", least_nbytes=256))


def test_evaluation_between_profiled_steps_is_not_counted() -> None:
    model = Net()
    managed = SelfChoosing(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(3):
        with torch.no_grad():
            model.eval()(inputs_of(model))
        model.train()
        step_of(model)()
    assert managed.choice is not None
    assert len(managed.choice.actions) == 7
    managed.undo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "maybe"}, "mode is 'maybe': expected one of keep, offload"),
        ({"mode": "recompute", "budget_nbytes": 1}, "mode is 'recompute' with budget_nbytes=1: expected a budget"),
        ({"mode": "keep", "budget_nbytes": 5}, "mode is 'keep' with budget_nbytes=5"),
        ({"mode": "auto", "budget_nbytes": 0}, "budget_nbytes is 0"),
        ({"mode": "offload", "window_nbytes": -1}, "window_nbytes is -1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activations(**options)
