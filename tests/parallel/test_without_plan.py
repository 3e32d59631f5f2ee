"""Where there is nothing to plan, a DataParallel is a DDP and says why."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from parallel.twins import WIDTH, Feature, Model, Outcome, batch, bits, different, mlp, plain_train, run, twins
from ranks import cases_on_ranks, on_ranks


def one_rank(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Against the bare module: at world size 1 there is nothing to average."""
    torch.manual_seed(7)
    bare = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH))
    torch.manual_seed(7)
    model = DataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH)), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (bare, model)]
    same = True
    for step in range(12):
        for candidate, optimizer in zip((bare, model), optimizers, strict=True):
            optimizer.zero_grad()
            candidate(batch(step)).square().mean().backward()
            optimizer.step()
        with model.no_sync():
            model(batch(step)).sum().backward()
        bare(batch(step)).sum().backward()
        for a, b in zip(bare.parameters(), model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            same &= bits(a) == bits(b) and bits(a.grad) == bits(b.grad)
    return {
        "same": same,
        "explained": model.explain(),
        "nothing": [model.plan, model.trace, model.network, model.timeline],
        "threads": [thread.name for thread in threading.enumerate() if "anabranch" in thread.name],
    }


def test_one_rank() -> None:
    names = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")
    cases = {"plain": (one_rank, {}), **{name: (one_rank, {name: True}) for name in names}}
    for name, (answer,) in cases_on_ranks(cases, 1).items():
        assert answer["same"], name
        assert answer["nothing"] == [None] * 4
        assert answer["threads"] == []
        assert answer["explained"].startswith("No plan: there is one rank, so nothing to send.")


class Words(nn.Module):
    """An embedding with sparse (COO) gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.embedding(x.abs().mul(5).long().clamp(max=19)).mean(1))
        return result


def plain_sgd(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Momentum knows no sparse gradients."""
    model.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.add_(p.grad, alpha=-0.05)
    return loss.detach()


def sparse(rank: int) -> dict[str, Any]:
    return run(rank, Feature(Words, plain_sgd), "keeps the plan")


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_embedding_gradients(world_size: int) -> None:
    outcomes = [Outcome.of(answer) for answer in on_ranks(sparse, world_size)]
    for outcome in outcomes:
        assert outcome.apart == []
        assert outcome.digest == outcomes[0].digest
        assert not outcome.planned
        assert "No plan: an embedding has sparse gradients" in outcome.explained


def never(rank: int) -> dict[str, Any]:
    return run(rank, Feature(ours={"profile_steps": 0}), "keeps the plan")


def test_profile_steps_0(found: dict[str, list[Any]]) -> None:
    for answer in found["never"]:
        assert answer["apart"] == []
        assert answer["explained"].startswith("No plan: profile_steps is 0.")


def own_hook(rank: int, after: int) -> list[str]:
    """A comm hook of the user's, registered at once or while steps are being profiled."""
    theirs, ours = twins(Feature(ours={"profile_steps": 50}))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    for step in range(8):
        if step == after:
            for model in (theirs, ours):
                model.register_comm_hook(dist.group.WORLD, allreduce_hook)
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
    apart = [n for n, p in ours.module.named_parameters() if bits(p) != bits(theirs.module.get_parameter(n))]
    alive = [thread.name for thread in threading.enumerate() if "anabranch" in thread.name]
    ours.close()
    return [*apart, *alive] or [ours.explain()]


Registered = Callable[[Model], None]
COMM_HOOKS: Mapping[str, Registered] = {
    "a function": lambda model: model.register_comm_hook(dist.group.WORLD, allreduce_hook),
    "fp16": lambda model: model.register_comm_hook(dist.group.WORLD, fp16_compress_hook),
    "built in": lambda model: model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
    "PowerSGD": lambda model: model.register_comm_hook(PowerSGDState(dist.group.WORLD, 1, 2), powerSGD_hook),
}


def late_hook(rank: int, name: str, options: dict[str, Any], scenario: str) -> dict[str, Any]:
    """A comm hook of the user's, registered while a plan runs."""
    theirs, ours = twins(Feature(normed, options=options), scenario)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    apart: list[str] = []
    step = 0
    while step < 60 and (ours.plan is None or "running" not in ours.explain().splitlines()[0]):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        step += 1
    assert ours.plan is not None
    said = []
    for model in (theirs, ours):
        COMM_HOOKS[name](model)
        try:
            COMM_HOOKS[name](model)
        except RuntimeError as error:
            said.append(str(error))
    for further in range(step, step + 6):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, further)
        apart += different(theirs, ours, 0.0)
    alive = [thread.name for thread in threading.enumerate() if "anabranch" in thread.name]
    return {"apart": apart[:3], "alive": alive, "twice": len(set(said)), "explained": ours.explain()}


def normed() -> nn.Module:
    return nn.Sequential(mlp(2), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_comm_hook_that_is_registered_while_a_plan_runs() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("a function", {}, "keeps the plan"),
        ("a function", {"static_graph": True}, "keeps the plan"),
        ("a function", {"find_unused_parameters": True}, "is given the plan"),
        ("fp16", {"gradient_as_bucket_view": True}, "is given the plan"),
        ("built in", {}, "is given the plan"),
        ("PowerSGD", {}, "keeps the plan"),
    ]
    for name, answers in cases_on_ranks({str(case): (late_hook, *case) for case in cases}, 2).items():
        for answer in answers:
            assert answer["apart"] == [] and answer["alive"] == [], name
            assert answer["twice"] == 1, "a second hook is refused with torch's own words"
            assert "hook" in answer["explained"] and "was registered" in answer["explained"]


def hook_says(rank: int) -> str:
    model = DataParallel(mlp())
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    return model.explain()


def test_a_comm_hook_of_the_users_is_named(found: dict[str, list[Any]]) -> None:
    closed = ["No plan: it was closed. Wrap the module again to train it."]
    assert found["own hook at once"] == found["own hook later"] == [closed] * 2
    assert all("the comm hook allreduce_hook was registered" in said for said in found["hook says"])


def ignored_parameters(rank: int) -> bool:
    """What DDP is told to leave to each rank may differ between them."""
    modules = []
    for _ in range(2):
        torch.manual_seed(7)
        module = nn.ModuleDict({"shared": nn.Linear(WIDTH, WIDTH), "own": nn.Linear(WIDTH, 1 + rank)})
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "own.bias"])
        module.forward = lambda x, m=module: m["own"](m["shared"](x).tanh())
        modules.append(module)
    models = [DistributedDataParallel(modules[0]), DataParallel(modules[1])]
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(batch(step)).square().mean().backward()
    theirs, ours = (dict(model.module.named_parameters()) for model in models)
    return all(bits(p.grad) == bits(theirs[n].grad) for n, p in ours.items() if p.grad is not None)


def test_parameters_that_ddp_ignores(found: dict[str, list[Any]]) -> None:
    assert found["ignored parameters"] == [True, True]


def is_one(rank: int) -> list[bool]:
    model = DataParallel(mlp())
    return [
        isinstance(model, DistributedDataParallel),
        hasattr(model, "no_sync"),
        "module.0.weight" in model.state_dict(),
    ]


def test_is_a_ddp(found: dict[str, list[Any]]) -> None:
    assert found["is one"] == [[True] * 3] * 2


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "never": (never,),
            "own hook at once": (own_hook, 0),
            "own hook later": (own_hook, 5),
            "hook says": (hook_says,),
            "ignored parameters": (ignored_parameters,),
            "is one": (is_one,),
        },
        2,
    )
