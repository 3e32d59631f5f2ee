"""A DataParallel over a longer time: checkpoints, copies, replanning, 200 steps, forwards of one rank alone."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anabranch import DataParallel
from parallel.twins import (
    SCENARIOS,
    WIDTH,
    Feature,
    batch,
    bits,
    different,
    mlp,
    plain_train,
    planned,
    ring,
    scattered,
    sgd,
    stage_of,
    steps,
    twins,
)
from ranks import cases_on_ranks, on_ranks

pytestmark = pytest.mark.slow


def to_ddp_and_back(rank: int) -> list[str]:
    """A checkpoint of either loads into the other while it tunes, and training continues in the same way."""
    apart = []
    theirs, ours = twins(Feature(), "plans again and again")
    optimizers = [sgd(theirs), sgd(ours)]
    for step in steps(ours, 2):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        if step % 3 == 2:
            states = [copy.deepcopy(model.state_dict()) for model in (theirs, ours)]
            optimizer_states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            assert list(states[0]) == list(states[1])
            saved = io.BytesIO()
            torch.save(states[1], saved)
            saved.seek(0)
            theirs.load_state_dict(torch.load(saved, weights_only=True))
            ours.load_state_dict(states[0])
            optimizers[0].load_state_dict(optimizer_states[1])
            optimizers[1].load_state_dict(optimizer_states[0])
        apart += different(theirs, ours, 0.0)
    return apart


def test_state_dict_loads_into_ddp_and_back(found: dict[str, list[Any]]) -> None:
    assert found["to DDP and back"] == [[], []]


def averaged_copy(rank: int) -> list[str]:
    """An exponential average of the wrapper itself, made before and after there is a plan."""
    early_apart = []
    theirs, ours = twins(Feature())
    optimizers = [sgd(theirs), sgd(ours)]
    averages: list[list[AveragedModel]] = []
    for step in steps(ours):
        if step in (1, 20):
            averages.append([AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (theirs, ours)])
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        for pair in averages:
            for average, model in zip(pair, (theirs, ours), strict=True):
                average.update_parameters(model)
    assert ours.plan is not None
    late = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (theirs, ours)]
    for pair in [*averages, late]:
        with torch.no_grad():
            expected, found = (average(batch(0)) for average in pair)
        if not torch.equal(expected, found):
            early_apart.append("outputs")
        copied = pair[1].module
        assert isinstance(copied, DataParallel) and "it is a copy" in copied.explain()
    return early_apart


def test_copies_for_averaging(found: dict[str, list[Any]]) -> None:
    assert found["averaged copy"] == [[], []]


def copy_trains(rank: int) -> str:
    """A deep copy of a planned model is a working DataParallel that runs DDP's own buckets."""
    model = planned()
    other = copy.deepcopy(model)
    reference = DistributedDataParallel(copy.deepcopy(model.module))
    for candidate in (other, reference):
        plain_train(candidate, sgd(candidate), 0)
    assert different(reference, other, 0.0) == []
    plain_train(model, sgd(model), 1)  # and the original goes on
    other.close()
    return stage_of(model)


def test_deep_copy_of_a_planned_model(found: dict[str, list[Any]]) -> None:
    assert all("running" in said for said in found["copy trains"])


def replanned(rank: int) -> dict[str, Any]:
    """replan() on demand: no step is lost, and the losses stay those of DDP."""
    said: list[str] = []
    apart: list[str] = []
    theirs, ours = twins(Feature())
    optimizers = [sgd(theirs), sgd(ours)]
    asked = 0
    for step in range(100):
        losses = [plain_train(m, o, step) for m, o in zip((theirs, ours), optimizers, strict=True)]
        apart += different(theirs, ours, 0.0)
        assert isinstance(losses[0], torch.Tensor) and isinstance(losses[1], torch.Tensor)
        if not torch.equal(losses[0], losses[1]):
            apart.append(f"loss {step}")
        if stage_of(ours) not in said[-1:]:
            said.append(stage_of(ours))
        profiled = sum("profiling" in stage for stage in said)  # a doubtful win is tried once more before a request
        if "running" in stage_of(ours) and step % 5 == 0 and asked < min(2, profiled):
            ours.replan()
            asked += 1
    return {"said": said, "apart": apart, "asked": asked}


def test_replan_on_demand(found: dict[str, list[Any]]) -> None:
    for answer in found["replanned"]:
        assert answer["apart"] == []
        profiled = [said for said in answer["said"] if "profiling" in said]
        assert answer["asked"] == 2
        assert len(profiled) == 3
        assert "running" in answer["said"][-1]


def alone_on_rank_0(rank: int, kind: str) -> list[str]:
    """Rank 0 runs forwards of its own after every step, then everyone meets at a barrier; through all stages."""
    apart = []
    theirs, ours = twins(Feature(), "plans again and again")
    optimizers = [sgd(theirs), sgd(ours)]
    for step in steps(ours, 2):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
            if rank == 0 and step > 1:  # before, DDP itself rebuilds its buckets in the forward
                model.eval()
                if kind == "no_grad":
                    with torch.no_grad():
                        model(batch(step))
                elif kind == "with grad":
                    model(batch(step))
                elif kind == "autograd.grad":
                    x = batch(step).requires_grad_()
                    torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
                else:
                    with model.no_sync():
                        model(batch(step)).sum().backward()
                    optimizer.zero_grad()
                model.train()
            dist.barrier()
        apart += [name for name in different(theirs, ours, 0.0) if kind != "no_sync" or "gradient" not in name]
    return apart


