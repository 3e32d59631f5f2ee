"""join() with uneven inputs, against DDP: ranks that have run out of data take part in planned collectives."""

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import DataParallel
from anabranch.exchange.groups import backend_of
from anabranch.values.errors import CollectiveError
from parallel.twins import WIDTH, Feature, Model, batch, bits, different, dtypes_of, mlp, plain_train, scatter, twins
from ranks import cases_on_ranks, group_timeout, on_ranks


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def epoch(model: Model, optimizer: torch.optim.Optimizer, first: int, divide: bool) -> None:
    """Rank r has 2 + 2r batches; the others are done before the last."""
    with join(model, divide):
        for step in range(first, first + 2 + 2 * dist.get_rank()):
            plain_train(model, optimizer, step)


def join(model: Model, divide: bool) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = model.join(divide_by_initial_world_size=divide)
    return context


def joined_epochs(rank: int, build: str, options: dict[str, Any], given_plan: bool) -> dict[str, Any]:
    """Epochs under join() with either divisor, and plain steps in between, while plans come and go."""
    feature = Feature({"mlp": mlp, "normed": normed}[build], options=options)
    apart = []
    theirs, ours = twins(feature, "is given the plan" if given_plan else "plans again and again")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    plans = set()
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-5
    for number in range(8):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            for step in range(5):
                plain_train(model, optimizer, 100 * number + step)
            epoch(model, optimizer, 100 * number + 50, divide=number % 2 == 0)
        plans.add(ours.plan is not None)
        apart += [f"epoch {number}: {what}" for what in different(theirs, ours, tolerance)]
    return {"apart": apart[:5], "plans": sorted(plans), "digest": digest(ours)}


def digest(model: Model) -> str:
    return b"".join(bits(p) for p in model.parameters()).hex()


MODELS = [("mlp", {}), ("mlp", {"find_unused_parameters": True}), ("normed", {})]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs(world_size: int) -> None:
    cases = {
        f"{build} {options}, given_plan={given}": (joined_epochs, build, options, given)
        for build, options in MODELS
        for given in (False, True)
    }
    for name, answers in cases_on_ranks(cases, world_size, timeout_s=120.0).items():
        for answer in answers:
            assert answer["apart"] == [], name
            assert answer["digest"] == answers[0]["digest"], name
            assert True in answer["plans"], name


def halved_by_those_who_remain(rank: int, collective: str, divide: bool) -> list[float]:
    """The gradient of ones that rank 1 and 2 see while rank 0 has joined."""
    torch.manual_seed(0)
    module = nn.Linear(5, 1, bias=False)
    plan = scatter({"weight": ""}, lanes=1)
    model = DataParallel(module, plan=plan if collective == "dense" else _bf16(plan))
    for _ in range(4):
        model(torch.ones(1, 5)).sum().backward()
        module.zero_grad()
    assert model.plan is not None
    seen: list[float] = []
    with join(model, divide):
        for _ in range(0 if rank == 0 else 3):
            module.zero_grad()
            model(torch.ones(1, 5)).sum().backward()
            assert module.weight.grad is not None
            seen = module.weight.grad.flatten().tolist()
    return seen


def _bf16(plan: Any) -> Any:
    from anabranch import planning as planners

    return planners.using(plan, "bf16")


def test_divides_by_the_ranks_that_remain_if_asked_to() -> None:
    kinds = [(collective, divide) for collective in ("dense", "bf16") for divide in (True, False)]
    found = cases_on_ranks({f"{kind}": (halved_by_those_who_remain, *kind) for kind in kinds}, 3)
    for collective, divide in kinds:
        for seen in found[f"{(collective, divide)}"][1:]:
            expected = 2 / 3 if divide else 1.0
            assert seen == pytest.approx([expected] * 5, rel=1e-2 if collective == "bf16" else 1e-6)


def uncounted(rank: int) -> str:
    """What rank 0, which has no inputs, is told when rank 1 begins a step and stops before ranks are counted."""
    group = dist.new_group(timeout=group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    module = mlp()
    model = DataParallel(module, process_group=group, plan=scatter(dtypes_of(module)))
    model(batch(0)).sum().backward()
    backend_of(group, "cpu").set_timeout(timedelta(seconds=1))
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=group)  # says that it has an input, as the begin of its forward would
        return ""
    with pytest.raises(CollectiveError) as failed, join(model, False):
        pass
    return str(failed.value)


def test_a_rank_that_is_not_counted_is_an_error_with_advice() -> None:
    said, _ = on_ranks(uncounted, 2)
    assert "could not count those that have inputs left" in said and "look for the first error among all ranks" in said


def evaluate_then_train(rank: int) -> list[str]:
    """join() in the middle of profiling does not disturb what is recorded around it."""
    theirs, ours = twins(Feature())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        for number in range(12):
            plain_train(model, optimizer, number)
            plain_train(model, optimizer, 50 + number)
            with join(model, True):
                for step in range(1 + rank):
                    model(batch(step)).sum().backward()
    assert ours.plan is not None and ours.timeline is not None
    assert len(ours.timeline.communication) == len(ours.plan)
    return different(theirs, ours, 0.0)


def test_join_between_profiled_steps() -> None:
    assert on_ranks(evaluate_then_train, 2) == [[], []]
