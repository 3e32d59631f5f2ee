"""Clipping by value under Lean: in backward, as torch's clip_grad_value_ after it under DDP, bit by bit."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_

import anabranch as ab
from lean.launches import each_on_ranks
from lean.test_clipping import lean_of
from lean.test_parallel import OPTIMIZERS, made, tokens
from ranks import on_ranks

LIMIT = 1e-3  # below some elements of all gradients


def against_ddp(rank: int, optimizer: str) -> None:
    ours, theirs = made(), made()
    lean = lean_of(ours, optimizer, {"clip_value": LIMIT})
    ddp = DistributedDataParallel(theirs)
    stepped = OPTIMIZERS[optimizer]([p for p in theirs.parameters() if p.requires_grad])
    for step in range(5):
        for model in (lean, ddp):
            model(tokens(step, rank)).backward()
        assert any(float(p.grad.abs().max()) > LIMIT for p in ddp.parameters() if p.grad is not None)
        for model in (lean, ddp):
            clip_grad_value_(model.parameters(), LIMIT)  # as in a program that was written for DDP
        stepped.step()
        stepped.zero_grad()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b) and a.grad is None, (step, name)
    lean.close()


def test_weights_are_those_of_ddp() -> None:
    each_on_ranks(against_ddp, 2, [("momentum",), ("adamw",)])


def by_torch(rank: int) -> list[str]:
    said = []
    lean = lean_of(made(), "adamw", {"clip_value": LIMIT})
    lean(tokens(0, rank)).backward()
    for limit in (LIMIT, 2.0):
        try:
            nn.utils.clip_grad_value_(lean.parameters(), limit)
        except RuntimeError as error:
            said.append(str(error))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_value_(other.parameters(), 0.5)  # somebody else's: as ever
    assert float(other.weight.grad.abs().max()) == 0.5  # type: ignore[union-attr]
    lean.close()
    unclipped = lean_of(made(), "adamw", {})
    unclipped(tokens(0, rank)).backward()
    with pytest.raises(RuntimeError) as caught:
        nn.utils.clip_grad_value_(unclipped.parameters(), 1.0)
    unclipped.close()
    return [*said, str(caught.value)]


def test_another_limit_is_refused() -> None:
    for another, without in on_ranks(by_torch, 2):
        assert "of clip_value 2.0 under Lean, with clip_value 0.001" in another
        assert "so give Lean(clip_value=1.0), which clips there" in without


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clip_value": -1.0}, "Lean clip_value is -1.0: expected more than 0, or None"),
        ({"clip_value": math.nan}, "Lean clip_value is nan"),
        ({"clip_value": 1.0, "clip_norm": 1.0}, "clip_value is 1.0 and clip_norm 1.0: expected one of them"),
    ],
)
def test_wrong_requests(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ab.Lean(torch.optim.SGD, **arguments)
