"""On a GPU: the same bits, less memory, buffers used again, and the host never waits."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from anabranch.lean.activations.blocks import END, blocks_of
from anabranch.lean.activations.cost_model import Action
from anabranch.lean.activations.offloader import MIB, Offloader
from anabranch.lean.activations.policy import Activations
from anabranch.lean.activations.recompute import PatchedModel
from anabranch.lean.activations.speeds import measure_link
from gpu import ON_GPU, no_waiting
from lean.activations.networks import Bottleneck, CountedOffloader, SelfChoosing, profiled_costs

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


def step(model: nn.Module, data: torch.Tensor, around: AbstractContextManager[object] | None = None) -> None:
    model.zero_grad()
    with around or nullcontext():
        output = model(data)
    output.square().mean().backward()


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
@pytest.mark.parametrize("window", [0, 64, 1024])
@pytest.mark.parametrize("slow", ["nothing", "computing", "copying"])
def test_offloaded_gradients_are_the_same_to_the_bit(drop: float, window: int, slow: str) -> None:
    model, data = network(drop), batch()
    twin = copy.deepcopy(model)
    offloader = CountedOffloader(torch.device("cuda"), window_nbytes=window * MIB, ahead_nbytes=window * MIB)
    for number in range(3):
        torch.manual_seed(number)
        step(twin, data)
        torch.manual_seed(number)
        if slow == "computing":
            torch.cuda._sleep(200_000_000)  # the host is a whole step ahead
        elif slow == "copying":
            for stream in (offloader._copies._to_host, offloader._copies._to_device):  # type: ignore[attr-defined]
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(200_000_000)
        step(model, data, offloader.hooks(model))
        assert_same(gradients(twin), gradients(model))
    assert offloader.offloaded >= 3 * 4 * DEPTH
    assert offloader.live_storages == 0


def test_the_host_never_waits_and_buffers_are_used_again() -> None:
    model, data = network(), batch()
    offloader = CountedOffloader(torch.device("cuda"), window_nbytes=64 * MIB, ahead_nbytes=64 * MIB)
    step(model, data, offloader.hooks(model))
    allocations = offloader.pool.allocations
    with no_waiting():
        for _ in range(3):
            step(model, data, offloader.hooks(model))
    assert offloader.pool.allocations == allocations
    assert 10 * offloader.counts.late_fetches <= offloader.fetched


def test_the_host_never_waits_in_a_mix() -> None:
    model, data = network(), batch()
    offloader = Offloader(torch.device("cuda"), window_nbytes=64 * MIB, ahead_nbytes=64 * MIB)
    mix: list[Action] = ["recompute", "join", "offload", "recompute+offload", "join", "keep"]
    actions = {block.name: mix[number % len(mix)] for number, block in enumerate(blocks_of(model))}
    twin = copy.deepcopy(model)
    PatchedModel(model, actions, offloader)
    step(model, data)
    step(twin, data)
    assert_same(gradients(twin), gradients(model))
    with no_waiting():
        step(model, data)


def test_memory_falls_to_the_windows_and_does_not_depend_on_how_far_the_host_is_ahead() -> None:
    model, data = network(), batch()
    offloader = Offloader(torch.device("cuda"), window_nbytes=2 * WHOLE, ahead_nbytes=2 * WHOLE)
    step(model, data)
    kept = peak_of(lambda: step(model, data))
    step(model, data, offloader.hooks(model))
    lean = peak_of(lambda: step(model, data, offloader.hooks(model)))

    def far_ahead() -> None:
        torch.cuda._sleep(1_000_000_000)
        step(model, data, offloader.hooks(model))

    ahead = peak_of(far_ahead)
    assert kept > 3 * DEPTH * WHOLE * 0.9
    assert lean < 0.5 * kept
    assert ahead < lean + 2 * WHOLE


def test_nothing_stays_on_the_device_when_closed() -> None:
    model, data = network(), batch()
    step(model, data)
    gc.collect()  # what earlier tests left
    before = torch.cuda.memory_allocated()
    offloader = Offloader(torch.device("cuda"))
    step(model, data, offloader.hooks(model))
    offloader.close()
    assert torch.cuda.memory_allocated() == before
    assert offloader.pool.nbytes == 0


def test_a_profile_and_the_mix_it_leads_to() -> None:
    model, data = network(), batch()
    twin = copy.deepcopy(model)
    blocks = profiled_costs(copy.deepcopy(model), lambda: None, Offloader(torch.device("cuda")))
    assert [block.name for block in blocks] == ["", END]  # nothing ran
    seen = copy.deepcopy(model)
    blocks = profiled_costs(seen, lambda: step(seen, data), Offloader(torch.device("cuda")))
    assert len(blocks) == DEPTH + 2
    assert all(block.forward_s > 0 and block.input_nbytes == WHOLE for block in blocks[1:-1])
    budget = 12 * WHOLE  # the workspace of a convolution counts: one block needs up to 8.5, copies under way 2
    options = Activations("auto", budget, window_nbytes=WHOLE, ahead_nbytes=WHOLE)
    managed = SelfChoosing(model, options)
    for _ in range(5):
        step(model, data)
        step(twin, data)
        assert_same(gradients(twin), gradients(model))
    assert managed.choice is not None
    forecast = managed.choice.forecast
    assert forecast.peak_nbytes <= budget - (2 * WHOLE if forecast.moved_nbytes else 0)
    assert peak_of(lambda: step(model, data)) < 1.5 * budget + 6 * WHOLE  # with gradients of activations and workspaces
    managed.undo()


def test_the_link_is_faster_than_a_disk() -> None:
    link = measure_link(torch.device("cuda"))
    assert link.out_nbytes_per_s > 1e9
    assert link.back_nbytes_per_s > 1e9
