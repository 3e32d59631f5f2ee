"""What a survey sees is what autograd saves, the surveyed steps are true steps, and the mix follows from them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from activations.networks import Attention, Net, Vgg, assert_same, inputs_of, one_thread, plainly, trained
from anabranch.activations.blocks import END
from anabranch.activations.cost_model import Block
from anabranch.activations.offloader import Offloader
from anabranch.activations.policy import SURVEY_STEPS, Activations, ManagedActivations
from anabranch.activations.profiler import Survey, measure_link, survey
from anabranch.activations.recompute import PatchedModel
from anabranch.activations.solver import Action, BudgetError, predict

__all__ = ["one_thread"]

CPU = torch.device("cpu")


def step_of(model: nn.Module) -> Callable[[], None]:
    batch = inputs_of(model)

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


def surveyed(model: nn.Module) -> dict[str, Block]:
    seen = survey(model, step_of(model), Offloader(CPU, least_nbytes=256))
    return {block.name: block for block in seen}


def test_a_survey_counts_what_autograd_saves() -> None:
    blocks = surveyed(Net())
    assert list(blocks) == ["", "stage1.0", "stage1.1", "stage1.2", "stage2.0", "stage2.1", END]
    whole = 4 * 8 * 8 * 8 * 4  # bytes of an activation with 8 channels
    for name in ("stage1.0", "stage1.1", "stage1.2"):
        block = blocks[name]
        # the norms save their inputs, the first relu its output; that of the second is the next one's input
        assert block.input_nbytes == whole
        assert whole // 2 + whole // 2 + whole <= block.inner_nbytes < 2 * whole + 256
        assert block.work_nbytes == 2 * whole  # the gradients of its output and of what comes before
        assert block.forward_s > 0
        assert block.backward_s >= 0
    assert [blocks[name].shared_nbytes for name in blocks][1:-1] == [0, whole, whole, whole, whole]
    assert blocks["stage1.1"].joins and not blocks["stage2.0"].joins
    assert not blocks[""].recomputes
    assert blocks[""].inner_nbytes >= 2 * whole  # what norm and relu of the stem save
    assert blocks[""].work_nbytes == 2 * whole
    assert blocks[END].nbytes == blocks[END].work_nbytes == 0  # its head saves nothing of note


def test_surveyed_steps_are_true_steps() -> None:
    def look(model: nn.Module) -> ManagedActivations:
        return ManagedActivations(model, Activations("auto", budget_nbytes=1 << 30, least_nbytes=256))

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
        made.append(ManagedActivations(model, options))

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
        assert made[0].offloader.counts.offloaded > 10


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

    managed = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256), waits=True)
    for _ in range(4):
        managed.choose(agree)
        step_of(model)()
    assert managed.actions == theirs
    assert managed.choice is not None and managed.choice.actions == theirs
    managed.undo()


def test_a_budget_that_is_too_small_is_refused_in_every_forward_and_told_to_all_ranks() -> None:
    model, told = Net(), []

    def agree(mine: dict[str, Any]) -> dict[str, Any]:
        told.append(mine)
        return mine

    managed = ManagedActivations(model, Activations("auto", 10, least_nbytes=256), waits=True)
    for _ in range(SURVEY_STEPS):
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
    wide = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(3):
        step_of(model)()
    assert wide.choice is not None
    choice = wide.choice._asdict()
    wide.undo()
    managed = ManagedActivations(model, Activations("auto", 10, least_nbytes=256), waits=True)
    managed.choose(lambda _: choice)  # also before it has seen anything
    step_of(model)()
    assert managed.choice == wide.choice


def test_a_model_without_blocks_is_surveyed_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.other(torch.tanh(self.one(given)))
            return result

    for budget, fits in ((1 << 20, True), (10, False)):
        model = Two()
        managed = ManagedActivations(model, Activations("auto", budget, least_nbytes=256))
        with nullcontext() if fits else pytest.raises(BudgetError):
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
        assert (managed.choice is not None) == fits
        managed.undo()


class Repeated(nn.Module):
    """Blocks in another order than they are declared in, one of them used again and again, and a large end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 256)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for number in (2, 1, 0, 0, 0):
            given = torch.sigmoid(self.layers[number](given))
        return torch.exp(self.head(given))


def test_the_last_block_is_the_one_that_runs_last() -> None:
    model, given = Repeated(), torch.randn(4, 16)
    survey = Survey(model, Offloader(CPU, least_nbytes=1))
    for _ in range(2):
        model(given).sum().backward()
    survey.undo()
    assert survey.last == ("layers.0", 3)
    blocks = {block.name: block for block in survey.blocks()}
    assert blocks["layers.0"].nbytes == 3 * blocks["layers.1"].nbytes
    actions: dict[str, Any] = dict.fromkeys(blocks, "keep") | {"": "offload"}
    offloader = Offloader(CPU, least_nbytes=1)
    before = sum(parameter.grad.abs().sum() for parameter in model.parameters() if parameter.grad is not None)
    treated = PatchedModel(model, actions, offloader, last=survey.last)
    result = model(given)
    # what sigmoid returns after each but the last run, which is after the end
    assert offloader.counts.offloaded_nbytes == 4 * 4 * 16 * 4
    model.zero_grad()
    result.sum().backward()
    treated.undo()
    assert before > 0 and all(parameter.grad is not None for parameter in model.parameters())


