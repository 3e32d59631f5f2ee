"""Layouts of a live DDP: any partition, exactly, from the next step on, many times in a row, in every mode."""

import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from anabranch import Bucket, Plan
from anabranch.ddp.reducer import (
    BucketIndices,
    Reduction,
    built_by_ddp,
    reduced_parameters,
    relayout,
)
from anabranch.parallel import DataParallel
from ddp.inspection import layout_in_force
from parallel.twins import WIDTH, batch, bits, mlp, ring
from ranks import cases_on_ranks, on_ranks


class Odd(nn.Module):
    """A frozen layer, a tied weight and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.wide = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.b(self.a(x).tanh()).tanh()).double()
        for layer in self.wide:
            x = layer(x).tanh()
        return x


MODES: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]] = {
    "plain": (mlp, {}),
    "unused": (mlp, {"find_unused_parameters": True}),
    "static": (mlp, {"static_graph": True}),
    "static and unused": (mlp, {"static_graph": True, "find_unused_parameters": True}),
    "views": (mlp, {"gradient_as_bucket_view": True}),
    "views, unused": (mlp, {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "views, static": (mlp, {"gradient_as_bucket_view": True, "static_graph": True}),
    "small caps": (mlp, {"bucket_cap_mb": 1}),
    "odd": (Odd, {}),
    "odd, unused": (Odd, {"find_unused_parameters": True}),
    "odd, static": (Odd, {"static_graph": True, "gradient_as_bucket_view": True}),
}


def partition(chance: random.Random, parameters: list[nn.Parameter]) -> BucketIndices:
    """Shuffled buckets of any length, each of one dtype."""
    layout: BucketIndices = []
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        indices = [i for i, p in enumerate(parameters) if p.dtype == dtype]
        chance.shuffle(indices)
        while indices:
            size = chance.randint(1, len(indices))
            layout.append(indices[:size])
            indices = indices[size:]
    chance.shuffle(layout)
    return layout


def averaging(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook as simple as can be; what it saw is in ``seen``."""
    seen.append(bucket.index())
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


seen: list[int] = []


def relayouts(rank: int, mode: str, hooked: bool, rounds: int = 6) -> dict[str, Any]:
    """Random layouts in a row, each checked after its first and second step, gradients against a DDP left alone."""
    warnings.filterwarnings("ignore", "You passed find_unused_parameters=true")
    build, options = MODES[mode]
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(DistributedDataParallel(build(), **options))
    left_alone, model = models
    chance = random.Random(11)
    wrong, apart, orders = [], [], set()
    for number in range(rounds):
        layout = partition(chance, list(reduced_parameters(model).values()))
        relayout(model, layout, averaging if hooked else None)
        for step in range(3):
            seen.clear()
            for each in models:
                each.zero_grad()
                each(batch(10 * number + step)).square().mean().backward()
            if layout_in_force(model) != layout:
                wrong.append([number, step])
            if hooked:
                # in the first step of a static graph torch numbers every bucket 0
                orders.add(
                    seen == ([0] * len(layout) if step == 0 and model.static_graph else list(range(len(layout))))
                )
            for (name, a), (_, b) in zip(left_alone.named_parameters(), model.named_parameters(), strict=True):
                if a.grad is not None and (b.grad is None or bits(a.grad) != bits(b.grad)):
                    apart.append(f"{number} {step} {name}")
    return {"wrong": wrong, "apart": apart, "orders": sorted(orders)}


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True], ids=["no hook", "hook"])
def test_random_layouts_in_a_row(hooked: bool) -> None:
    for mode, answers in cases_on_ranks({mode: (relayouts, mode, hooked) for mode in MODES}, 2).items():
        for answer in answers:
            assert answer["wrong"] == [], mode
            assert answer["apart"] == [], mode
            assert answer["orders"] == ([True] if hooked else []), "buckets are launched in the layout's order"


def there_and_back(rank: int, mode: str) -> dict[str, Any]:
    """DDP's own buckets, others, and its own again, both ways there are."""
    warnings.filterwarnings("ignore", "You passed find_unused_parameters=true")
    build, options = MODES[mode]
    model = DistributedDataParallel(build(), **options)

    def train(steps: int = 4) -> BucketIndices:
        for step in range(steps):
            model.zero_grad()
            model(batch(step)).sum().backward()
        return layout_in_force(model)

    own = train()
    known = built_by_ddp(model)
    relayout(model, partition(random.Random(1), list(reduced_parameters(model).values())), averaging)
    assert train() != own
    assert model._comm_hooks
    relayout(model, None, None)
    again = train()
    hooks = len(model._comm_hooks)
    relayout(model, partition(random.Random(2), list(reduced_parameters(model).values())), None)
    train()
    relayout(model, known, None)
    return {"own": own, "again": again, "known": known, "at once": train(1), "hooks": hooks}


def test_back_to_ddps_own() -> None:
    for mode, answers in cases_on_ranks({mode: (there_and_back, mode) for mode in MODES}, 2).items():
        for answer in answers:
            assert answer["again"] == answer["own"], mode
            assert answer["hooks"] == 0
            if "unused" in mode and "static" not in mode:
                assert answer["known"] is None, "DDP never rebuilds there"
            else:
                assert answer["known"] == answer["at once"] == answer["own"], mode