def test_forwards_of_rank_0_alone() -> None:
    cases = {kind: (alone_on_rank_0, kind) for kind in ("no_grad", "with grad", "autograd.grad", "no_sync")}
    for kind, apart in cases_on_ranks(cases, 2).items():
        assert apart == [[], []], kind


def curve(rank: int) -> dict[str, Any]:
    """200 steps of a small convolutional classifier on images that can be learnt."""
    torch.manual_seed(0)
    templates = torch.randn(10, 1, 8, 8)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 16, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip

    losses: list[list[float]] = [[], []]
    models = twins(Feature(build), "plans again and again")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    plans = set()
    for step in range(200):
        chance = torch.Generator().manual_seed(2 * step + rank)
        labels = torch.randint(0, 10, (16,), generator=chance)
        images = templates[labels] + torch.randn(16, 1, 8, 8, generator=chance)
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        plans.add(models[1].plan.fingerprint if models[1].plan is not None else None)
    return {"losses": losses, "plans": len(plans), "weights": b"".join(map(bits, models[1].parameters())).hex()}


@pytest.mark.campaign_but_first
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_curve_of_200_steps_is_ddps(world_size: int) -> None:
    answers = on_ranks(curve, world_size)
    for answer in answers:
        theirs, ours = answer["losses"]
        assert ours == theirs if world_size == 2 else ours == pytest.approx(theirs, abs=1e-4)
        assert theirs[-1] < theirs[0] / 4, "it was to learn something"
        assert answer["plans"] >= 2
        assert answer["weights"] == answers[0]["weights"]


def in_a_subgroup(rank: int) -> list[str]:
    """Ranks 0 and 2 of three train; rank 1 has nothing to do with it."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    feature = Feature(options={"process_group": group})
    torch.manual_seed(7)
    theirs = DistributedDataParallel(mlp(), process_group=group)
    torch.manual_seed(7)
    ours = DataParallel(
        mlp(),
        planner=scattered,
        profile_steps=2,
        network=ring().at(2),
        **feature.options,
        policy=SCENARIOS["keeps the plan"],
    )
    optimizers = [sgd(theirs), sgd(ours)]
    apart = []
    for step in steps(ours):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        apart += different(theirs, ours, 0.0)
    assert ours.plan is not None
    ours.close()
    return apart


def test_a_process_group_of_some_ranks() -> None:
    assert on_ranks(in_a_subgroup, 3) == [[], [], []]


def two_models(rank: int) -> list[str]:
    """Two planned models in one program, trained in turns: their messages never meet."""
    features = (Feature(), Feature(lambda: nn.Linear(WIDTH, WIDTH)))
    pairs = [twins(feature, "plans again and again") for feature in features]
    optimizers = [[sgd(model) for model in pair] for pair in pairs]
    apart = []
    for step in steps(pairs[0][1], 2):
        for which in (0, 1):
            inputs = [model(batch(step)).square().mean() for model in pairs[0] + pairs[1]]
            if which == 0:
                (inputs[0] + inputs[2]).backward()
                (inputs[1] + inputs[3]).backward()
                for pair in optimizers:
                    for optimizer in pair:
                        optimizer.step()
                        optimizer.zero_grad()
        apart += [name for pair in pairs for name in different(*pair, 0.0)]
    return apart


def test_two_models_in_one_program(found: dict[str, list[Any]]) -> None:
    assert found["two models"] == [[], []]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "to DDP and back": (to_ddp_and_back,),
            "averaged copy": (averaged_copy,),
            "copy trains": (copy_trains,),
            "replanned": (replanned,),
            "two models": (two_models,),
        },
        2,
        timeout_s=90.0,
    )


def held(rank: int, at: int, callers: tuple[int, ...]) -> dict[str, object]:
    """Where it would plan again and again, some ranks tell it to hold after step ``at``."""
    apart = []
    theirs, ours = twins(Feature(), "plans again and again")
    optimizers = [sgd(theirs), sgd(ours)]
    plans = []
    for step in range(120):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        apart += different(theirs, ours, 0.0)
        plans.append(ours.plan)
        if step == at and rank in callers:
            ours.hold()
    explained = ours.explain().partition("\n")[0]
    ours.close()
    later = plans[at + 20 :]
    return {
        "apart": apart,
        "held": explained.endswith(", held.") and later.count(later[0]) == len(later),
        "plan": later[0].fingerprint if later[0] is not None else None,
    }


def test_hold_keeps_the_best_layout_and_averaging_continues() -> None:
    calls: list[tuple[int, tuple[int, ...]]] = [(1, (0, 1)), (80, (0, 1)), (80, (0,)), (80, (1,))]
    answers = cases_on_ranks({str(call): (held, *call) for call in calls}, 2, timeout_s=120.0)
    for at, callers in calls:
        first, second = answers[str((at, callers))]
        assert first == second and first["apart"] == []
        assert first["held"] == (0 in callers), "rank 0's call counts, whether or not others call"
        if at == 1:
            assert first["plan"] is None, "before anything was tried, its own buckets are the best seen"