def test_a_forward_that_someone_else_has_replaced_is_refused() -> None:
    model = Net()
    model.__dict__["forward"] = lambda given: Net.forward(model, given)
    with pytest.raises(ValueError, match="the forward of a Net is already replaced"):
        ManagedActivations(model, Activations("offload", least_nbytes=256))


def test_evaluation_between_surveyed_steps_is_not_counted() -> None:
    model = Net()
    managed = ManagedActivations(model, Activations("auto", 1 << 30, least_nbytes=256))
    for _ in range(3):
        with torch.no_grad():
            model.eval()(inputs_of(model))
        model.train()
        step_of(model)()
    assert managed.choice is not None
    assert len(managed.choice.actions) == 7
    managed.undo()


def test_a_block_that_changes_its_input_is_refused() -> None:
    class Rude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x.relu_())
            return result

    model = nn.Sequential(nn.Linear(16, 16), Rude())
    with pytest.raises(ValueError, match="block '1' changes its input in place"):
        survey(model, lambda: model(torch.randn(4, 16)).sum().backward(), Offloader(CPU))


def test_the_link_has_a_speed() -> None:
    link = measure_link(CPU, 1 << 20)
    assert link.out_nbytes_per_s > 0
    assert link.back_nbytes_per_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "maybe"}, "mode is 'maybe': expected one of keep, offload"),
        ({"mode": "auto"}, "mode is 'auto' with budget_nbytes=None: expected a budget"),
        ({"mode": "keep", "budget_nbytes": 5}, "mode is 'keep' with budget_nbytes=5"),
        ({"mode": "auto", "budget_nbytes": 0}, "budget_nbytes is 0"),
        ({"mode": "offload", "window_nbytes": -1}, "window_nbytes is -1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activations(**options)


class Guess(nn.Module):
    """Blocks, and outputs that are larger than anything before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 256)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
        return torch.exp(self.head(given))


def test_gradients_of_large_outputs_are_counted_while_everything_is_there() -> None:
    model, given = Guess(), torch.randn(4, 16)
    seen = survey(model, lambda: model(given).sum().backward(), Offloader(CPU, least_nbytes=256))
    assert seen[-1].name == END and not seen[-1].offloads
    assert seen[-1].inner_nbytes == 4 * 256 * 4 + 4 * 16 * 4  # what exp returned, and what the head was given
    assert seen[-1].work_nbytes == 2 * 4 * 256 * 4
    kept: dict[str, Action] = {block.name: "keep" for block in seen}
    forecast = predict(seen, measure_link(CPU), kept)
    assert forecast.peak_nbytes == sum(block.nbytes for block in seen) + 8192


def test_what_backward_begins_with_is_never_offloaded() -> None:
    offloader = Offloader(CPU, least_nbytes=1)
    leaving = {}
    for end in ("offload", "keep"):
        model, given = Guess(), torch.randn(4, 16)
        actions: dict[str, Any] = {"": "offload", END: end, "layers.0": "keep", "layers.1": "keep", "layers.2": "keep"}
        before = offloader.counts.offloaded_nbytes
        treated = PatchedModel(model, actions, offloader, last=("layers.2", 1))
        result = model(given)
        leaving[end] = offloader.counts.offloaded_nbytes - before
        result.sum().backward()
        ours = [parameter.grad for parameter in model.parameters()]
        treated.undo()
        model.zero_grad()
        model(given).sum().backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(ours, model.parameters(), strict=True))  # type: ignore[arg-type]
        model.layers[-1](given).sum().backward()  # nothing stays open when a block is run by itself
    assert leaving["offload"] - leaving["keep"] >= 4 * 256 * 4


class Keeping(nn.Module):
    """Keeps what it computed for those that come after, as attention with a cache does."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(16, 16), kept

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.kept.append(torch.tanh(self.inner(given)))
        return self.kept[-1]


def test_a_block_that_keeps_something_of_a_run_is_named() -> None:
    kept: list[torch.Tensor] = []
    layers = nn.ModuleList(Keeping(kept) for _ in range(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                given = layer(given)
            return torch.stack(kept).sum(0)

    model = Model()
    with pytest.raises(RuntimeError, match=r"block 'layers.[01]' was run twice.*use_cache=False"):
        survey(model, lambda: model(torch.randn(4, 16)).sum().backward(), Offloader(CPU))
