"""ANABRANCH=off and ANABRANCH_TRACE=file: switches without code, of which rank 0's count."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Lean, Network, OkTopk, Timeline, load
from anabranch.tuning.options import timeline_path
from parallel.twins import SCENARIOS, different, dtypes_of, mlp, plain_train, scatter, scattered, sgd
from ranks import on_ranks

SEARCHING: dict[str, Any] = {
    "planner": scattered,
    "network": Network.ring(2, 1e-5, 1e-9),
    "profile_steps": 2,
    "policy": SCENARIOS["keeps the plan"],
    "cache": False,
}


def turned_off(rank: int, init_sync: bool) -> dict[str, Any]:
    """Rank 0 turns it off; a setting of rank 1 that would be refused does not matter then."""
    os.environ["ANABRANCH"] = "Off" if rank == 0 else ""
    torch.manual_seed(3)
    theirs, ours = mlp(), mlp()
    ours.load_state_dict(theirs.state_dict())
    options: dict[str, Any] = {"compress": OkTopk(0.1 + 0.1 * rank), "plan": scatter(dtypes_of(mlp()))}
    models = [DistributedDataParallel(theirs), DataParallel(ours, init_sync=init_sync, **options)]
    for step in range(8):
        for model in models:
            plain_train(model, sgd(model), step)
    wrapped = models[1]
    assert isinstance(wrapped, DataParallel)
    return {
        "apart": different(models[0], wrapped, 0.0),
        "explained": wrapped.explain(),
        "plan": wrapped.plan is None,
        "state": wrapped.comm_state_dict(),
    }


def test_off_is_stock_ddp() -> None:
    for answer in on_ranks(turned_off, 2, True):
        assert answer["apart"] == [] and answer["plan"] and answer["state"] == {}
        assert answer["explained"].startswith("No plan: ANABRANCH=off turns it off. Gradients are averaged as under D")


def test_off_without_init_sync_is_agreed_in_the_first_step() -> None:
    for answer in on_ranks(turned_off, 2, False):
        assert answer["apart"] == [] and answer["plan"]
        assert answer["explained"].startswith("anabranch: not planning: ANABRANCH=off turns it off")


def lean_off(rank: int) -> tuple[str, bool]:
    os.environ["ANABRANCH"] = "off"
    memory = Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model: Any = DataParallel(mlp(), memory=memory, compress=OkTopk(0.1))
    for step in range(3):
        plain_train(model, model.optimizer, step)
    return model.explain(), bool(model.comm_state_dict())


def test_off_under_lean_sends_everything() -> None:
    for explained, keeps_residuals in on_ranks(lean_off, 2):
        assert "not planning: ANABRANCH=off turns it off" in explained and not keeps_residuals


def misspelt(rank: int) -> str:
    os.environ["ANABRANCH"] = "of" if rank == 0 else "off"
    with pytest.raises(ValueError) as caught:
        DataParallel(mlp())
    return str(caught.value)


def test_a_misspelt_switch_is_an_error_on_all_ranks() -> None:
    for said in on_ranks(misspelt, 2):
        assert said == "the environment variable ANABRANCH is 'of' on rank 0: expected off, or on"


def traced(rank: int, path: str, steps: int, planned: bool) -> str:
    os.environ["ANABRANCH_TRACE"] = path
    model = DataParallel(mlp(), **(SEARCHING if planned else {"profile_steps": 0}))
    for step in range(steps):
        plain_train(model, sgd(model), step)
    plan = model.plan
    model.close()
    return "" if plan is None else plan.fingerprint


def test_the_timeline_of_the_choice_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text("an older one")
    fingerprints = on_ranks(traced, 2, str(path), 30, True)
    assert all(fingerprints)
    timeline = load(path)
    assert isinstance(timeline, Timeline) and timeline.meta["source"] == "measured"
    assert {"forward", "backward"} < {span.name for span in timeline.spans} and timeline.iteration_s > 0


def test_a_short_training_writes_its_profiled_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    on_ranks(traced, 2, str(path), 7, True)
    timeline = load(path)
    assert isinstance(timeline, Timeline)
    assert "exposed communication" in {span.name for span in timeline.spans}


def test_without_planning_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    assert on_ranks(traced, 2, str(path), 3, False) == ["", ""]
    assert not path.exists()


def test_a_folder_that_is_not_there_does_not_stop_the_training(tmp_path: Path) -> None:
    assert all(on_ranks(traced, 2, str(tmp_path / "none" / "steps.json"), 30, True))


def test_only_rank_0_writes() -> None:
    assert timeline_path(0, {"ANABRANCH_TRACE": "a.json"}) == Path("a.json")
    assert timeline_path(1, {"ANABRANCH_TRACE": "a.json"}) is None
    assert timeline_path(0, {}) is None
