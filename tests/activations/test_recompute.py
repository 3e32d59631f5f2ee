"""Recomputation and any mix: the same bits, statistics counted once, nothing renamed, everything undone."""

import copy
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import nn

from activations.networks import Attention, Net, Vgg, assert_same, inputs_of, one_thread, packed_bytes, plainly, trained
from anabranch.activations.blocks import blocks_of
from anabranch.activations.offloader import Offloader
from anabranch.activations.recompute import PatchedModel, recompute
from anabranch.activations.solver import Action

__all__ = ["one_thread"]

BUILDERS: list[Callable[[], nn.Module]] = [Net, lambda: Net(drop=0.3), Attention, Vgg]


def offloader() -> Offloader:
    return Offloader(torch.device("cpu"), least_nbytes=256, window_nbytes=8192, ahead_nbytes=8192)


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in blocks_of(model)]


def test_blocks_are_what_repeats() -> None:
    assert names(Net()) == ["stage1.0", "stage1.1", "stage1.2", "stage2.0", "stage2.1"]
    assert [unit.joins for unit in blocks_of(Net())] == [False, True, True, False, True]
    assert names(Attention()) == ["layers.0", "layers.1", "layers.2"]
    assert not any(unit.joins for unit in blocks_of(Attention()))


def test_layers_in_place_and_without_a_matrix_belong_to_the_one_before() -> None:
    units = {unit.name: unit.children for unit in blocks_of(Vgg())}
    assert units == {
        "features.0": ("0", "1", "2"),
        "features.3": ("3", "4", "5"),
        "features.6": ("6", "7", "8"),
        "features.9": ("9", "10", "11", "12"),
        "classifier.0": ("0",),
        "classifier.1": ("1", "2", "3"),
        "classifier.4": ("4",),
    }


def test_stages_of_blocks_are_looked_into_and_blocks_of_layers_are_not() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())

    assert names(nn.Sequential(nn.Sequential(block(), block()), block())) == ["0.0", "0.1", "1"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]
    assert names(nn.Linear(4, 4)) == []


def test_a_model_without_containers_is_taken_by_its_parts() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Part(), Part(), nn.Linear(4, 4)
            self.again = self.second

    assert names(Whole()) == ["first", "second"]


@pytest.mark.parametrize("build", BUILDERS)
def test_recomputed_training_is_the_same_to_the_bit(build: Callable[[], nn.Module]) -> None:
    assert_same(trained(build), trained(build, plainly, recompute))


MIXES: list[list[Action]] = [
    ["recompute", "join", "offload", "recompute+offload", "join"],
    ["keep", "recompute+offload", "join", "offload", "keep"],
    ["offload", "keep", "recompute", "keep", "recompute"],
]


@pytest.mark.parametrize("rest", ["keep", "offload"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("build", BUILDERS)
def test_any_mix_trains_the_same_to_the_bit(build: Callable[[], nn.Module], mix: list[Action], rest: Action) -> None:
    home = offloader()

    def treat(model: nn.Module) -> PatchedModel:
        actions: dict[str, Action] = {"": rest}
        before: Action = "keep"
        for unit, action in zip(blocks_of(model), cycle(mix), strict=False):
            if action == "join" and not (unit.joins and before not in ("keep", "offload")):
                action = "recompute"
            actions[unit.name] = before = action
        return PatchedModel(model, actions, home)

    assert_same(trained(build), trained(build, plainly, treat))
    assert home.counts.offloaded > 0
    assert home.live == 0


def test_only_inputs_of_runs_are_saved() -> None:
    def saved(actions: dict[str, Action]) -> int:
        model = Net()
        treated = PatchedModel(model, actions)
        sizes: list[int] = []
        with packed_bytes(sizes):
            model.stage1(torch.randn(4, 8, 8, 8, requires_grad=True))
        treated.undo()
        return len(sizes)

    everything = saved({})
    each = saved({"stage1.0": "recompute", "stage1.1": "recompute", "stage1.2": "recompute"})
    one = saved({"stage1.0": "recompute", "stage1.1": "join", "stage1.2": "join"})
    assert (each, one) == (3, 1)
    assert everything > 20


def test_backward_twice_through_recomputation() -> None:
    model, home = Net(), offloader()
    PatchedModel(model, dict.fromkeys(names(model), "recompute+offload"), home)
    batch = inputs_of(model)
    loss = model(batch).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    statistics = copy.deepcopy(dict(model.named_buffers()))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * once[name])
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())


def test_names_types_and_hooks_stay_and_undo_undoes() -> None:
    model = Net()
    keys, modules = list(model.state_dict()), [type(module) for module in model.modules()]
    calls: list[str] = []
    model.stage1[0].register_forward_hook(lambda *_: calls.append("block"))
    treated = recompute(model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == modules
    model(inputs_of(model)).sum().backward()
    assert calls[0] == "block"
    treated.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_copy_calls_its_own_modules() -> None:
    model = Net()
    recompute(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.stage1.parameters():
            parameter.zero_()
    assert not torch.equal(model(inputs_of(model)), twin(inputs_of(model)))
    twin(inputs_of(model)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_runs_as_it_is() -> None:
    model = Net().eval()
    wanted = model(inputs_of(model))
    recompute(model)
    with torch.no_grad():
        assert torch.equal(model(inputs_of(model)), wanted)
    assert torch.equal(model(inputs_of(model)), wanted)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"stage9.0": "keep"}, "no block is called 'stage9.0': .* stage1.0, stage1.1"),
        ({"stage1.0": "forget"}, "action of block 'stage1.0' is 'forget': expected one of keep, offload"),
        ({"stage1.0": "offload"}, "there is no offloader"),
        ({"stage1.1": "join"}, "block 'stage1.1' cannot join"),
        ({"stage1.2": "recompute", "stage2.0": "join"}, "block 'stage2.0' cannot join"),
        ({"": "recompute"}, "outside all blocks is 'recompute'"),
    ],
)
def test_refusals(actions: dict[str, Action], message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        PatchedModel(model, actions)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_replaced_forward_is_not_replaced_again() -> None:
    model = Net()
    treated = recompute(model)
    with pytest.raises(ValueError, match="forward of a Sequential is already replaced"):
        recompute(model)
    model(inputs_of(model)).sum().backward()
    treated.undo()
