"""Every mode, and the mix that follows from profiled steps, trains the same; ranks follow one choice."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.lean.activations.profiler import PROFILED_STEPS, ManagedActivations
from anabranch.lean.activations.solver import Action, BudgetError, choose, smallest_budget
from anabranch.lean.options import Activations
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

ROOMY = 1 << 30


def test_profiled_steps_are_true_steps() -> None:
    for build in (Net, lambda: Net(drop=0.3), Attention, Vgg):
        look = trained(build, plainly, lambda model: SelfChoosing(model, ROOMY), steps=2)
        assert_same(trained(build, steps=2), look)


@pytest.mark.parametrize(
    ("build", "budget"),
    [(Net, 110_000), (lambda: Net(drop=0.3), 150_000), (Vgg, 70_000), (Net, 1 << 20), (Vgg, 1 << 20)],
)
def test_the_chosen_mix_trains_the_same_to_the_bit(build: Callable[[], nn.Module], budget: int) -> None:
    made: list[ManagedActivations] = []
    managed = trained(build, plainly, lambda model: made.append(SelfChoosing(model, budget)), steps=5)
    assert_same(trained(build, steps=5), managed)
    choice = made[0].agreed
    assert choice["forecast"].peak_nbytes <= budget
    assert made[0]._patched is not None and made[0]._patched.actions == choice["actions"]
    assert (set(choice["actions"].values()) == {"keep"}) == (budget == 1 << 20)


def test_every_mode_trains_the_same_to_the_bit() -> None:
    for build in (Net, Attention, Vgg):
        kept = trained(build, plainly, lambda model: ManagedActivations(model, "keep"))
        assert_same(kept, trained(build, plainly, lambda model: ManagedActivations(model, "recompute")))
        assert_same(kept, trained(build))


def test_undo_leaves_the_model_as_it_was() -> None:
    modes: tuple[Any, ...] = ("keep", "recompute", "auto")
    for mode in modes:
        model = Net()
        managed = ManagedActivations(model, mode)
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

    managed = ManagedActivations(model, "auto")
    for _ in range(4):
        managed.choose(lambda blocks: choose(blocks, ROOMY)._asdict(), agree)
        step_of(model)()
    assert managed._patched is not None and managed._patched.actions == theirs
    assert managed.agreed["actions"] == theirs
    managed.undo()


def test_a_budget_that_is_too_small_is_refused_in_every_forward_and_told_to_all_ranks() -> None:
    model, told = Net(), []

    def agree(mine: dict[str, Any]) -> dict[str, Any]:
        told.append(mine)
        return mine

    managed = ManagedActivations(model, "auto")
    for _ in range(PROFILED_STEPS):
        managed.choose(lambda blocks: choose(blocks, 10)._asdict(), agree)
        step_of(model)()
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"keeps within 10 bytes"):
            managed.choose(lambda blocks: choose(blocks, 10)._asdict(), agree)
    assert [list(each) for each in told] == [["wait"], ["wait"], ["error"], ["error"]]
    managed.choose(lambda blocks: choose(blocks, smallest_budget(blocks))._asdict())
    assert managed.agreed
    managed.undo()
    step_of(model)()


def test_a_choice_that_fails_is_an_error_on_all_ranks() -> None:
    def failing(blocks: object) -> dict[str, Any]:
        raise RuntimeError("no memory to measure")

    model = Net()
    managed = ManagedActivations(model, "auto")
    for _ in range(PROFILED_STEPS):
        managed.choose(failing)
        step_of(model)()
    with pytest.raises(BudgetError, match="RuntimeError: no memory to measure"):
        managed.choose(failing)
    managed.undo()


def test_a_rank_follows_where_it_would_have_found_nothing_itself() -> None:
    model = Net()
    wide = SelfChoosing(model, ROOMY)
    for _ in range(3):
        step_of(model)()
    assert wide.agreed
    choice = wide.agreed
    wide.undo()
    managed = ManagedActivations(model, "auto")
    managed.choose(lambda blocks: choose(blocks, 10)._asdict(), lambda _: choice)  # also before it has seen anything
    step_of(model)()
    assert managed.agreed == wide.agreed == choice


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
        managed = SelfChoosing(model, budget)
        with nullcontext() if fits else pytest.raises(BudgetError):
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
        assert bool(managed.agreed) == fits
        managed.undo()


def test_what_is_refused() -> None:
    model = Net()
    model.__dict__["forward"] = lambda given: Net.forward(model, given)
    with pytest.raises(ValueError, match="the forward of a Net is already replaced"):
        ManagedActivations(model, "auto")
    with pytest.raises(ValueError, match="the model has no parameters"):
        ManagedActivations(nn.Tanh(), "auto")


def test_evaluation_between_profiled_steps_is_not_counted() -> None:
    model = Net()
    managed = SelfChoosing(model, ROOMY)
    for _ in range(3):
        with torch.no_grad():
            model.eval()(inputs_of(model))
        model.train()
        step_of(model)()
    assert managed.agreed
    assert len(managed.agreed["actions"]) == 7
    managed.undo()


def test_hooks_of_the_program_go_on_while_blocks_are_profiled() -> None:
    """As with ``save_on_cpu()`` around forward, which is what to use where activations should be in host memory."""
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.untyped_storage().nbytes())
        return tensor.detach().clone()

    def around(model: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    profiled = trained(Net, around, lambda model: SelfChoosing(model, ROOMY), steps=2)
    assert packed
    assert_same(trained(Net, steps=2), profiled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "offload"}, "expected keep or recompute; to move activations to the host, use torch.autograd"),
        ({"mode": "auto", "budget_nbytes": 1 << 30}, "a budget of activations alone is retired; use Lean"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activations(**options)
