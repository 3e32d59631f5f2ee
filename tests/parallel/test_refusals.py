"""What a DataParallel refuses, on every rank alike and before anything hangs, naming the difference."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import Bucket, DataParallel, Network, Plan, Quantised, Trace
from parallel.twins import (
    SCENARIOS,
    WIDTH,
    Feature,
    batch,
    dtypes_of,
    mlp,
    plain_train,
    ring,
    scatter,
    scattered,
    twins,
)
from ranks import cases_on_ranks, on_ranks


def refusal(make: Callable[[], object]) -> str:
    """Type and message of the error; anything else is a failure. One that waited for a deadline is a RuntimeError."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


class Other(nn.Module):
    """Alike but for one thing."""

    def __init__(self, what: str, odd: bool) -> None:
        super().__init__()
        for name in ("a", "b"):
            width = WIDTH + 1 if what == "shape" and odd and name == "b" else WIDTH
            dtype = torch.float64 if what == "dtype" and odd and name == "b" else torch.float32
            self.add_module(name, nn.Linear(WIDTH, width, dtype=dtype))
        if what == "more" and odd:
            self.d = nn.Linear(WIDTH, WIDTH)
        if what == "frozen" and odd:
            self.get_parameter("a.weight").requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2 if what == "buffer" and odd else 1))


MODELS = {
    "shape": ["'b.weight (6, 6)", "'b.weight (7, 6)"],
    "dtype": ["b.weight (6, 6) torch.float32", "b.weight (6, 6) torch.float64"],
    "more": ["rank 0 has 'seen buffer (1,) torch.float32'", "'d.weight"],
    "frozen": ["grad=True", "grad=False"],
    "buffer": ["'seen buffer (1,)", "'seen buffer (2,)"],
}


def another_model(rank: int, what: str) -> str:
    return refusal(lambda: DataParallel(Other(what, odd=rank == 2)))


def test_models_that_differ_between_ranks() -> None:
    for what, answers in cases_on_ranks({what: (another_model, what) for what in MODELS}, 3).items():
        assert len(set(answers)) == 1
        assert answers[0].startswith("DisagreementError: the model is not the same on all ranks")
        assert "ranks 2 differ from rank 0" in answers[0]
        for part in MODELS[what]:
            assert part in answers[0]


def other_planner(trace: Trace, network: Network) -> Plan:
    return scattered(trace, network)


SETTINGS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "planner": ({"planner": "single"}, "planner single"),
    "a function as planner": ({"planner": other_planner}, "planner other_planner"),
    "plan": ({"plan": scatter(dtypes_of(mlp()), seed=5)}, "plan "),
    "network": ({"network": Network.ring(3, 1e-5, 1e-9)}, "network (3, ['dense'])"),
    "lanes": ({"lanes": 2}, "lanes 2"),
    "compress": ({"compress": "bf16"}, "compress bf16"),
    "residual": ({"compress": Quantised("bf16", residual=True)}, "compress Quantised(kind='bf16', residual=True"),
    "profile_steps": ({"profile_steps": 7}, "profile_steps 7"),
}


def another_setting(rank: int, what: str) -> str:
    options = SETTINGS[what][0] if rank == 1 else {}
    return refusal(lambda: DataParallel(mlp(), **options))


def test_settings_that_differ_between_ranks() -> None:
    for what, answers in cases_on_ranks({what: (another_setting, what) for what in SETTINGS}, 3).items():
        assert len(set(answers)) == 1
        assert answers[0].startswith("DisagreementError: the settings of DataParallel is not the same on all ranks")
        assert SETTINGS[what][1] in answers[0]
        assert "ranks 1 differ" in answers[0]


def bad_plans(rank: int) -> dict[str, str]:
    names = list(dtypes_of(mlp()))
    whole = Plan((Bucket(tuple(names)),))
    return {
        "another model": refusal(lambda: DataParallel(nn.Linear(WIDTH, WIDTH), plan=whole)),
        "leaves out": refusal(lambda: DataParallel(mlp(), plan=Plan((Bucket(tuple(names[:-2])),)))),
        "collective": refusal(lambda: DataParallel(mlp(), plan=Plan((Bucket(tuple(names), 0, "pigeon"),)))),
        "dtypes": refusal(lambda: DataParallel(_two_kinds(), plan=Plan((Bucket(("0.weight", "1.weight")),)))),
        "network": refusal(lambda: DataParallel(mlp(), network=Network.ring(16, 1e-5, 1e-9))),
        "no cost": refusal(lambda: DataParallel(mlp(), network=ring(), compress="bf16")),
    }


def _two_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False, dtype=torch.float64))


