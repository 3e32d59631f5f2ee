"""The options of tuning: a plan from a file, which rank 0 reads for all ranks, and failures that all ranks see."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import anabranch as ab
from anabranch.tuning.options import TuningOptions
from parallel.twins import dtypes_of, mlp, plain_train, scatter, sgd
from ranks import on_ranks

PLAN = scatter(dtypes_of(mlp()))


def options(plan: Any) -> TuningOptions:
    return TuningOptions("optimal", plan, None, None, 5)


def loaded(rank: int, folder: str) -> dict[str, list[str]]:
    """What ``plan=`` leads to, by path. Only rank 0 is in the folder: the paths of another rank lead nowhere."""
    os.chdir(folder if rank == 0 else "/")
    assert dist.group.WORLD is not None
    found = {}
    for path in ("plan.json", "nowhere.json", "broken.json", "network.json"):
        try:
            plan = options(path).with_plan_loaded(dist.group.WORLD).plan
        except ab.FileError as error:
            found[path] = ["FileError", str(error)]
            continue
        assert isinstance(plan, ab.Plan)
        found[path] = ["loaded", plan.fingerprint]
    os.chdir(folder)
    found["trained"] = trained_by_file()
    return found


def trained_by_file() -> list[str]:
    """DataParallel itself, with the path of a plan."""
    model = ab.DataParallel(mlp(), plan="plan.json", profile_steps=0)
    optimizer = sgd(model)
    for step in range(5):
        plain_train(model, optimizer, step)
    assert model.plan is not None
    answer = [model.plan.fingerprint, model.explain()]
    model.close()
    with pytest.raises(ab.FileError, match=r"nowhere\.json"):
        ab.DataParallel(mlp(), plan=Path("nowhere.json"))
    return answer


def test_rank_0_reads_the_plan_for_all_ranks(tmp_path: Path) -> None:
    ab.save(PLAN, tmp_path / "plan.json")
    ab.save(ab.Network.ring(2, 1e-5, 1e-9), tmp_path / "network.json")
    (tmp_path / "broken.json").write_text("{")
    first, second = on_ranks(loaded, 2, str(tmp_path))
    assert first == second and first["plan.json"] == ["loaded", PLAN.fingerprint]
    for name, says in (
        ("nowhere.json", "nowhere.json"),
        ("broken.json", "is not valid JSON"),
        ("network.json", "holds a network, expected a plan"),
    ):
        assert first[name][0] == "FileError" and says in first[name][1], "an error on all ranks"
    fingerprint, explained = first["trained"]
    assert fingerprint == PLAN.fingerprint and explained.startswith("anabranch: running the plan it was given.")


def test_a_plan_or_none_needs_no_file_and_no_message() -> None:
    for plan in (None, PLAN):
        given = options(plan)
        assert given.with_plan_loaded(None) is given  # type: ignore[arg-type]


def test_what_is_neither_a_plan_nor_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="plan is a int: expected a Plan"):
        options(3)
