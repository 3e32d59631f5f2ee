"""DDP's own arguments, errors and logging data, as stock DDP has them."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel
from parallel.twins import WIDTH, Feature, Model, batch, different, mlp, plain_train, twins
from ranks import cases_on_ranks, on_ranks


def delayed(rank: int, count: int) -> dict[str, Any]:
    """The gradients of the last ``count`` parameters are delayed until the first one's is ready."""
    models: list[Any] = []
    for wrap in (DistributedDataParallel, DataParallel):
        torch.manual_seed(7)
        module = mlp()
        named = list(module.named_parameters())
        models.append(wrap(module, delay_all_reduce_named_params=named[-count:], param_to_hook_all_reduce=named[0][1]))
    apart = []
    for step in range(12):
        for model in models:
            model.zero_grad()
            model(batch(step)).square().mean().backward()
            dist.barrier()  # nobody else waits for the delayed all-reduce
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.05)
        apart += different(models[0], models[1], 0.0)
    return {"apart": apart[:3], "explained": models[1].explain()}


def test_delayed_parameters() -> None:
    (alone,) = on_ranks(delayed, 1, 2)
    assert alone["apart"] == []
    found = cases_on_ranks({"two": (delayed, 2), "five": (delayed, 5)}, 2)
    for answer in found["two"] + found["five"]:
        assert answer["apart"] == [] and "delay_all_reduce_named_params" in answer["explained"]


def nothing_left(module: nn.Module) -> dict[str, Any]:
    return {"delay_all_reduce_named_params": list(module.named_parameters()), "param_to_hook_all_reduce": module.weight}


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]]]] = {
    "uninitialized": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), lambda _: {}),
    "nothing to train": (lambda: nn.Linear(2, 2).requires_grad_(False), lambda _: {}),
    "all delayed": (lambda: nn.Linear(2, 2), nothing_left),
    "half an option": (mlp, lambda module: {"delay_all_reduce_named_params": list(module.named_parameters())[:1]}),
    "devices": (mlp, lambda _: {"device_ids": [0]}),
}


def refused(rank: int, name: str) -> list[str]:
    warnings.filterwarnings("ignore", "Lazy modules are a new feature")
    build, options = REFUSED[name]
    said = []
    for wrap in (DistributedDataParallel, DataParallel):
        module = build()
        try:
            wrap(module, **options(module))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_refused_with_torchs_own_words() -> None:
    for name, answers in cases_on_ranks({name: (refused, name) for name in REFUSED}, 2).items():
        for theirs, ours in answers:
            assert theirs == ours, name


def logging_data(rank: int, options: dict[str, Any]) -> list[str]:
    """Keys and types of DDP's logging data in every stage; the comm hook's name is there when one runs."""
    theirs, ours = twins(Feature(options=options), "plans again and again")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    apart: list[str] = []
    for step in range(16):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        expected, found = (kinds(model) for model in (theirs, ours))
        apart += [
            f"step {step}: {key} {found.get(key)}, not {kind}"
            for key, kind in expected.items()
            if found.get(key) != kind
        ]
        apart += [f"step {step}: {key} is new" for key in found.keys() - expected.keys() - {"comm_hook"}]
    return apart[:8]


def kinds(model: Model) -> dict[str, str]:
    return {key: type(value).__name__ for key, value in model._get_ddp_logging_data().items()}


def test_logging_data_keep_their_keys_and_types() -> None:
    options: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for name, apart in cases_on_ranks({str(given): (logging_data, given) for given in options}, 2).items():
        assert apart == [[], []], name


def logged_errors(rank: int) -> list[object]:
    """Counting steps leaves no error in DDP's logging data."""
    _, ours = twins(Feature())
    for step in range(4):
        output = ours(batch(step))
        torch.autograd.grad(output.sum(), [ours.module[0].weight], retain_graph=True)
        output.sum().backward()
    data = ours._get_ddp_logging_data()
    return [data.get("has_error"), data.get("error")]


def test_counting_steps_logs_no_error() -> None:
    assert on_ranks(logged_errors, 2) == [[None, None]] * 2


class Net(nn.Module):
    """Layers that fill a bucket each: torch.compile makes a graph of each, so that DDP can send early."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH, 50_000] * 2 + [WIDTH]  # more than a bucket's MiB each
        self.layers = nn.ModuleList(nn.Linear(size, following) for size, following in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def split(rank: int, form: str) -> list[list[int]]:
    """The number of graphs after each step, and their sizes."""
    import torch._dynamo

    answer = []
    for wrap in (DistributedDataParallel, DataParallel):
        torch._dynamo.reset()
        sizes: list[int] = []

        def backend(graph: Any, inputs: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(list(graph.graph.nodes)))
            return graph

        torch.manual_seed(7)
        module: Any = Net()
        inside: Any = torch.compile(module, backend=backend) if form == "inside" else module
        model: Any = wrap(inside, bucket_cap_mb=1)
        model = torch.compile(model, backend=backend) if form == "outside" else model
        for step in range(3):
            model(batch(step)).square().mean().backward()
        answer.append(sizes)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("form", ["inside", "outside"])
def test_torch_compile_splits_graphs_at_ddps_buckets(form: str) -> None:
    for theirs, ours in on_ranks(split, 2, form, timeout_s=100):
        assert len(theirs) > 1, "nothing was split"
        assert ours == theirs
