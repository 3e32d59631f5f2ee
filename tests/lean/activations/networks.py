"""Small models with what makes recomputation hard, and how to compare two trainings of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import nn

from anabranch.lean.activations.profiler import BlockProfiler, ManagedActivations
from anabranch.lean.activations.solver import BlockCosts, choose

Around = Callable[[nn.Module], AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For whoever imports it: tensors this small only make threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bottleneck(nn.Module):
    """As in a ResNet: activations in place, a skip that both paths save, statistics that count batches."""

    def __init__(self, given: int, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, given, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm(self.first(x)))
        y = self.norm2(self.second(self.drop(y)))
        y += x
        result: torch.Tensor = self.relu(y)
        return result


class Net(nn.Module):
    """A stem, two stages of blocks, a head."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.stage1 = nn.Sequential(*(Bottleneck(8, 4, drop) for _ in range(3)))
        self.stage2 = nn.Sequential(*(Bottleneck(8, 6, drop) for _ in range(2)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.stage2(self.stage1(x)).mean((2, 3))
        result: torch.Tensor = self.head(x)
        return result


class Attention(nn.Module):
    """Queries, keys and values as views of one tensor, a list of layers, keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.sum(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = self.qkv(x).split(16, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v
        result: torch.Tensor = x + self.out(mixed).tanh()
        return result


class Vgg(nn.Module):
    """Layers in one long Sequential, with activations in place between them."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        relu = nn.ReLU(inplace=True)  # one for all, which named_children() would show once
        for given, width in ((3, 4), (4, 6), (6, 6), (6, 8)):
            layers += [nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), relu]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(8 * 16, 12), nn.ReLU(True), nn.Dropout(), nn.Linear(12, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classifier(self.features(x))
        return result


def inputs_of(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    """A batch that suits one of these models."""
    shape = (4, 10, 16) if isinstance(model, Attention) else (4, 3, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device)


def plainly(model: nn.Module) -> AbstractContextManager[object]:
    """Nothing around the forward."""
    return nullcontext()


def trained(
    build: Callable[[], nn.Module],
    around: Around = plainly,
    prepare: Callable[[nn.Module], object] = bool,
    steps: int = 3,
) -> dict[str, torch.Tensor]:
    """Weights, statistics and gradients after some steps from one seed: two equal dicts are equal trainings."""
    torch.manual_seed(0)
    model = build()
    prepared = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = inputs_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        with around(model):
            output = model(batch)
        output.square().mean().backward()
        optimizer.step()
    del prepared
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients, "next random": torch.rand(3)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@contextmanager
def packed_bytes(sizes: list[int]) -> Iterator[None]:
    """Collect the sizes of what autograd saves."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def profiled_costs(model: nn.Module, step: Callable[[], None]) -> list[BlockCosts]:
    """The costs of the model's blocks as measured in the second of two calls of ``step``, a forward and backward."""
    profiler = BlockProfiler(model)
    try:
        step()
        step()
        return profiler.costs()
    finally:
        profiler.undo()


class SelfChoosing(ManagedActivations):
    """Mode "auto" of a model that is trained by itself: every forward with gradients begins with a choice."""

    def __init__(self, model: nn.Module, budget_nbytes: int) -> None:
        super().__init__(model, "auto")
        self._budget_nbytes = budget_nbytes
        self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            self.choose(lambda blocks: choose(blocks, self._budget_nbytes)._asdict())

    def undo(self) -> None:
        super().undo()
        self._hook.remove()


def step_of(model: nn.Module) -> Callable[[], None]:
    batch = inputs_of(model)

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


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
