"""A model whose gradients are its inputs, so that a test can find every value in the update or in a residual."""

from typing import Any

import torch
from torch import nn

import anabranch as ab

ROWS, COLUMNS = 40, 25


class GivenGradients(nn.Module):
    """Weights whose gradient is the input, and a vector whose gradient is ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.second = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.bias = nn.Parameter(torch.zeros(COLUMNS))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.first * one).sum() + (self.second * other).sum() + self.bias.sum()


def gradients(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    wild = [torch.randn(ROWS, COLUMNS, generator=generator) ** 3 for _ in range(2)]
    return wild[0], wild[1]


def matrices_by(kind: str) -> ab.Plan:
    """Both matrices in one bucket of this kind; the vector dense."""
    return ab.Plan((ab.Bucket(("second", "first"), collective=kind), ab.Bucket(("bias",))))


def two_buckets(density: float) -> ab.Plan:
    return matrices_by(f"oktopk:{density:g}")


def fresh(plan: ab.Plan | None = None, **options: Any) -> tuple[GivenGradients, ab.DataParallel]:
    """A model that runs a sparse plan from its first step on; without a plan, DDP's own buckets for ever."""
    model = GivenGradients()
    compress = ab.OkTopk(density=0.1, deterministic=True, region_period=4, **options)
    return model, ab.DataParallel(model, plan=plan, compress=compress, profile_steps=0)


def fresh_of(kind: str) -> tuple[GivenGradients, ab.DataParallel]:
    """The same for the kind of the matrices: "oktopk:0.1", or a rounded one."""
    if kind.startswith("oktopk"):
        return fresh(matrices_by(kind))
    model = GivenGradients()
    return model, ab.DataParallel(model, plan=matrices_by(kind), compress=kind, profile_steps=0)


def one_step(
    model: GivenGradients, parallel: ab.DataParallel, step: int, rank: int, scale: float = 1.0
) -> torch.Tensor:
    """Train one step; the average gradients of both matrices."""
    model.zero_grad()
    (scale * parallel(*gradients(step, rank))).backward()
    assert model.first.grad is not None and model.second.grad is not None
    return torch.stack([model.first.grad, model.second.grad]).detach().clone()


def residuals_of(parallel: ab.DataParallel) -> torch.Tensor:
    """The residuals of both matrices on this rank."""
    kept = parallel.comm_state_dict()["residuals"]
    pieces = [kept.get(name, torch.zeros(ROWS * COLUMNS)) for name in ("first", "second")]
    return torch.stack(pieces).view(2, ROWS, COLUMNS)


def computed(ranks: int, first: int, last: int) -> torch.Tensor:
    """The sum of all ranks' gradients of these steps."""
    return sum(
        (torch.stack(gradients(step, rank)).double() for step in range(first, last) for rank in range(ranks)),
        torch.zeros(2, ROWS, COLUMNS, dtype=torch.float64),
    )


def state_after_six_steps(rank: int) -> dict[str, Any]:
    """The state of a rank after some steps."""
    model, parallel = fresh(two_buckets(0.1))
    for step in range(6):
        one_step(model, parallel, step, rank)
    kept = parallel.comm_state_dict()
    parallel.close()
    return kept
