"""Recomputation and any mix: the same bits, statistics counted once, nothing renamed, everything undone."""

import copy
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import nn

from anabranch.lean.activations.blocks import blocks_of
from anabranch.lean.activations.recompute import PatchedModel, recompute
from anabranch.lean.activations.solver import Action
from lean.activations.networks import (
    Attention,
    Net,
    Vgg,
    assert_same,
    inputs_of,
    one_thread,
    packed_bytes,
    plainly,
    trained,
)

__all__ = ["one_thread"]

BUILDERS: list[Callable[[], nn.Module]] = [Net, lambda: Net(drop=0.3), Attention, Vgg]


@pytest.mark.parametrize("build", BUILDERS)
def test_recomputed_training_is_the_same_to_the_bit(build: Callable[[], nn.Module]) -> None:
    assert_same(trained(build), trained(build, plainly, recompute))


MIXES: list[list[Action]] = [
    ["recompute", "join", "keep", "recompute", "join"],
    ["keep", "recompute", "join", "join", "keep"],
]


@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_trains_the_same_to_the_bit(mix: list[Action]) -> None:
    def treat(model: nn.Module) -> PatchedModel:
        actions: dict[str, Action] = {"": "keep"}
        before: Action = "keep"
        for block, action in zip(blocks_of(model), cycle(mix), strict=False):
            if action == "join" and not (block.joins and before != "keep"):
                action = "recompute"
            actions[block.name] = before = action
        return PatchedModel(model, actions)

    for build in BUILDERS:
        assert_same(trained(build), trained(build, plainly, treat))


def test_only_inputs_of_runs_are_saved() -> None:
    def saved(actions: dict[str, Action]) -> int:
        model = Net()
        patched = PatchedModel(model, actions)
        sizes: list[int] = []
        with packed_bytes(sizes):
            model.stage1(torch.randn(4, 8, 8, 8, requires_grad=True))
        patched.undo()
        return len(sizes)

    everything = saved({})
    each = saved({"stage1.0": "recompute", "stage1.1": "recompute", "stage1.2": "recompute"})
    one = saved({"stage1.0": "recompute", "stage1.1": "join", "stage1.2": "join"})
    assert (each, one) == (3, 1)
    assert everything > 20


def test_backward_twice_through_recomputation() -> None:
    model = Net()
    recompute(model)
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
    patched = recompute(model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == modules
    model(inputs_of(model)).sum().backward()
    assert calls[0] == "block"
    patched.undo()
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
        ({"stage9.0": "recompute"}, "no block is called 'stage9.0': .* stage1.0, stage1.1"),
        ({"stage1.0": "forget"}, "action of block 'stage1.0' is 'forget': expected one of keep, recompute"),
        ({"stage1.1": "join"}, "block 'stage1.1' cannot join"),
        ({"stage1.2": "recompute", "stage2.0": "join"}, "block 'stage2.0' cannot join"),
        ({"": "recompute"}, "no block is called ''"),
    ],
)
def test_refusals(actions: dict[str, Action], message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        PatchedModel(model, actions)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_replaced_forward_is_not_replaced_again() -> None:
    model = Net()
    patched = recompute(model)
    with pytest.raises(ValueError, match="forward of a Sequential is already replaced"):
        recompute(model)
    model(inputs_of(model)).sum().backward()
    patched.undo()


def test_inputs_of_blocks_can_be_in_host_memory() -> None:
    """By torch's own means, which replace Lean's offloading."""

    def on_cpu(model: nn.Module) -> torch.autograd.graph.save_on_cpu:
        return torch.autograd.graph.save_on_cpu()

    for build in BUILDERS:
        assert_same(trained(build), trained(build, on_cpu, recompute))
