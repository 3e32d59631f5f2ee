"""Small models, each with something that a data-parallel wrapper must get right."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.twins import WIDTH, mlp


class Branches(nn.Module):
    """Four branches of which a forward takes only some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, taken: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x).tanh()
        for index in taken:
            x = x + self.branches[index](x)
        return x


class Tied(nn.Module):
    """A weight used twice, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(self.fixed(self.inner(x).tanh()))
        return result


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(2) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # re-entrant checkpoints need an input that does
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: torch.Tensor = self.last(x)
        return result


class Reentrant(Checkpointed):
    def __init__(self) -> None:
        super().__init__(True)


class NonReentrant(Checkpointed):
    def __init__(self) -> None:
        super().__init__(False)


class Mixed(nn.Module):
    """Layers of several dtypes in one model."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float()


class WithDouble(Mixed):
    def __init__(self) -> None:
        super().__init__(torch.float32, torch.float64, torch.float32, torch.float64)


class WithBfloat16(Mixed):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)


class OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Heads(nn.Module):
    """Two outputs, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        x = self.trunk(x).tanh()
        return {"a": self.a(x), "rest": [self.b(x), "not a tensor"]}


class Scaled(nn.Linear):
    """Holds the loss scaler that belongs to its model: a test's training function has nowhere else to put it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


class Doubles(nn.Module):
    """A layer of float32 and one of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x).double()).float()
        return result