def unfinished(rank: int) -> str:
    """Between a forward whose backward failed and the next one: DDP's own error."""
    model = DistributedDataParallel(mlp())
    handle = model.module[0].weight.register_hook(_fail)
    try:
        model(batch(0)).sum().backward()
    except ZeroDivisionError:
        handle.remove()
    try:
        relayout(model, None, None)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_not_after_an_unfinished_backward() -> None:
    assert all("Expected to have finished reduction" in message for message in on_ranks(unfinished, 2))


def names(rank: int) -> list[str]:
    return list(reduced_parameters(DistributedDataParallel(Odd())))


def test_reduced_parameters_are_those_that_train_and_shared_ones_once() -> None:
    (found,) = on_ranks(names, 1)
    assert sorted(found) == [
        "a.bias",
        "a.weight",
        "b.bias",
        *(f"wide.{i}.{k}" for i in (0, 1) for k in ("bias", "weight")),
    ]


CAPS: Mapping[str, Any] = {"bucket_cap_mb_list": [1e-4, 2e-4]}


def same_layout(rank: int) -> list[str]:
    """With DDP's own buckets as the plan, three ranks add in the same order: equal to the last bit."""
    torch.manual_seed(7)
    theirs = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), **CAPS)
    for step in range(3):
        theirs(batch(step)).sum().backward()
    order = list(reduced_parameters(theirs))
    plan = Plan(tuple(Bucket(tuple(order[i] for i in bucket)) for bucket in layout_in_force(theirs)))
    assert len(plan) > 2
    torch.manual_seed(7)
    ours = DataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), plan=plan, network=ring())
    apart = []
    for step in range(8):
        for model in (theirs, ours):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        if step > 3:
            apart += [
                name
                for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True)
                if a.grad is None or b.grad is None or bits(a.grad) != bits(b.grad)
            ]
    assert ours.plan == plan
    return apart


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_same_layout_gives_the_same_bits_on_more_ranks(world_size: int) -> None:
    assert on_ranks(same_layout, world_size) == [[]] * world_size


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def seen_reductions(rank: int, mode: str) -> list[int]:
    """How many reductions are seen in steps, in what is no step, and when the reducer is replaced."""
    warnings.filterwarnings("ignore", "You passed find_unused_parameters=true")
    build, options = MODES.get(mode, (Single, {}))
    model = DistributedDataParallel(build(), **options)
    ends: list[int] = []

    def expect() -> Reduction:
        return Reduction(model, lambda: ends.append(torch._C._current_graph_task_id()))

    counts = []
    for step in range(4):
        output = model(batch(step))
        reduction = expect()
        output.sum().backward(retain_graph=True)
        output.sum().backward()  # each rank's own
        assert reduction.over
        counts.append(len(ends))
    output = model(batch(5))
    reduction = expect()
    with model.no_sync():
        model(batch(5))
    if "static" not in mode:
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(output.sum(), trained, retain_graph=True)
    assert not reduction.over
    output.sum().backward()
    counts.append(len(ends))
    assert all(task >= 0 for task in ends), "not inside backward"
    dropped = expect()
    del dropped
    relayout(model, None, None)
    return [*counts, len(ends)]


def test_a_reduction_is_seen_once() -> None:
    modes = ["plain", "unused", "static", "views", "odd", "one parameter"]
    for mode, counts in cases_on_ranks({mode: (seen_reductions, mode) for mode in modes}, 2).items():
        assert counts == [[1, 2, 3, 4, 5, 5]] * 2, mode


class SignalError(Exception):
    """What a signal handler of a program raises."""


def signal_in_backward(rank: int) -> list[str]:
    """Where a signal's exception is raised that arrives while backward runs in C++ and its end is awaited."""

    def interrupt(number: int, frame: object) -> None:
        raise SignalError

    signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    outcomes = []
    for attempt in range(4):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
        begun, sent = threading.Event(), threading.Event()

        def send(begun: threading.Event = begun, sent: threading.Event = sent) -> None:
            begun.wait()
            time.sleep(0.01)  # now backward is in C++, if the machine is quick enough
            signal.pthread_kill(main, signal.SIGUSR1)
            sent.set()

        sender = threading.Thread(target=send)
        sender.start()
        ends: list[int] = []
        outcome = "lost"
        try:
            output = model(torch.ones(512, 512) * attempt)
            output.register_hook(lambda _, begun=begun: begun.set())
            reduction = Reduction(model, lambda ends=ends: ends.append(1))  # type: ignore[misc]
            output.square().mean().backward()
            sent.wait()
        except SignalError:
            outcome = "raised"
        assert reduction.over, "a step ends on all ranks"
        sender.join()
        outcomes.append(outcome)
    return outcomes


def test_a_signal_in_backward_is_raised() -> None:
    """Python drops what is raised in callbacks of weak references, so no code of ours runs there."""
    assert on_ranks(signal_in_backward, 2) == [["raised"] * 4] * 2
