"""Behaviours of wrong use: torch's own error, at the same place, and whatever still works afterwards."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel.models import Branches
from parallel.twins import WIDTH, batch, mlp, plain_train, sgd
from torch_suite.observed import Observe, Wrap, attempt


def construction(build: Any, **options: Any) -> Observe:
    """Whether the wrapper can be made at all."""
    return lambda wrap: [attempt(lambda: wrap(build(), **options) and None)]


def no_group(wrap: Wrap) -> list[Any]:
    """Without init_process_group()."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return [attempt(lambda: wrap(mlp()) and None)]


def unused_parameters(wrap: Wrap) -> list[Any]:
    """Parameters without gradients are found at the next forward, and named."""
    model = wrap(Branches())
    seen: list[Any] = []
    for step in range(3):
        seen.append(attempt(lambda step=step: model(batch(step), (0,)).sum().backward()))
    return seen


def two_backwards(wrap: Wrap) -> list[Any]:
    """The same graph twice."""
    model = wrap(mlp())
    loss = model(batch(0)).sum()
    seen = [attempt(lambda: loss.backward(retain_graph=True)), attempt(loss.backward)]
    return [*seen, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def static_graph_late(wrap: Wrap) -> list[Any]:
    """Static graph set after construction and after training."""
    model = wrap(mlp())
    seen: list[Any] = [attempt(model._set_static_graph)]
    optimizer = sgd(model)
    seen += [plain_train(model, optimizer, step) for step in range(4)]
    return [*seen, attempt(model._set_static_graph)]


def logging_rate(wrap: Wrap) -> list[Any]:
    """The sample rate of DDP's logging must be at least one."""
    model = wrap(mlp())
    return [attempt(lambda rate=rate: model._set_ddp_runtime_logging_sample_rate(rate)) for rate in (1, 0)]


def pickled_with_group(wrap: Wrap) -> list[Any]:
    """A wrapper on a group of its own cannot be saved."""
    model = wrap(mlp(), process_group=dist.new_group())
    return [attempt(lambda: torch.save(model, io.BytesIO()))]


def wrapped_twice(wrap: Wrap) -> list[Any]:
    """A wrapper around a wrapper."""
    model = attempt(lambda: wrap(wrap(mlp())))
    return [model] if isinstance(model, str) else []


def replaced_parameter(wrap: Wrap) -> list[Any]:
    """A parameter that is replaced after wrapping is not averaged."""
    model = wrap(mlp())
    model.module[0].bias = nn.Parameter(torch.zeros(WIDTH))
    return [attempt(lambda step=step: model(batch(step)).sum().backward()) for step in range(3)]


def unknown_argument(wrap: Wrap) -> list[Any]:
    """The kind of the error."""
    return [str(attempt(lambda: wrap(mlp(), no_such_argument=1))).split(":")[0]]


def mesh_and_group(wrap: Wrap) -> list[Any]:
    """Two ways to say where to average."""
    mesh = init_device_mesh("cpu", (2,))
    return [attempt(lambda: wrap(mlp(), process_group=dist.group.WORLD, device_mesh=mesh) and None)]


def lazy() -> nn.Module:
    """Parameters without a size yet."""
    return nn.LazyLinear(WIDTH)


def frozen() -> nn.Module:
    """Nothing to train."""
    return copy.deepcopy(mlp()).requires_grad_(False)


def behaviours() -> Iterator[tuple[str, Observe]]:
    """One per error of DDP that can be reached without a GPU."""
    yield "wrong_nothing_to_train", construction(frozen)
    yield "wrong_lazy_parameters", construction(lazy)
    yield "wrong_device_ids", construction(mlp, device_ids=[0])
    yield "wrong_output_device", construction(mlp, output_device=0)
    yield "wrong_two_device_ids", construction(mlp, device_ids=[0, 1])
    yield "wrong_argument", unknown_argument
    yield "wrong_bucket_cap", construction(mlp, bucket_cap_mb="large")
    yield "wrong_delay_without_hook", construction(mlp, delay_all_reduce_named_params=[("0.weight", mlp()[0].weight)])
    yield "wrong_group", construction(mlp, process_group=3)
    yield "wrong_mesh_and_group", mesh_and_group
    yield "wrong_no_group", no_group
    yield "wrong_unused_parameters", unused_parameters
    yield "wrong_two_backwards", two_backwards
    yield "wrong_static_graph_late", static_graph_late
    yield "wrong_logging_rate", logging_rate
    yield "wrong_pickled_with_group", pickled_with_group
    yield "wrong_wrapped_twice", wrapped_twice
    yield "wrong_replaced_parameter", replaced_parameter
