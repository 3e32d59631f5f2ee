"""A second start of the same training: it runs the cached plan from its first step, and trains as DDP does."""

from pathlib import Path
from typing import Any

import torch

from anabranch import DataParallel
from ddp.inspection import layout_in_force
from parallel.twins import Feature, batch, bits, stage_of, twins
from ranks import on_ranks


def trained(folder: str, rows: int, count: int) -> dict[str, Any]:
    """Train DDP and DataParallel on batches of so many rows."""
    theirs, ours = twins(Feature(ours={"cache": folder, "planner": "per_tensor"}))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    plans, layouts, stages = [], [], []
    for step in range(count):
        plans.append(ours.plan.fingerprint if ours.plan is not None else None)
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(step)[:1].repeat(rows, 1)).square().mean().backward()
            optimizer.step()
        layouts.append(layout_in_force(ours))
        stages.append(stage_of(ours))
    for one, other in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
        torch.testing.assert_close(other, one)
    weights = b"".join(bits(p) for p in ours.parameters()).hex()
    ours.close()
    return {"plans": plans, "layouts": layouts, "stages": stages, "weights": weights}


def second_start(rank: int, folder: str, rows: int) -> list[dict[str, Any]]:
    return [trained(folder, 4, 40), trained(folder, rows, 12)]  # a choice is kept once a doubtful win was repeated


def test_the_cached_plan_runs_from_the_first_step(tmp_path: Path) -> None:
    answers = on_ranks(second_start, 2, str(tmp_path), 4)
    for first, second in answers:
        assert first["plans"][0] is None and first["plans"][-1] is not None
        assert set(second["plans"]) == {first["plans"][-1]}
        assert second["layouts"][0] == first["layouts"][-1]
        assert "as cached on" in second["stages"][-1]
        assert second["weights"] == answers[0][1]["weights"]


def test_another_batch_goes_back_and_searches(tmp_path: Path) -> None:
    answers = on_ranks(second_start, 2, str(tmp_path), 6)
    for first, second in answers:
        assert second["plans"][0] == first["plans"][-1], "in the hope that the batch is the same"
        assert second["plans"][1] is None and "profiling" in " ".join(second["stages"])
        assert second["weights"] == answers[0][1]["weights"]


def later(rank: int, folder: str) -> list[str | None]:
    trained(folder, 4, 40)
    torch.manual_seed(7)
    model = DataParallel(Feature().build(), init_sync=False, cache=folder, planner="per_tensor")
    return [model.plan.fingerprint if model.plan is not None else None]


def test_without_init_sync_ranks_construct_at_their_own_time(tmp_path: Path) -> None:
    assert on_ranks(later, 2, str(tmp_path)) == [[None], [None]]
