"""What is trained in ``convergence.py``: a character transformer on Python's own sources, and a reader of digits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from anabranch.tools.demo.text import CharTransformer

CORPUS_NBYTES = 4 << 20
HELD_OUT = 10  # every tenth file is for validation: whole files, so that no passage is half known
PASSAGES = 512  # for validation, the same at every point and for everyone
LENGTH = 64
TRAINED_ON = 1500  # of 1797 digits, as in examples/digits.py


class Task(Protocol):
    """A model, its optimizer, its batches and what is measured of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    every: int  # steps between two points of the curve
    last_lr: float  # of the first one; it falls linearly

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        """What this rank learns from in this step; depends on nothing else but the seed."""
        ...

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Of a batch, as ``model`` (the wrapped one) sees it."""
        ...

    def validated(self, rank: int, ranks: int) -> dict[str, tuple[float, float]]:
        """Sum and count of each measure over this rank's share of what is held out."""
        ...


class Characters:
    """0.12 million parameters, 4 × 64 characters per rank and step, AdamW at 3e-3, falling to a tenth of it."""

    every, last_lr = 50, 0.1
    width, layers, passages, lr = 64, 2, 4, 3e-3

    def __init__(self, seed: int, lr: float | None = None, device: str = "cpu") -> None:
        self._seed = seed
        self._text, held_out = (text.to(device) for text in sources())
        torch.manual_seed(seed)
        self.model: nn.Module = CharTransformer(self.width, self.layers, length=LENGTH).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr or self.lr, fused=True)
        starts = torch.randint(len(held_out) - LENGTH - 1, (PASSAGES, 1), generator=torch.Generator().manual_seed(1))
        self._held_out = held_out[(starts + torch.arange(LENGTH + 1)).to(device)]

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed((self._seed << 32) + step * ranks + rank)
        starts = torch.randint(len(self._text) - LENGTH - 1, (self.passages, 1), generator=generator)
        places = (starts + torch.arange(LENGTH + 1)).to(self._text.device, non_blocking=True)
        return (self._text[places],)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.as_tensor(model(*batch))

    @torch.no_grad()
    def validated(self, rank: int, ranks: int) -> dict[str, tuple[float, float]]:
        parts = self._held_out[rank::ranks].split(32)
        return {"loss": (sum(float(self.model(part)) * len(part) for part in parts), float(sum(map(len, parts))))}


class MoreCharacters(Characters):
    """The same with 0.37 million parameters."""

    width, layers = 96, 3


class ManyCharacters(Characters):
    """The same with 10.8 million, 16 × 64 characters per rank and step, at 1e-3: for GPUs."""

    every, width, layers, passages, lr = 100, 384, 6, 16, 1e-3


class Digits:
    """The classifier with BatchNorm of examples/digits.py, 25 images per rank and step, SGD with momentum."""

    every, last_lr = 20, 1.0

    def __init__(self, seed: int, lr: float | None = None, device: str = "cpu", batch: int = 25) -> None:
        if device != "cpu":
            raise ValueError(f"device is {device!r}: the digits are read on the cpu")
        self._seed, self._batch = seed, batch
        self._images, self._labels = digits()
        order = torch.randperm(len(self._images), generator=torch.Generator().manual_seed(0))
        self._training, self._test = order[:TRAINED_ON], order[TRAINED_ON:]
        torch.manual_seed(seed)
        self.model: nn.Module = digit_reader()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=lr or 0.05, momentum=0.9)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        """Images shuffled anew in every epoch; each rank has its own."""
        epoch, place = divmod(step * self._batch * ranks, TRAINED_ON)
        order = torch.randperm(TRAINED_ON, generator=torch.Generator().manual_seed((self._seed << 32) + epoch))
        first = place + rank * self._batch
        mine = self._training[order[torch.arange(first, first + self._batch) % TRAINED_ON]]
        return self._images[mine], self._labels[mine]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def validated(self, rank: int, ranks: int) -> dict[str, tuple[float, float]]:  # noqa: ARG002
        """All of it on rank 0, whose running statistics are everyone's."""
        if rank != 0:
            return {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)}
        mine = self._test
        self.model.eval()
        guesses = self.model(self._images[mine])
        self.model.train()
        right = (guesses.argmax(dim=1) == self._labels[mine]).sum().item()
        loss = float(cross_entropy(guesses, self._labels[mine], reduction="sum"))
        return {"loss": (loss, float(len(mine))), "accuracy": (float(right), float(len(mine)))}


def anneal(task: Task, first_lr: float, step: int, steps: int) -> None:
    """Set the learning rate of a step."""
    for group in task.optimizer.param_groups:
        group["lr"] = first_lr * (1 - (1 - task.last_lr) * step / steps)


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Characters of Python's standard library to learn from, and those of the files that are held out."""
    texts = [b"", b""]
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        texts[number % HELD_OUT == HELD_OUT - 1] += text
    return tuple(  # type: ignore[return-value]  # two of them
        torch.frombuffer(bytearray(text[:CORPUS_NBYTES]), dtype=torch.uint8).long() for text in texts
    )


def digit_reader() -> nn.Module:
    """The classifier with BatchNorm of examples/digits.py."""
    return nn.Sequential(
        *_block(1, 32), *_block(32, 64), nn.MaxPool2d(2), *_block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def _block(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and labels of 1797 digits."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


TASKS: dict[str, Callable[[int, float | None, str], Task]] = {
    "char": Characters,
    "char-0.37M": MoreCharacters,
    "char-11M": ManyCharacters,
    "digits": Digits,
}
