"""Behaviours of models, outputs, buffers, groups and wrappers that torch's repository tests, and its wheel does not."""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from parallel.models import Branches, Heads
from parallel.twins import WIDTH, Feature, Model, batch, mlp, plain_train, sgd, state
from torch_suite.comm_hooks import look_up, sparse_embedding
from torch_suite.observed import STEPS, Observe, Wrap, attempt, trained, training


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last((x.to(torch.cfloat) @ self.weight).abs())
        return result


class Convolutions(nn.Sequential):
    """Parameters in another memory format."""

    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (WIDTH, 1, 1)), nn.Conv2d(WIDTH, 8, 1), nn.Conv2d(8, 4, 1))
        self.to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    """An LSTM on a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[:, None, :].expand(-1, 3, -1), torch.tensor([3, 2, 2, 1]), True)
        return self.lstm(packed)[0].data


class Normalised(nn.Sequential):
    """Buffers that change in every forward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@dataclass
class Answer:
    """An output that is a dataclass."""

    value: torch.Tensor
    other: torch.Tensor


class WithOutput(nn.Module):
    """Two layers, whose outputs are given to ``form``."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.a(x), self.b(x))


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0] + out[1]),
    "nested": (lambda a, b: {"x": [a, {"y": (b,)}]}, lambda out: out["x"][0] + out["x"][1]["y"][0]),
    "dataclass": (Answer, lambda out: out.value + out.other),
    "one_detached": (lambda a, b: (a + b, b.detach()), lambda out: out[0]),
    "with_none": (lambda a, b: (a + b, None, "text", 3), lambda out: out[0]),
    "loss_inside": (lambda a, b: (a + b).square().mean(), lambda out: out),
}


def step_of(loss_of: Callable[[Any], torch.Tensor]) -> Any:
    """A training step with this loss."""

    def train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
        optimizer.zero_grad()
        loss = loss_of(model(batch(step))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def first_head(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One of two outputs is not used in the loss."""
    optimizer.zero_grad()
    model(batch(step))["a"].square().mean().backward()
    optimizer.step()
    return None


