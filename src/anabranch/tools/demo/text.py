"""Text that every machine has, and a small character-level transformer to train on it."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CORPUS_NBYTES = 1 << 20
CHARACTERS = 128  # ASCII; other characters become question marks


class StandardLibrary:
    """Batches from the source code of Python's standard library; they depend on the step and the rank only.

    Every rank draws its own batches, and a training resumed at step n sees the same batches as without a stop.
    """

    def __init__(self, length: int = 64, batch: int = 4) -> None:
        self._length = length
        self._batch = batch
        text = b""
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
            if len(text) >= CORPUS_NBYTES:
                break
        self._text = torch.frombuffer(bytearray(text[:CORPUS_NBYTES]), dtype=torch.uint8).long()

    def batch(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        """Passages of ``length + 1`` characters, one a row."""
        generator = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(self._text) - self._length - 1, (self._batch, 1), generator=generator)
        return self._text[starts + torch.arange(self._length + 1)]


class CharTransformer(nn.Module):
    """Predicts the next character from those before it; returns the mean cross-entropy of a batch, in nats."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.guess = nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of guessing ``text[:, i]`` from ``text[:, :i]``."""
        seen, wanted = text[:, :-1], text[:, 1:]
        hidden = self.characters(seen) + self.positions.weight[: seen.shape[1]]
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        return cross_entropy(self.guess(hidden).flatten(0, 1), wanted.flatten())
