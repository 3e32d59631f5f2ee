"""How much waits and for how long, under Lean: the same samples as without, and the same warning."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from ranks import on_ranks

ROWS, COLUMNS = 6, 20
STEPS = 160


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


class Sums(nn.Module):
    """Two matrices, whose gradients are what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.second = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return (self.first * gradients[0]).sum() + (self.second * gradients[1]).sum()


def drawn(step: int, rank: int, cancelling: bool) -> torch.Tensor:
    """Where ``cancelling``, the large half of each matrix adds up to nothing: it is offered for ever, and waits."""
    made = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(10 * step + rank))
    if cancelling:
        made = made.abs().mul_(0.01)
        made[..., ::2] = 1.0 - 2.0 * rank
    return made


def looked_at(rank: int, residuals: Any, cancelling: bool) -> list[str]:
    options = ab.OkTopk(density=0.7, warmup_steps=0, deterministic=True, region_period=2)
    models = [Sums(), Sums()]
    plan = ab.Plan((ab.Bucket(("second", "first"), collective="oktopk:0.7"),))
    plain = ab.DataParallel(models[0], plan=plan, compress=options, profile_steps=0)
    memory = ab.Lean(sgd, residuals=residuals)
    lean: Any = ab.DataParallel(models[1], plan=plan, compress=options, profile_steps=0, memory=memory)
    for step in range(STEPS):
        for each in (plain, lean):
            each(drawn(step, rank, cancelling)).backward()
        plain.zero_grad()
    (theirs,), (ours,) = (each._collectives._memory._state.buckets() for each in (plain, lean))  # type: ignore[union-attr]
    samples, expected = ours.residual_monitor.samples(), theirs.residual_monitor.samples()
    assert [look.step for look in samples] == [look.step for look in expected] and len(samples) > 9
    for look, other in zip(samples, expected, strict=True):
        assert look.norm == pytest.approx(other.norm, rel=1e-5)
        assert look.age_steps == pytest.approx(other.age_steps, rel=1e-5)
    assert samples[-1].norm > 0 and samples[-1].age_steps > 0
    told = [str(lean.explain()), str(plain.explain())]
    lean.close()
    plain.close()
    return told


@pytest.mark.parametrize("residuals", ["in place", "host"])
@pytest.mark.parametrize("cancelling", [True, False])
def test_growth_without_bound_is_seen_as_without_lean(residuals: str, cancelling: bool) -> None:
    for told in on_ranks(looked_at, 2, residuals, cancelling):
        assert [("grows without bound" in words) for words in told] == [cancelling] * 2
        assert all(" steps old" in words for words in told)
