"""Small models with what makes memory hard to predict: convolutions, attention, dropout, tied and frozen weights."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from anabranch.tools.predict.memory.probe import Build, Loss


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu_()))
        result: torch.Tensor = (x + inner).relu_()
        return result


class Images(nn.Sequential):
    """Convolutions, then a wide linear layer, as VGG has."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10),
        )  # fmt: skip


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return result


class Language(nn.Module):
    """A transformer whose output weights are its embedding, with a frozen layer, and checkpoints if asked for."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Attention(64, 4) for _ in range(3))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        result: torch.Tensor = self.head(x)
        return result


def images(batch: int) -> Build:
    """The first model, with a batch of images."""

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model = Images().to(device)
        x, labels = torch.randn(batch, 3, 32, 32, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
        return model, lambda wrapped: functional.cross_entropy(wrapped(x), labels)

    return build


def language(batch: int, recompute: bool = False) -> Build:
    """The second model, with a batch of sequences."""

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model = Language(recompute).to(device)
        tokens = torch.zeros(batch, 64, dtype=torch.int64, device=device)
        return model, lambda wrapped: functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())

    return build
