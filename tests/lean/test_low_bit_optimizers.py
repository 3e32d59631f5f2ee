"""Optimizers whose state has 8 bits, where torchao is installed: the weights that they reach under DDP."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.lean.optimizer_memory import nbytes_of
from ranks import on_ranks

WIDTH = 128  # a matrix has 16384 elements: torchao rounds the state of those from 4096 on


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def against_ddp(rank: int) -> None:
    warnings.simplefilter("ignore")  # torchao compiles its step, and torch's compiler calls what torch deprecates
    optimizers = import_module("torchao.optim")

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizers.AdamW8bit(parameters, lr=1e-3)
        return made

    ours, theirs = made(), made()
    lean: Any = ab.DataParallel(ours, profile_steps=0, memory=ab.Lean(adamw))
    ddp = DistributedDataParallel(theirs)
    stepped = adamw(theirs.parameters())
    for step in range(6):
        lean(batch(step, rank)).square().mean().backward()
        ddp(batch(step, rank)).square().mean().backward()
        stepped.step()
        stepped.zero_grad()
        if step == 3:  # saved and loaded in the middle
            kept = lean.optimizer.state_dict()
            lean.close()
            lean = ab.DataParallel(ours, profile_steps=0, memory=ab.Lean(adamw))
            lean.optimizer.load_state_dict(kept)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), step
    state = lean.optimizer.state[ours.get_parameter("0.weight")]
    assert nbytes_of(state["exp_avg"]) < 0.3 * state["exp_avg"].nbytes, "it says that it is float32"
    lean.close()


@pytest.mark.slow
def test_weights_are_those_of_ddp() -> None:
    pytest.importorskip("torchao")
    on_ranks(against_ddp, 2, timeout_s=240.0)


def test_memory_of_a_tensor_is_what_it_has_inside() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert nbytes_of(torch.zeros(3)) == 12
    assert nbytes_of(TwoTensor(torch.zeros(3), torch.zeros(3))) == 24
