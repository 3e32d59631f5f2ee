"""Residuals under Lean: errors as without Lean, asked for in an update, and loaded in their own order."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.exchange import error_samples
from lean.launches import each_on_ranks
from ranks import on_ranks

ROWS, COLUMNS = 6, 20


class Sums(nn.Module):
    """Two matrices, whose gradients are what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.second = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return (self.first * gradients[0]).sum() + (self.second * gradients[1]).sum()


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(10 * step + rank))


def sampled(rank: int, kind: str, how: Any) -> dict[str, Any]:
    """Eight steps, of which the last one is sampled: what it applied, what it kept, and the error in ``explain()``."""
    error_samples.FIRST, error_samples.PERIOD = 8, 1000
    options = ab.OkTopk(density=0.2, warmup_steps=0) if kind.startswith("oktopk") else kind
    memory = None if how == "without Lean" else ab.Lean(plain_sgd, residuals=how)
    model, plan = Sums(), ab.Plan((ab.Bucket(("second", "first"), collective=kind),))
    parallel: Any = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=memory)
    optimizer = plain_sgd(list(model.parameters())) if memory is None else parallel.optimizer
    for step in range(8):
        before = torch.stack([model.first.detach(), model.second.detach()])
        optimizer.zero_grad()
        parallel(drawn(step, rank)).backward()
        optimizer.step()  # under Lean it does nothing
    applied = (before - torch.stack([model.first.detach(), model.second.detach()])) / 0.1
    kept = parallel.comm_state_dict().get("residuals", {})
    (line,) = (line for line in parallel.explain().splitlines() if line.split()[2:3] == [kind])
    parallel.close()
    zeros = torch.zeros(ROWS, COLUMNS)
    kept_pieces = [kept.get(name, zeros) for name in ("first", "second")]
    return {"applied": applied, "kept": torch.stack(kept_pieces), "error": line.split()[-2]}


def test_the_measured_error_is_what_residuals_keep_of_the_offered_average() -> None:
    scenarios = [(kind, how) for kind in ("int4", "oktopk:0.2") for how in ("without Lean", "in place", "int8")]
    for (_, how), answers in zip(scenarios, each_on_ranks(sampled, 2, scenarios), strict=True):
        kept = (answers[0]["kept"] + answers[1]["kept"]).double().flatten() / 2
        offered = answers[0]["applied"].double().flatten() + kept
        error, tolerance = float(kept.norm() / offered.norm()), 0.1 if how == "int8" else 1e-3  # rounded since
        for answer in answers:
            assert answer["error"].endswith("%")
            assert float(answer["error"].rstrip("%")) / 100 == pytest.approx(error, tolerance)


def test_kinds_without_residuals_have_a_measured_error_of_the_average() -> None:
    scenarios = [(kind, how) for kind in ("int8", "bf16") for how in ("without Lean", "in place")]
    exact = torch.stack([drawn(7, rank) for rank in range(2)]).double().mean(0)
    for (kind, _), answers in zip(scenarios, each_on_ranks(sampled, 2, scenarios), strict=True):
        # What was applied is known up to the rounding of weights; explain() has two digits behind the point.
        error = float((answers[0]["applied"].double() - exact).norm() / exact.norm())
        for answer in answers:
            assert float(answer["error"].rstrip("%")) / 100 == pytest.approx(error, abs=1e-4), kind


def explained_in_an_update(rank: int) -> list[bool]:
    """An optimizer that asks for the explanation of the model that it updates, from the lane's thread."""
    said: list[bool] = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            said.append("the plan it was given" in lean.explain())
            super().step(closure)

    plan = ab.Plan((ab.Bucket(("second", "first"), collective="oktopk:0.7"),))
    memory = ab.Lean(lambda parameters: Asking(parameters, lr=0.1), residuals="int8")
    options = ab.OkTopk(density=0.7, warmup_steps=0)
    lean: Any = ab.DataParallel(Sums(), plan=plan, compress=options, profile_steps=0, memory=memory)
    for step in range(3):
        lean(drawn(step, rank)).backward()
    lean.close()
    return said


def test_an_optimizer_may_call_explain_in_the_middle_of_an_update() -> None:
    assert all(said and all(said) for said in on_ranks(explained_in_an_update, 2, timeout_s=30.0))


def plain_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def another_order(rank: int) -> str:
    """The residual of a channels-last model, loaded into another such, and into one that is not."""
    formats = (torch.channels_last, torch.channels_last, torch.contiguous_format)
    kept: Any = None
    answers = ""
    for format_ in formats:
        convolution: Any = nn.Conv2d(3, 4, 3, bias=False)
        lean: Any = ab.DataParallel(
            convolution.to(memory_format=format_),
            plan=ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),)),
            compress=ab.OkTopk(density=0.1, warmup_steps=0),
            profile_steps=0,
            memory=ab.Lean(plain_sgd),
        )
        if kept is None:
            lean(torch.randn(1, 3, 4, 4)).square().sum().backward()
            kept = lean.comm_state_dict()
        else:
            try:
                lean.load_comm_state_dict(kept)
            except ValueError as error:
                assert format_ == torch.contiguous_format
                answers = str(error)
        lean.close()
    return answers


def test_a_residual_is_loaded_in_its_own_memory_order() -> None:
    for answers in on_ranks(another_order, 2):
        assert "the residual of weight" in answers and "strides [27, 1, 9, 3], and here it is row-major" in answers
