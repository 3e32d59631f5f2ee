"""Ranks that do not run forward equally often, or call the model in odd ways, must still go through the same stages."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anabranch import DataParallel
from parallel.twins import SCENARIOS, WIDTH, mlp, ring
from ranks import cases_on_ranks, on_ranks

STEPS = 40


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def uneven(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two forwards for one backward, on one rank, now and then."""
    loss: torch.Tensor = model(batch(rank, step)).square().sum()
    if rank == 0 and step % 3 == 1:
        loss = loss + model(batch(rank, step + 1000)).square().sum()
    return loss


def many(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.stack([model(batch(rank, 20 * step + i)).square().sum() for i in range(16)]).sum()


def checkpointed(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The whole wrapper called again in backward: nothing can be recorded."""
    result: torch.Tensor = checkpoint(model, batch(rank, step).requires_grad_(), use_reentrant=False).square().sum()
    return result


def trained(rank: int, name: str) -> dict[str, Any]:
    loss: Callable[[nn.Module, int, int], torch.Tensor] = {
        "uneven": uneven,
        "many": many,
        "checkpointed": checkpointed,
    }[name]
    torch.manual_seed(0)
    ours = DataParallel(mlp(), network=ring(), profile_steps=2, policy=SCENARIOS["plans again and again"])
    torch.manual_seed(0)
    theirs = DistributedDataParallel(mlp())
    for step in range(STEPS):
        for model in (ours, theirs):
            model.zero_grad()
            loss(model, rank, step).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    said = ours.explain()
    ours.close()
    return {"said": said}


def test_tuning_counts_averaged_backward_passes_only() -> None:
    cases = {name: (trained, name) for name in ("uneven", "many", "checkpointed")}
    found = cases_on_ranks(cases, 2)
    for first, second in found.values():
        assert first["said"].splitlines()[0] == second["said"].splitlines()[0]
    assert "no step could be recorded" in found["checkpointed"][0]["said"]


def replanned(rank: int) -> int:
    """Rank 0 alone asks for a new plan."""
    torch.manual_seed(0)
    model = DataParallel(mlp(), network=ring(), profile_steps=2, policy=SCENARIOS["keeps the plan"])
    plannings, before = 0, ""
    for step in range(60):
        model(batch(rank, step)).sum().backward()
        stage_line = model.explain().splitlines()[0]
        plannings += "profiling" in stage_line and "profiling" not in before
        before = stage_line
        if rank == 0 and step == 30:
            model.replan()
    dist.barrier()
    model.close()
    return plannings


def test_rank_0_may_ask_for_a_new_plan_by_itself() -> None:
    assert on_ranks(replanned, 2) == [2, 2]


class Returning(nn.Module):
    """Returns a parameter beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(inputs) * self.scale, self.scale


def hooks_left(rank: int) -> int:
    model = DataParallel(Returning(), network=ring(), profile_steps=2)
    for step in range(30):
        output, scale = model(batch(rank, step))
        (output.sum() + scale.sum()).backward()
    hooks = model.module.scale._backward_hooks
    model.close()
    return len(hooks or {})


def test_a_returned_parameter_collects_no_hooks() -> None:
    assert on_ranks(hooks_left, 2) == [0, 0]
