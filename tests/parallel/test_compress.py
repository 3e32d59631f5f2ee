"""bfloat16 on the wire: ranks stay bit-identical, and every gradient is the average but for two roundings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import Network
from anabranch import planning as planners
from parallel.models import Doubles
from parallel.twins import Feature, batch, bits, dtypes_of, mlp, plain_train, scatter, steps, twins
from ranks import cases_on_ranks

ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16


def errors(rank: int, build: str, given_plan: bool) -> dict[str, Any]:
    """How far each gradient is from DDP's, in units of what two roundings may do; models are kept equal."""
    builders: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "doubles": Doubles}
    builder = builders[build]
    points = [(0, 1e-5, 0.0), (1 << 20, 1e-3, 0.0)]
    network = Network.measured(dist.get_world_size(), {"dense": points, "bf16": points})
    options: dict[str, Any] = {"compress": "bf16", "network": network}
    if given_plan:
        options["plan"] = planners.using(scatter(dtypes_of(builder())), "bf16")
    worst = {"float32": 0.0, "float64": 0.0}
    seen = set()
    theirs, ours = twins(Feature(builder, ours=options))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    for step in steps(ours):
        ours.module.load_state_dict(theirs.module.state_dict())
        alone = builder()
        alone.load_state_dict(theirs.module.state_dict())
        alone(batch(step)).square().mean().backward()
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        if ours.plan is not None:
            seen |= {bucket.collective for bucket in ours.plan.buckets}
        for (_, expected), (_, found), (_, own) in zip(
            theirs.module.named_parameters(), ours.module.named_parameters(), alone.named_parameters(), strict=True
        ):
            assert expected.grad is not None and found.grad is not None and own.grad is not None
            size = own.grad.abs().clone()
            dist.all_reduce(size)
            size /= dist.get_world_size()
            allowed = ROUNDING * size + ROUNDING * (1 + ROUNDING) * (expected.grad.abs() + ROUNDING * size) + 1e-7
            kind = str(expected.dtype).removeprefix("torch.")
            worst[kind] = max(worst[kind], float(((found.grad - expected.grad).abs() / allowed).max()))
    gradients = b"".join(bits(p.grad) for p in ours.parameters() if p.grad is not None)
    return {"worst": worst, "collectives": sorted(seen), "gradients": gradients.hex(), "said": ours.explain()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_roundings_at_most(world_size: int) -> None:
    found = cases_on_ranks({"planning": (errors, "mlp", False), "given": (errors, "mlp", True)}, world_size)
    for answers in found.values():
        for answer in answers:
            assert "bf16" in answer["collectives"]
            assert 0 < answer["worst"]["float32"] <= 1
            assert answer["gradients"] == answers[0]["gradients"]
    assert ", bf16" in found["planning"][0]["said"]


def test_other_dtypes_go_dense_and_inf_and_nan_arrive() -> None:
    found = cases_on_ranks({"doubles": (errors, "doubles", True), "not finite": (not_finite,)}, 2)
    for said in found["not finite"]:
        assert [word for (word,) in said] == ["finite"] * 4 + ["not", "finite", "not", "finite"]
    for answer in found["doubles"]:
        assert "bf16" in answer["collectives"]
        assert answer["worst"]["float64"] < 1e-6
        assert 0 < answer["worst"]["float32"] <= 1


def not_finite(rank: int) -> list[list[str]]:
    """What overflows arrives as inf or NaN on every rank, and is gone at the next step."""
    plan = planners.using(scatter(dtypes_of(mlp(1)), lanes=1), "bf16")
    said = []
    _, ours = twins(Feature(lambda: mlp(1), ours={"plan": plan}), "is given the plan")
    for step in range(8):
        ours.zero_grad()
        loss = ours(batch(step)).square().mean()
        if step in (4, 6) and rank == 0:
            loss = loss * float("inf" if step == 4 else "nan")
        loss.backward()
        finite = [p.grad is not None and bool(p.grad.isfinite().all()) for p in ours.parameters()]
        said.append(["finite" if all(finite) else "not"])
    return said
