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


def starts(rank: int, folder: str) -> dict[str, Any]:
    """A first start, one with the same batch, one with another, and one in which ranks construct at their own time."""
    first = trained(folder, 4, 40)  # a choice is kept once a doubtful win was repeated
    found = {"first": first, "same batch": trained(folder, 4, 12), "other batch": trained(folder, 6, 12)}
    torch.manual_seed(7)
    model = DataParallel(Feature().build(), init_sync=False, cache=folder, planner="per_tensor")
    return {**found, "later": model.plan is not None}


def test_a_second_start_runs_the_cached_plan_and_searches_where_the_batch_is_another(tmp_path: Path) -> None:
    answers = on_ranks(starts, 2, str(tmp_path))
    for answer in answers:
        first, second, other = answer["first"], answer["same batch"], answer["other batch"]
        assert first["plans"][0] is None and first["plans"][-1] is not None
        assert set(second["plans"]) == {first["plans"][-1]}, "from the first step on"
        assert second["layouts"][0] == first["layouts"][-1]
        assert "as cached on" in second["stages"][-1]
        assert other["plans"][0] == first["plans"][-1], "in the hope that the batch is the same"
        assert other["plans"][1] is None and "profiling" in " ".join(other["stages"])
        assert not answer["later"], "without init_sync ranks construct at their own time, and do not communicate"
        for name in ("same batch", "other batch"):
            assert answer[name]["weights"] == answers[0][name]["weights"]
