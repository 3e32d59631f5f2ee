"""Offloading beside the user's own hooks, checkpointing and autocast, and with several graphs."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from activations.networks import Attention, Net, assert_same, inputs_of, offloaded, one_thread, plainly, small, trained

__all__ = ["one_thread"]


def test_hooks_of_the_users_own_win_inside_and_outside() -> None:
    model = Net()
    mine: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        mine.append(tensor.shape)
        return tensor.detach()

    own = saved_tensors_hooks(pack, lambda tensor: tensor)
    offloader = small()
    with own, offloader.hooks(model):
        model(inputs_of(model)).sum().backward()
    assert offloader.counts.stood_back == 1
    assert offloader.counts.offloaded == 0
    count = len(mine)
    assert count > 20
    with offloader.hooks(model):
        x = model.norm(model.stem(inputs_of(model))).relu()
        with own, offloader.hooks(model):
            x = model.stage1(x)
        model.stage2(x).sum().backward()
    assert count < len(mine) < 2 * count
    assert offloader.counts.offloaded > 3


def test_keep_within_hooks() -> None:
    offloader = small()
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = x.exp()
        with offloader.keep():
            y = y.exp().exp()
        assert offloader.counts.offloaded == 1
        y = y.exp()
    assert offloader.counts.offloaded == 2
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_the_users_own_checkpointing(reentrant: bool) -> None:
    def checkpointed(model: nn.Module) -> None:
        assert isinstance(model, Net)
        stage = model.stage1
        model.stage1.forward = lambda x: checkpoint(  # type: ignore[method-assign]
            nn.Sequential.forward, stage, x, use_reentrant=reentrant
        )

    offloader = small(window=0)
    assert_same(trained(Net, plainly, checkpointed), trained(Net, offloaded(offloader), checkpointed))
    assert offloader.counts.offloaded > 10
    assert offloader.live == 0


def test_within_the_users_own_checkpointing() -> None:
    offloader, model = small(), Net()
    twin = copy.deepcopy(model)

    def lean(x: torch.Tensor) -> torch.Tensor:
        with offloader.hooks(model):
            result: torch.Tensor = model(x)
        return result

    batch = inputs_of(model).requires_grad_()
    checkpoint(lean, batch, use_reentrant=False).sum().backward()
    twin(inputs_of(model).requires_grad_()).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert offloader.counts.stood_back == 2  # in forward and in recomputation


def test_under_autocast() -> None:
    def half(model: nn.Module) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    offloader = small(window=0)

    class Both:
        def __init__(self, model: nn.Module) -> None:
            self.inner = offloader.hooks(model)
            self.outer = half(model)

        def __enter__(self) -> None:
            self.outer.__enter__()
            self.inner.__enter__()

        def __exit__(self, *exception: object) -> None:
            self.inner.__exit__(None, None, None)
            self.outer.__exit__(None, None, None)

    assert_same(trained(Net, half), trained(Net, Both))
    assert offloader.counts.offloaded > 10


def test_two_graphs_at_once() -> None:
    offloader, model = small(window=0), Attention()
    twin = copy.deepcopy(model)
    with offloader.hooks(model):
        one, two = model(inputs_of(model)), model(inputs_of(model) * 2)
    (one.sum() + two.square().sum()).backward()
    (twin(inputs_of(model)).sum() + twin(inputs_of(model) * 2).square().sum()).backward()
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None
        assert torch.equal(mine.grad, wanted.grad)
    assert offloader.live == 0
