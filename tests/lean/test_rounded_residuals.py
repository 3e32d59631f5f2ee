"""Lean with rounded residuals: nothing is lost but what the roundings change, and training goes as with exact ones."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anabranch as ab
from exchange.residuals.test_packing import STEP
from lean.launches import each_on_ranks
from lean.test_slots import STEPS, Chain, add_to, batch, options, planned


def conserved(rank: int, residuals: Any, kind: str) -> float:
    """As of exact residuals, within a step of the format for each rounding; the largest deviation, over that."""
    model = Chain()
    plan = planned(model, kind)
    memory = ab.Lean(lambda params: torch.optim.SGD(params, lr=1.0), residuals=residuals)
    compress = options() if kind.startswith("oktopk") else kind
    lean: Any = ab.DataParallel(model, plan=plan, compress=compress, profile_steps=0, memory=memory)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    computed = {name: torch.zeros_like(p).double() for name, p in before.items()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(add_to, computed[name]))
    allowed = dict.fromkeys(before, 0.0)
    for step in range(STEPS):
        (0.01 * lean(batch(step, rank)).pow(2).sum()).backward()
        waits = lean.comm_state_dict()["residuals"]
        for bucket in lean._collectives.residuals.buckets():
            assert len(bucket.residual) == 0, "none is in float32 between steps"
            for name in bucket.names:
                allowed[name] += STEP[residuals] * float(bucket.current().abs().max())
    worst = 0.0
    for name in before:
        here = torch.cat([computed[name].flatten() - waits.get(name, torch.zeros(1)).double(), torch.zeros(1)])
        here[-1] = allowed[name]
        dist.all_reduce(here)
        applied = 2 * (before[name] - model.get_parameter(name).detach().double()).flatten()
        error = float((here[:-1] - applied).abs().max())
        assert error <= 1.01 * float(here[-1]) + 1e-5, name
        worst = max(worst, error / max(float(here[-1]), 1e-5))
    lean.close()
    return worst


def test_nothing_is_lost_but_what_roundings_change() -> None:
    scenarios = [(residuals, kind) for residuals in ("bf16", "int8") for kind in ("oktopk:0.2", "int4")]
    for answers in each_on_ranks(conserved, 2, scenarios):
        assert all(worst > 0.0 for worst in answers)


def against_exact(rank: int, residuals: Any) -> tuple[float, float]:
    """The distance of the weights from those of exact residuals, and how far training has moved them."""
    models = [Chain(), Chain()]
    start = torch.cat([p.detach().flatten() for p in models[0].parameters()]).clone()
    for model, how in zip(models, ("in place", residuals), strict=True):
        memory = ab.Lean(lambda params: torch.optim.SGD(params, lr=0.05), residuals=how)
        plan = planned(model, "oktopk:0.2")
        lean: Any = ab.DataParallel(model, plan=plan, compress=options(), profile_steps=0, memory=memory)
        for step in range(30):
            lean(batch(step, rank)).pow(2).mean().backward()
        lean.close()
    exact, rounded = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    mine = rounded.clone()
    dist.broadcast(mine, 0)
    assert torch.equal(mine, rounded), "all ranks have the same weights"
    return float((exact - rounded).norm()), float((exact - start).norm())


@pytest.mark.slow
def test_weights_stay_close_to_those_of_exact_residuals() -> None:
    for answers in each_on_ranks(against_exact, 2, [("bf16",), ("int8",)]):
        assert all(0.0 < distance < 0.05 * moved for distance, moved in answers)