def test_plans_and_networks_for_something_else(found: dict[str, list[Any]]) -> None:
    for answer in found["bad plans"]:
        assert answer["another model"].startswith("PlanError: the plan names 0.weight, which this model does not train")
        assert answer["leaves out"].startswith("PlanError: the plan leaves out 4.bias and 1 more")
        assert (
            answer["collective"]
            == "PlanError: the plan sends 0.weight (torch.float32) by 'pigeon': expected one of dense, bf16, int8"
        )
        assert answer["dtypes"].startswith("PlanError: the bucket of 0.weight mixes torch.float")
        assert answer["no cost"].startswith("NetworkError: this network has no cost for the collective 'bf16'")
        assert answer["network"].startswith("NetworkError: the network was measured among 16 ranks and these are 2")


def test_plans_for_something_else_on_one_rank(found: dict[str, list[Any]]) -> None:
    """They would be refused as soon as the training has two ranks."""
    (one,), (several, _) = on_ranks(bad_plans, 1), found["bad plans"]
    for what in ("another model", "leaves out", "collective", "dtypes"):
        assert one[what].startswith("PlanError") and one[what] == several[what]


def bad_arguments(rank: int) -> list[str]:
    wrong: list[Mapping[str, Any]] = [
        {"planner": "fastest"}, {"planner": 3}, {"lanes": 0}, {"lanes": 65}, {"compress": "zip"}, {"profile_steps": -1},
        {"comprss": "int8"},
    ]  # fmt: skip
    return [refusal(lambda options=options: DataParallel(mlp(), **options)) for options in wrong]  # type: ignore[misc]


def test_bad_arguments() -> None:
    ((*answers, misspelt),) = on_ranks(bad_arguments, 1)
    assert misspelt.startswith("TypeError: DataParallel() got an unexpected keyword argument 'comprss': expected ")
    for answer, word in zip(
        answers, ["'fastest'", "is 3", "lanes is 0", "lanes is 65", "'zip'", "profile_steps is -1"], strict=True
    ):
        assert answer.startswith("ValueError: ") and word in answer


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        DataParallel(mlp())


class Frozen(nn.Module):
    def __init__(self, empty: bool) -> None:
        super().__init__()
        if not empty:
            self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def nothing_to_train(rank: int) -> list[str]:
    kinds = (DistributedDataParallel, DataParallel)
    return [refusal(lambda k=kind, e=empty: k(Frozen(e))) for empty in (True, False) for kind in kinds]  # type: ignore[misc]


def test_nothing_to_train_is_refused_as_by_ddp(found: dict[str, list[Any]]) -> None:
    for theirs, ours, theirs_frozen, ours_frozen in found["nothing to train"]:
        assert ours == theirs
        assert ours_frozen == theirs_frozen
        assert "doesn't have any parameter that requires a gradient" in ours


def failing_planner(trace: Trace, network: Network) -> Plan:
    raise LookupError("no idea")


def half_a_plan(trace: Trace, network: Network) -> Plan:
    return Plan((Bucket((trace.tensors[0].name,)),))


def planner_fails(rank: int, planner: str) -> str:
    """Training goes on under DDP's own buckets on every rank, and explain() says why."""
    model = DataParallel(
        mlp(), planner=globals()[planner], network=ring(), profile_steps=2, policy=SCENARIOS["keeps the plan"]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(30):
        plain_train(model, optimizer, step)
    assert model.plan is None
    said = model.explain().splitlines()[0]
    model.close()
    return said


def test_a_planner_that_fails(found: dict[str, list[Any]]) -> None:
    words = {"failing_planner": "LookupError: no idea", "half_a_plan": "PlanError: the plan leaves out"}
    for planner, said in words.items():
        for answer in found[planner]:
            assert answer.startswith(f"anabranch: running DDP's own buckets: planning failed ({said}")


def unfinished(rank: int) -> str:
    """A backward that raises on every rank leaves DDP's own message at the next forward, in every stage."""
    theirs, ours = twins(Feature(), "is given the plan")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    for step in range(4):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
    for model in (theirs, ours):
        handle = model.module[0].weight.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            model(batch(0)).sum().backward()
        handle.remove()
    said = [refusal(lambda m=model: m(batch(0)))[:60] for model in (theirs, ours)]  # type: ignore[misc]
    assert said[0] == said[1]
    return said[1]


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_a_backward_that_was_not_finished(found: dict[str, list[Any]]) -> None:
    for said in found["unfinished"]:
        assert said.startswith("RuntimeError: Expected to have finished reduction")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "bad plans": (bad_plans,),
            "nothing to train": (nothing_to_train,),
            "failing_planner": (planner_fails, "failing_planner"),
            "half_a_plan": (planner_fails, "half_a_plan"),
            "unfinished": (unfinished,),  # the last: it leaves an all-reduce that nobody waits for
        },
        2,
    )
