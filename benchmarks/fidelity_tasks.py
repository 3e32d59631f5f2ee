"""What is trained in ``fidelity.py``: two transformers on source code, and a denoiser of photographs.

The source code is that of the installed Python packages, 100 MB.

code      predicts the next byte: 31.9 million parameters, 16 × 128 bytes per rank and step, AdamW
masked    guesses bytes that were masked, from both sides: 9.1 million, 32 × 128 bytes, AdamW
pictures  takes noise off photographs (scikit-learn's two): 0.4 million, BatchNorm, 16 × 32 × 32 pixels per rank
          and step, SGD with momentum
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu, scaled_dot_product_attention

CORPUS_NBYTES = 100 << 20
HELD_OUT = 20  # every twentieth file is for validation: whole files, so that no passage is half known
PASSAGES = 512  # for validation, the same at every point and for everyone
LENGTH = 128
SYMBOLS = 257  # bytes, and the mask
MASKED = 0.15


class Task(Protocol):
    """A model, how it is optimized, its batches, and what is measured of it."""

    model: nn.Module
    steps: int
    every: int  # steps between two points of a curve

    def optimizer(self, has_momentum: bool) -> torch.optim.Optimizer: ...

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        """What this rank learns from in this step; depends on nothing else but the seed. Always of the same shape."""
        ...

    def loss(self, *batch: torch.Tensor) -> torch.Tensor: ...

    def validated(self) -> dict[str, float]: ...


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return torch.as_tensor(x + self.mlp(x))


class Transformer(nn.Module):
    """Symbols to logits."""

    def __init__(self, width: int, layers: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal) for _ in range(layers)))
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        return torch.as_tensor(self.guess(self.norm(self.blocks(x))))


class Code:
    """The next byte of source code."""

    width, layers, passages, lr, steps, every, causal = 512, 10, 16, 6e-4, 3000, 50, True

    def __init__(self, seed: int, device: str) -> None:
        self._seed, self._device = seed, device
        self._text, held_out = (text.to(device) for text in sources())
        torch.manual_seed(seed)
        self.model: nn.Module = Transformer(self.width, self.layers, 8, self.causal).to(device)
        starts = torch.randint(len(held_out) - LENGTH - 1, (PASSAGES, 1), generator=torch.Generator().manual_seed(1))
        self._held_out = held_out[(starts + torch.arange(LENGTH + 1)).to(device)].long()

    def optimizer(self, has_momentum: bool) -> torch.optim.Optimizer:
        betas = (0.9 if has_momentum else 0.0, 0.999)
        return torch.optim.AdamW(self.model.parameters(), self.lr, betas=betas, weight_decay=0.1, fused=True)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed((self._seed << 32) + step * ranks + rank)
        starts = torch.randint(len(self._text) - LENGTH - 1, (self.passages, 1), generator=generator)
        places = (starts + torch.arange(LENGTH + 1)).to(self._device, non_blocking=True)
        return (self._text[places].long(),)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        (text,) = batch
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = self.model(text[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def validated(self) -> dict[str, float]:
        parts = self._held_out.split(64)
        return {"loss": sum(float(self.loss(part)) * len(part) for part in parts) / len(self._held_out)}


class Masked(Code):
    """Bytes that were masked, from both sides."""

    width, layers, passages, lr, causal = 384, 5, 32, 1e-3, False

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        text = batch[0][:, :-1]
        # Which bytes are masked depends on the text alone: the same in every run, and inside a CUDA graph.
        hidden = ((text * 2654435761 + torch.arange(text.shape[1], device=text.device) * 40503) >> 8) % 100
        masked = hidden < 100 * MASKED
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = self.model(torch.where(masked, SYMBOLS - 1, text))
        losses = cross_entropy(logits.float().flatten(0, 1), text.flatten(), reduction="none")
        return (losses * masked.flatten()).sum() / masked.sum().clamp(min=1)


class Pictures:
    """Noise in photographs, to be taken away."""

    width, blocks, patches, side, noise, lr, steps, every = 64, 6, 16, 32, 0.1, 0.05, 3000, 50
    learnt_columns = 0.8  # of each photograph; the rest is for validation

    def __init__(self, seed: int, device: str) -> None:
        self._seed, self._device = seed, device
        photos = photographs().to(device)
        border = int(self.learnt_columns * photos.shape[3])
        self._photos, held_out = photos[..., :border], photos[..., border:]
        torch.manual_seed(seed)
        self.model: nn.Module = Denoiser(self.width, self.blocks).to(device)
        generator = torch.Generator().manual_seed(1)
        self._held_out = [self._noisy(held_out, 64, generator) for _ in range(8)]

    def optimizer(self, has_momentum: bool) -> torch.optim.Optimizer:
        # A velocity of torch is a sum, and that of OkTopk a mean: ten times the rate for the same effect.
        if not has_momentum:
            return torch.optim.SGD(self.model.parameters(), 10 * self.lr)
        return torch.optim.SGD(self.model.parameters(), self.lr, momentum=0.9)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed((self._seed << 32) + step * ranks + rank)
        return self._noisy(self._photos, self.patches, generator)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        noisy, noise = batch
        return mse_loss(self.model(noisy), noise)

    @torch.no_grad()
    def validated(self) -> dict[str, float]:
        self.model.eval()
        losses = [float(self.loss(*part)) for part in self._held_out]
        self.model.train()
        return {"loss": sum(losses) / len(losses)}

    def _noisy(self, photos: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches with noise, and the noise in units of its deviation."""
        which = torch.randint(len(photos), (count, 1, 1, 1), generator=generator)
        top = torch.randint(photos.shape[2] - self.side, (count, 1, 1, 1), generator=generator)
        left = torch.randint(photos.shape[3] - self.side, (count, 1, 1, 1), generator=generator)
        noise = torch.randn(count, 3, self.side, self.side, generator=generator)
        where = [which, torch.arange(3).view(-1, 1, 1), top + torch.arange(self.side).view(-1, 1)]
        places = [index.to(self._device) for index in (*where, left + torch.arange(self.side))]
        noise = noise.to(self._device)
        return photos[tuple(places)] + self.noise * noise, noise


class Denoiser(nn.Module):
    """Residual blocks of convolutions with BatchNorm."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = relu(x + block(x))
        return torch.as_tensor(self.last(x))


def photographs() -> torch.Tensor:
    """The two of scikit-learn, 427 × 640 pixels, or those of a file made from them where it is not installed."""
    file = Path("carry/photographs.pt")
    if file.exists():
        pixels = torch.load(file, weights_only=True)
    else:
        from sklearn.datasets import load_sample_images

        pixels = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    return torch.as_tensor(pixels.permute(0, 3, 1, 2).float() / 255)


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of installed Python files to learn from, and those of the files that are held out."""
    texts: list[list[bytes]] = [[], []]
    size = 0
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for number, path in enumerate(sorted(Path(folder).rglob("*.py"))):
            if size >= CORPUS_NBYTES:
                break
            text = path.read_bytes()
            texts[number % HELD_OUT == HELD_OUT - 1].append(text)
            size += len(text)
    learnt, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in texts)
    return learnt, held_out


TASKS: dict[str, Callable[[int, str], Task]] = {"code": Code, "masked": Masked, "pictures": Pictures}
