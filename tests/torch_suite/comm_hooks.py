"""Behaviours with comm hooks: the built-in ones, hooks of Python, and hooks that DDP must refuse."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from parallel.models import Branches
from parallel.test_features import accumulate, branches
from parallel.twins import WIDTH, Feature, Model, mlp, plain_train, sgd
from torch_suite.observed import Observe, Wrap, attempt, trained, training


def halved(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """An average that is computed in the callback of a future."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / (2 * dist.get_world_size()))


def constant(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Nothing is sent."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 0.25))
    return future


def no_future(state: object, bucket: dist.GradBucket) -> Any:
    return 1


def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never run")


def wrong_return(state: object, bucket: dist.GradBucket) -> torch.Tensor:
    raise AssertionError("never run")


def sparse_embedding() -> nn.Module:
    """Its gradients are sparse tensors."""
    return nn.EmbeddingBag(10, WIDTH, sparse=True)


def look_up(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One step on an embedding."""
    optimizer.zero_grad()
    rows = torch.randint(0, 10, (4, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(rows).square().mean().backward()
    optimizer.step()
    return None


def with_hook(hook: Any, state: object = None) -> Callable[[Model], object]:
    """Registers a hook."""
    return lambda model: model.register_comm_hook(state, hook)


HOOKS: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,  # refused without NCCL
    "fp16_wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "noop": debugging_hooks.noop_hook,
    "then": halved,
    "constant": constant,
    "no_future": no_future,
    "wrong_bucket": wrong_bucket,
    "wrong_return": wrong_return,
    "not_callable": 1,
}


def twice(wrap: Wrap) -> list[Any]:
    """A second hook is refused, and the first one goes on."""
    results: list[object] = []

    def register(model: Model) -> None:
        model.register_comm_hook(None, halved)
        results.append(attempt(lambda: model.register_comm_hook(None, default_hooks.allreduce_hook)))

    return trained(wrap, Feature(), register) + results


def after_steps(wrap: Wrap) -> list[Any]:
    """A hook that is registered when some steps have been made."""
    model = wrap(mlp())
    optimizer = sgd(model)
    seen: list[Any] = [plain_train(model, optimizer, step) for step in range(6)]
    seen.append(attempt(lambda: model.register_comm_hook(None, default_hooks.allreduce_hook)))
    return seen + [attempt(lambda step=step: plain_train(model, optimizer, step)) for step in range(6, 12)]


def behaviours() -> Iterator[tuple[str, Observe]]:
    """Hooks by themselves, and together with DDP's options."""
    for name, hook in HOOKS.items():
        yield f"hook_{name}", training(mlp, prepare=with_hook(hook))
    for name in ("allreduce", "then"):
        hook = with_hook(HOOKS[name])
        yield f"hook_{name}_views", training(mlp, prepare=hook, gradient_as_bucket_view=True)
        yield f"hook_{name}_static", training(mlp, prepare=hook, static_graph=True)
        yield f"hook_{name}_no_sync", training(mlp, accumulate, hook)
        yield f"hook_{name}_unused", training(Branches, branches, hook, find_unused_parameters=True)
        yield f"hook_{name}_small_buckets", training(mlp, prepare=hook, bucket_cap_mb=0.0001)
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        yield (
            f"hook_builtin_{kind.name.lower()}",
            training(mlp, prepare=lambda model, kind=kind: model._register_builtin_comm_hook(kind)),
        )
    yield "hook_sparse", training(sparse_embedding, look_up, with_hook(default_hooks.allreduce_hook))
    yield "hook_twice", twice
    yield "hook_after_steps", after_steps
