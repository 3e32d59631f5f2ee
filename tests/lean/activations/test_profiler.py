"""What a profile counts is what autograd saves; blocks that cannot be measured are named."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from anabranch.lean.activations.blocks import END
from anabranch.lean.activations.profiler import BlockProfiler
from anabranch.lean.activations.solver import Action, BlockCosts, predict
from lean.activations.networks import Guess, Net, one_thread, profiled_costs, step_of

__all__ = ["one_thread"]


def costs_by_name(model: nn.Module) -> dict[str, BlockCosts]:
    return {block.name: block for block in profiled_costs(model, step_of(model))}


def test_a_profile_counts_what_autograd_saves() -> None:
    blocks = costs_by_name(Net())
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
    assert blocks["stage1.1"].joins and not blocks["stage2.0"].joins
    assert not blocks[""].recomputes
    assert blocks[""].inner_nbytes >= 2 * whole  # what norm and relu of the stem save
    assert blocks[""].work_nbytes == 2 * whole
    assert blocks[END].nbytes == 4 * 8 * 4  # what the head was given


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


def test_a_block_that_runs_again_counts_each_time() -> None:
    """What sigmoid returns after each run but the last is outside all blocks; that of the last is after the end."""
    model, given = Repeated(), torch.randn(4, 16)
    blocks = {block.name: block for block in profiled_costs(model, lambda: model(given).sum().backward())}
    assert blocks["layers.0"].nbytes == 3 * blocks["layers.1"].nbytes and blocks["layers.0"].runs == 3
    assert blocks[""].inner_nbytes == 4 * 4 * 16 * 4
    assert blocks[END].inner_nbytes == 4 * 16 * 4 + 4 * 256 * 4


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
        profiled_costs(model, lambda: model(torch.randn(4, 16)).sum().backward())


def test_gradients_of_large_outputs_are_counted_while_everything_is_there() -> None:
    model, given = Guess(), torch.randn(4, 16)
    seen = profiled_costs(model, lambda: model(given).sum().backward())
    assert seen[-1].name == END and not seen[-1].recomputes
    assert seen[-1].inner_nbytes == 4 * 256 * 4 + 4 * 16 * 4  # what exp returned, and what the head was given
    assert seen[-1].work_nbytes == 2 * 4 * 256 * 4
    kept: dict[str, Action] = {block.name: "keep" for block in seen}
    forecast = predict(seen, kept)
    assert forecast.peak_nbytes == sum(block.nbytes for block in seen) + 8192


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
        profiled_costs(model, lambda: model(torch.randn(4, 16)).sum().backward())


class Convolving(nn.Module):
    """A convolution before the blocks, one in each of them, and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1, bias=False))
            for _ in range(2)
        )
        self.last = nn.Conv2d(8, 1, 1, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


def test_the_workspace_of_convolutions_is_counted() -> None:
    """For the largest of each block: twice its input and its weight, and its output."""
    pixel, images = 4 * 2 * 16 * 16, torch.randn(2, 3, 16, 16)
    work: list[dict[str, int]] = []
    for workspace in (0.0, 1.0):
        model = Convolving()
        profiler = BlockProfiler(model, workspace)
        for _ in range(2):
            model(images).sum().backward()
        work.append({block.name: block.work_nbytes for block in profiler.costs()})
        profiler.undo()
        assert not any(part._forward_hooks for part in model.modules())
    stem, inner, last = 2 * 4 * 3 * 8 * 9, 2 * 4 * 8 * 8 * 9, 2 * 4 * 8
    assert {name: work[1][name] - work[0][name] for name in work[0]} == {
        "": (2 * 3 + 8) * pixel + stem,
        "blocks.0": (2 * 8 + 8) * pixel + inner,
        "blocks.1": (2 * 8 + 8) * pixel + inner,
        END: (2 * 8 + 1) * pixel + last,
    }


class Spectral(nn.Module):
    """A convolution whose weight is computed, with a buffer that changes each time; it is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(parametrizations.spectral_norm(nn.Conv2d(3, 3, 3, padding=1)) for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = block(input=given)
        return given


def test_looking_at_convolutions_changes_nothing() -> None:
    images, ended, work = torch.randn(2, 3, 8, 8), [], []
    for workspace in (0.0, 1.0):
        model = Spectral()
        profiler = BlockProfiler(model, workspace)
        for _ in range(2):
            model(images).sum().backward()
        work.append(max(cost.work_nbytes for cost in profiler.costs()))
        profiler.undo()
        ended.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert work[1] > work[0]
    assert ended[0] and all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])