def rank_1_uses_one_head(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One rank's loss reaches one output only."""
    optimizer.zero_grad()
    out = model(batch(step))
    loss = out["a"].square().mean()
    if dist.get_rank() == 0:
        loss = loss + out["rest"][0].square().mean()
    loss.backward()
    optimizer.step()
    return None


def ignored_output(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """A forward whose output is thrown away before each step."""
    model(batch(step + 100))
    return plain_train(model, optimizer, step)


def ignored_branches(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """The same, with unused parameters."""
    model(batch(step + 100), (0,))
    optimizer.zero_grad()
    model(batch(step), (1, 2)).square().mean().backward()
    optimizer.step()
    return None


def validated(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Validation between steps."""
    with torch.no_grad():
        model.eval()
        value = model(batch(step + 100)).sum()
        model.train()
    return [value, plain_train(model, optimizer, step)]


def saved_and_loaded(wrap: Wrap) -> list[Any]:
    """A checkpoint of one training is continued by another wrapper."""
    model = wrap(mlp())
    seen = [plain_train(model, sgd(model), step) for step in range(STEPS)]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = wrap(mlp())
    other.load_state_dict(torch.load(file, weights_only=True))
    seen += [plain_train(other, sgd(other), step) for step in range(STEPS)]
    return [*seen, list(model.state_dict()), [name for name, _ in model.named_parameters()]]


def pickled(wrap: Wrap) -> list[Any]:
    """A saved wrapper trains on."""
    model = wrap(mlp())
    seen = [plain_train(model, sgd(model), step) for step in range(STEPS)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    return seen + [plain_train(copied, sgd(copied), step) for step in range(STEPS)]


def deep_copied(wrap: Wrap) -> list[Any]:
    """Model and copy train in turn."""
    model = wrap(mlp())
    twin = copy.deepcopy(model)
    optimizers = sgd(model), sgd(twin)
    return [
        plain_train(one, by, step) for step in range(STEPS) for one, by in zip((model, twin), optimizers, strict=True)
    ]


def logged(wrap: Wrap) -> list[Any]:
    """The types of DDP's logging data, before and after training."""
    model = wrap(mlp())
    optimizer = sgd(model)
    model._set_ddp_runtime_logging_sample_rate(2)
    seen: list[Any] = [{key: type(value).__name__ for key, value in model._get_ddp_logging_data().items()}]
    for step in range(STEPS):
        plain_train(model, optimizer, step)
    data = model._get_ddp_logging_data()
    counted = {key: data[key] for key in ("world_size", "rank", "module_name", "iteration", "num_parameter_tensors")}
    counted.pop("module_name")
    return [*seen, {key: type(value).__name__ for key, value in data.items()}, counted]


def joined(wrap: Wrap, unused: bool, throw: bool) -> list[Any]:
    """Ranks with another number of inputs each, inside join()."""
    model = wrap(Branches(), find_unused_parameters=unused)
    optimizer = sgd(model)
    seen: list[Any] = []

    def train() -> None:
        with model.join(throw_on_early_termination=throw):
            for step in range(4 + 5 * dist.get_rank()):
                optimizer.zero_grad()
                model(batch(step), (0,) if unused else (0, 1, 2, 3)).square().mean().backward()
                optimizer.step()

    seen.append(attempt(train))
    return [*seen, *(value.clone() for value in state(model).values())] if not throw else seen


def two_models(wrap: Wrap) -> list[Any]:
    """Two wrappers, one loss."""
    a, b = wrap(mlp()), wrap(mlp(2))
    optimizers = sgd(a), sgd(b)
    seen = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = b(a(batch(step))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(loss.detach())
    return seen


def wrapped_inside(wrap: Wrap) -> list[Any]:
    """A wrapper as a part of a model."""
    model = nn.Sequential(mlp(1), wrap(mlp()), nn.Linear(WIDTH, WIDTH))
    optimizer: Any = sgd(model)
    return [plain_train(model, optimizer, step) for step in range(STEPS)]  # type: ignore[arg-type]


def sharded_optimizer(wrap: Wrap) -> list[Any]:
    """ZeroRedundancyOptimizer."""
    model = wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return [plain_train(model, optimizer, step) for step in range(STEPS)]


def ignored_parameters(wrap: Wrap) -> list[Any]:
    """Parameters that are left to the user."""
    module = mlp()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    return trained(wrap, Feature(lambda: module))


def buffers_of_their_own(wrap: Wrap) -> list[Any]:
    """Buffers that differ by rank and stay so."""
    module = Normalised()
    module[1].running_mean += dist.get_rank()
    return trained(wrap, Feature(lambda: module, options={"broadcast_buffers": False}))


def not_synchronised(wrap: Wrap) -> list[Any]:
    """init_sync=False, with equal weights."""
    torch.manual_seed(3)
    return trained(wrap, Feature(options={"init_sync": False}))


def one_rank_only(wrap: Wrap) -> list[Any]:
    """A group of one rank; the other rank makes no wrapper."""
    group = dist.new_group([0])
    return trained(wrap, Feature(options={"process_group": group})) if dist.get_rank() == 0 else []


def in_groups(wrap: Wrap) -> list[Any]:
    """A group per rank."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    return trained(wrap, Feature(options={"process_group": groups[dist.get_rank()]}))


def meshed(wrap: Wrap) -> list[Any]:
    """On a device mesh."""
    return trained(wrap, Feature(options={"device_mesh": init_device_mesh("cpu", (2,))}))


def changed(change: Callable[[Model], object]) -> Observe:
    """A module that is changed between wrapping and training."""
    return training(Convolutions, step_of(lambda out: out.float()), prepare=change)


def hooked(wrap: Wrap) -> list[Any]:
    """Hooks of users, on the wrapper and on parameters."""
    model = wrap(mlp())
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 2)
        p.register_post_accumulate_grad_hook(lambda _: calls.append("gradient"))
    return [*[plain_train(model, sgd(model), step) for step in range(STEPS)], calls]


def behaviours() -> Iterator[tuple[str, Observe]]:
    """All of them by name."""
    for name, (form, loss_of) in OUTPUTS.items():
        yield f"output_{name}", training(lambda form=form: WithOutput(form), step_of(loss_of))
        yield f"output_{name}_static", training(lambda form=form: WithOutput(form), step_of(loss_of), static_graph=True)
    for views in (False, True):
        end = "_views" if views else ""
        options = {"gradient_as_bucket_view": views}
        unused = {"find_unused_parameters": True, **options}
        yield f"sparse_embedding{end}", training(sparse_embedding, look_up, **options)
        yield f"complex{end}", training(Complex, **options)
        yield f"channels_last{end}", training(Convolutions, **options)
        yield f"lstm{end}", training(Recurrent, **options)
        yield f"batch_norm{end}", training(Normalised, **options)
        yield f"ignored_output{end}", training(mlp, ignored_output, **options)
        yield f"ignored_output_unused{end}", training(Branches, ignored_branches, **unused)
        yield f"validation{end}", training(Normalised, validated, **options)
        yield f"find_unused_without_any{end}", training(mlp, **unused)
        yield f"unused_output{end}", training(Heads, first_head, **unused)
        yield f"output_unused_on_one_rank{end}", training(Heads, rank_1_uses_one_head, **unused)
        yield f"small_buckets{end}", training(mlp, bucket_cap_mb=0.0001, **options)
    yield "no_broadcast_of_buffers", training(Normalised, broadcast_buffers=False)
    yield "buckets_by_list", training(mlp, bucket_cap_mb_list=[0.0001, 0.001])
    yield "skip_unused", training(mlp, skip_all_reduce_unused_params=True, find_unused_parameters=True)
    yield "module_made_double", changed(lambda model: model.double())
    yield "module_made_contiguous", changed(lambda model: model.to(memory_format=torch.contiguous_format))
    for throw in (False, True):
        for unused in (False, True):
            yield (
                f"join{'_unused' if unused else ''}{'_throw' if throw else ''}",
                lambda wrap, unused=unused, throw=throw: joined(wrap, unused, throw),
            )
    for function in (saved_and_loaded, pickled, deep_copied, logged, two_models, wrapped_inside, sharded_optimizer):
        yield function.__name__, function
    for function in (ignored_parameters, buffers_of_their_own, not_synchronised, one_rank_only, in_groups):
        yield function.__name__, function
    for function in (meshed, hooked):
        yield function.__name__, function
