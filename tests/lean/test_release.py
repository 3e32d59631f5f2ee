"""Release under Lean: close() frees memory at once, and a constructor that fails leaves no group, thread or hook."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import anabranch as ab
from lean.launches import each_on_ranks
from ranks import on_ranks

WIDTH = 16
Factory = Callable[[Sequence[nn.Parameter]], Any]


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def in_call(number: int, instead: Factory) -> Factory:
    """SGD, but ``instead`` in this call: call 0 makes the user's optimizer, the others those of buckets."""
    calls = iter(range(100))
    return lambda parameters: instead(parameters) if next(calls) == number else sgd(parameters)


def fail(_: object) -> None:
    raise ArithmeticError("no optimizer today")


def freeze_last(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    parameters[-1].requires_grad_(False)
    return sgd(parameters)


# How the constructor fails: the optimizer of a rank, other arguments, the error of ranks that fail by themselves.
FAILURES: dict[str, tuple[Callable[[int], Factory], dict[str, Any], type[Exception]]] = {
    "the user's optimizer": (lambda _: fail, {}, ArithmeticError),
    "a bucket's optimizer": (lambda _: in_call(1, fail), {}, ArithmeticError),
    "a bucket's optimizer is none": (lambda _: in_call(1, lambda _: None), {}, ValueError),
    "a parameter is frozen meanwhile": (lambda _: in_call(1, freeze_last), {}, RuntimeError),
    "the optimizers differ": (
        lambda rank: lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (1 + rank)), {}, ab.DisagreementError
    ),
    "rank 1 has no optimizer": (lambda rank: fail if rank == 1 else sgd, {}, ArithmeticError),
    "rank 1 has none for a bucket": (lambda rank: in_call(1, fail) if rank == 1 else sgd, {}, ArithmeticError),
    "the plan does not fit": (lambda _: sgd, {"plan": ab.Plan((ab.Bucket(("other",)),))}, ab.PlanError),
}  # fmt: skip


def held(model: nn.Module) -> list[Any]:
    """What a wrapper takes: groups, threads, hooks on parameters and modules, patched forwards."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [len(getattr(part, table)) for part in model.modules() for table in tables]
    hooks += [
        len(getattr(p, table, None) or ())
        for p in model.parameters()
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    patched = [name for name, part in model.named_modules() if "forward" in vars(part)]
    threads = sorted(thread.name for thread in threading.enumerate())
    return [len(dist.distributed_c10d._world.pg_map), threads, hooks, patched]


def failed(rank: int, compress: bool) -> dict[str, list[Any]]:
    """For each failure: the error, and whether everything is as before."""
    answers = {}
    for name, (optimizer, options, _) in FAILURES.items():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        before = held(model)
        memory = ab.Lean(optimizer(rank), activations=ab.Activations("recompute"))
        options = {**options, "compress": ab.OkTopk(0.1)} if compress else options
        with pytest.raises(Exception) as caught:
            ab.DataParallel(model, memory=memory, **options)
        answers[name] = [type(caught.value).__name__, str(caught.value), before, held(model)]
    return answers


@pytest.mark.parametrize("compress", [False, True])
def test_a_constructor_that_fails_leaves_nothing(compress: bool) -> None:
    answers = on_ranks(failed, 2, compress)
    for name, (_, _, error) in FAILURES.items():
        for rank in range(2):
            kind, words, before, after = answers[rank][name]
            if name.startswith("rank 1") and rank == 0:
                assert kind == "DisagreementError" and "failed on ranks 1" in words and "no optimizer today" in words
            else:
                assert kind == error.__name__, (name, rank, words)
            assert after == before, (name, rank)


def closed(rank: int, residuals: Any) -> list[list[str]]:
    """What is freed by close() while the wrapper, its outputs and its optimizer are still there; and what is not."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    plan = ab.Plan((ab.Bucket(("1.weight",), collective="oktopk:0.1"), ab.Bucket(("0.weight",))))
    lean: Any = ab.DataParallel(
        model, plan=plan, compress=ab.OkTopk(0.1), profile_steps=0, memory=ab.Lean(sgd, residuals=residuals)
    )
    for _ in range(3):
        output = lean(torch.full((2, WIDTH), 1.0 + rank))
        output.sum().backward()
    exchanges, comms = lean._collectives.residuals, list(lean._collectives._families[0]._comms.values())
    memory = {
        f"residual of {state.names}": state.residual if state.packed is None else state.packed.message
        for state in exchanges.buckets()
    }
    memory |= {f"zeros of {number}": comm._zeros for number, comm in enumerate(comms)}
    assert not lean.layout._slots._slots, "none between steps"
    storages = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in memory.items()}
    optimizer = lean.optimizer
    del memory, exchanges, comms
    lean.close()
    assert output.requires_grad and optimizer.param_groups
    return [list(storages), [name for name, storage in storages.items() if not storage.expired()]]


def test_close_frees_memory_while_the_wrapper_is_there() -> None:
    for answers in each_on_ranks(closed, 2, [("in place",), ("bf16",)]):
        for there, left in answers:
            assert len(there) == 2 and left == []
