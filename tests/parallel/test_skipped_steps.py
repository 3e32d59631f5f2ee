"""A step that a loss scaler skips: values that other buckets had sent in it return to residuals."""

from typing import Any

import torch

import anabranch as ab
from anabranch.exchange.dense import all_finite
from parallel.given_gradients import COLUMNS, ROWS, GivenGradients, gradients
from ranks import cases_on_ranks

SPARSE = [ab.Bucket((name,), collective="oktopk:0.1") for name in ("second", "first")]
APART = ab.Plan((*SPARSE, ab.Bucket(("bias",))))


class Fixed:
    """A scaler whose scale never changes."""

    def get_scale(self) -> float:
        return 1.0


def skipping(rank: int, follows: bool) -> dict[str, Any]:
    """Four steps; in the third the first matrix's gradient is not finite on rank 1, so nobody applies the second's."""
    model = GivenGradients()
    options = ab.OkTopk(density=0.1, warmup_steps=0)
    parallel = ab.DataParallel(model, plan=APART, compress=options, profile_steps=0)
    if follows:
        parallel.follow(Fixed())
    computed, applied = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for step in range(4):
        model.zero_grad()
        first, second = gradients(step, rank)
        if step == 2 and rank == 1:
            first = first.clone()
            first[0, 0] = float("inf")
        parallel(first, second).backward()
        assert model.first.grad is not None and model.second.grad is not None
        skipped = not bool(all_finite(model.first.grad, model.second.grad))
        assert skipped == (step == 2)
        computed += second
        if not skipped:
            applied += model.second.grad
    residual = parallel.comm_state_dict()["residuals"]["second"].view(ROWS, COLUMNS)
    parallel.close()
    return {"computed": computed, "applied": applied, "residuals": residual}


def test_values_sent_in_a_skipped_step_return_to_the_residual() -> None:
    lost = {}
    for how, answers in cases_on_ranks({"follows": (skipping, True), "does not": (skipping, False)}, 2).items():
        computed = sum(one["computed"].double() for one in answers)
        accounted = 2 * answers[0]["applied"].double() + sum(one["residuals"].double() for one in answers)
        lost[how] = float((computed - accounted).abs().max())
    assert lost["follows"] < 1e-4 and lost["does not"] > 1e-2, "nobody else knows that a step was left out"
