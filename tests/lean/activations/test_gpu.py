"""On a GPU: the same bits, less memory, and the host never waits."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from anabranch.lean.activations.blocks import END, blocks_of
from anabranch.lean.activations.recompute import PatchedModel, recompute
from anabranch.lean.activations.solver import Action
from gpu import ON_GPU, no_waiting
from lean.activations.networks import Bottleneck, SelfChoosing, profiled_costs

pytestmark = ON_GPU

DEPTH = 12
WHOLE = 32 * 64 * 56 * 56 * 4  # bytes of the activation between two blocks


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Convolutions that give the same bits every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def network(drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Bottleneck(64, 32, drop) for _ in range(DEPTH))).cuda()


def batch() -> torch.Tensor:
    return torch.randn(32, 64, 56, 56, generator=torch.Generator().manual_seed(1)).cuda()


def step(model: nn.Module, data: torch.Tensor) -> None:
    model.zero_grad()
    model(data).square().mean().backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.clone() for name, tensor in {**found, **dict(model.named_buffers())}.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def peak_of(run: Callable[[], None]) -> int:
    """Bytes beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_mix_has_the_same_bits_and_the_host_never_waits(drop: float) -> None:
    model, data = network(drop), batch()
    mix: list[Action] = ["recompute", "join", "keep", "recompute", "join", "keep"]
    actions = {block.name: mix[number % len(mix)] for number, block in enumerate(blocks_of(model))}
    twin = copy.deepcopy(model)
    PatchedModel(model, actions)
    for number in range(3):
        torch.manual_seed(number)
        step(model, data)
        torch.manual_seed(number)
        step(twin, data)
        assert_same(gradients(twin), gradients(model))
    if not drop:
        with no_waiting():
            step(model, data)


def test_recomputing_takes_less_memory() -> None:
    model, data = network(), batch()
    step(model, data)
    kept = peak_of(lambda: step(model, data))
    recompute(model)
    step(model, data)
    assert kept > 3 * DEPTH * WHOLE * 0.9
    assert peak_of(lambda: step(model, data)) < 0.7 * kept


def test_a_profile_and_the_mix_it_leads_to() -> None:
    model, data = network(), batch()
    twin = copy.deepcopy(model)
    blocks = profiled_costs(copy.deepcopy(model), lambda: None)
    assert [block.name for block in blocks] == ["", END]  # nothing ran
    seen = copy.deepcopy(model)
    blocks = profiled_costs(seen, lambda: step(seen, data))
    assert len(blocks) == DEPTH + 2
    assert all(block.forward_s > 0 and block.input_nbytes == WHOLE for block in blocks[1:-1])
    budget = (DEPTH + 12) * WHOLE  # the workspace of a convolution counts: one block needs up to 8.5
    managed = SelfChoosing(model, budget)
    for _ in range(5):
        step(model, data)
        step(twin, data)
        assert_same(gradients(twin), gradients(model))
    assert managed.agreed
    assert managed.agreed["forecast"].peak_nbytes <= budget
    assert peak_of(lambda: step(model, data)) < 1.5 * budget + 6 * WHOLE  # with gradients of activations and workspaces
    managed.undo()
