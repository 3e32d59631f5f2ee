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


def loaded(rank: int, folder: str, path: str) -> list[str]:
    """Only rank 0 is in the folder with the file: the path of another rank leads nowhere."""
    os.chdir(folder if rank == 0 else "/")
    assert dist.group.WORLD is not None
    try:
        plan = options(path).with_plan_loaded(dist.group.WORLD).plan
    except ab.FileError as error:
        return ["FileError", str(error)]
    assert isinstance(plan, ab.Plan)
    return ["loaded", plan.fingerprint]


def test_rank_0_reads_the_plan_for_all_ranks(tmp_path: Path) -> None:
    ab.save(PLAN, tmp_path / "plan.json")
    assert on_ranks(loaded, 2, str(tmp_path), "plan.json") == [["loaded", PLAN.fingerprint]] * 2


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "nowhere.json"), ("{", "is not valid JSON"), ("network", "holds a network, expected a plan")],
    ids=["missing", "broken", "another noun"],
)
def test_a_file_without_a_plan_is_an_error_on_all_ranks(content: str | None, says: str, tmp_path: Path) -> None:
    if content == "network":
        ab.save(ab.Network.ring(2, 1e-5, 1e-9), tmp_path / "nowhere.json")
    elif content is not None:
        (tmp_path / "nowhere.json").write_text(content)
    first, second = on_ranks(loaded, 2, str(tmp_path), "nowhere.json")
    assert first == second and first[0] == "FileError" and says in first[1]


def test_a_plan_or_none_needs_no_file_and_no_message() -> None:
    for plan in (None, PLAN):
        given = options(plan)
        assert given.with_plan_loaded(None) is given  # type: ignore[arg-type]


def trained_by_file(rank: int, folder: str) -> dict[str, Any]:
    """DataParallel itself, with the path of a plan."""
    os.chdir(folder)
    model = ab.DataParallel(mlp(), plan="plan.json", profile_steps=0)
    optimizer = sgd(model)
    for step in range(5):
        plain_train(model, optimizer, step)
    answer = {"plan": model.plan.fingerprint if model.plan is not None else None, "explained": model.explain()}
    model.close()
    with pytest.raises(ab.FileError, match=r"nowhere\.json"):
        ab.DataParallel(mlp(), plan=Path("nowhere.json"))
    return answer


def test_data_parallel_runs_the_plan_in_a_file(tmp_path: Path) -> None:
    ab.save(PLAN, tmp_path / "plan.json")
    for answer in on_ranks(trained_by_file, 2, str(tmp_path)):
        assert answer["plan"] == PLAN.fingerprint
        assert answer["explained"].startswith("anabranch: running the plan it was given.")


def test_what_is_neither_a_plan_nor_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="plan is a int: expected a Plan"):
        options(3)
