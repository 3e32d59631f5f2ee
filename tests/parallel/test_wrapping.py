"""What cannot be wrapped is refused by a sentence: models that are wrapped already, and DTensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Lean, LeanDataParallel, OkTopk
from parallel.twins import batch, different, mlp, plain_train, sgd
from ranks import cases_on_ranks, on_ranks

LEAN = Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def lean(module: nn.Module) -> LeanDataParallel:
    return LeanDataParallel(module, memory=LEAN)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": DataParallel,
    "LeanDataParallel": lean,
    "DistributedDataParallel": DistributedDataParallel,
}


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def wrapped_twice(rank: int, outer: str, inner: str) -> list[str]:
    wrapper = WRAPPERS[inner](mlp())
    nested = nn.Sequential(nn.Linear(6, 6), wrapper)
    return [error_of(lambda module=module: WRAPPERS[outer](module)) for module in (wrapper, nested)]  # type: ignore[misc]


def test_a_wrapper_is_not_wrapped_again(found: dict[str, list[Any]]) -> None:
    for outer, inner in TWICE:
        for whole, part in found[f"{inner} in {outer}"]:
            assert whole.startswith(f"ValueError: the module is a {inner} already") and "model.module" in whole
            assert part.startswith(f"ValueError: its part 1 is a {inner} already")


def wrapped_by_ddp(rank: int, inner: str) -> str:
    outer = DistributedDataParallel(WRAPPERS[inner](mlp()))
    return error_of(lambda: outer(batch(rank)))


def test_ddp_around_a_wrapper_is_refused_in_the_first_forward(found: dict[str, list[Any]]) -> None:
    for inner in OURS:
        for said in found[f"{inner} in DDP"]:
            assert said.startswith(f"RuntimeError: this {inner} was wrapped once more, in a DistributedDataParallel")


class Experts(nn.Module):
    """A trunk for the outer wrapper, and an inner wrapper whose parameters the outer one ignores."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.experts = wrap(nn.Linear(6, 6))
        own = [f"experts.{name}" for name, _ in self.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, own)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.experts(self.trunk(inputs))
        return outputs


def side_by_side(rank: int) -> list[str]:
    wrapped = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(1)
        wrapped.append(kind(Experts(kind)))
    for step in range(8):
        for model in wrapped:
            plain_train(model, sgd(model), step)
    return different(wrapped[0], wrapped[1], 0.0)


def test_a_wrapper_of_parameters_that_the_outer_one_ignores(found: dict[str, list[Any]]) -> None:
    assert found["side by side"] == [[], []]


def sharded(rank: int, how: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    module = mlp()
    if how == "fully_shard":
        fully_shard(module, mesh=mesh)
    else:
        parallelize_module(module, mesh, {"0": ColwiseParallel()})
    return [error_of(lambda wrap=wrap: wrap(module)) for wrap in (DataParallel, lean)]  # type: ignore[misc]


def test_dtensors_are_refused_by_name(found: dict[str, list[Any]]) -> None:
    for answers in found["fully_shard"] + found["parallelize_module"]:
        for said in answers:
            assert said.startswith(
                "ValueError: 0.weight is a DTensor (S(0)), as fully_shard() and parallelize_module()"
            )
            assert "leave it out under fully_shard()" in said and 'device_mesh=mesh["dp"]' in said


OURS = ("DataParallel", "LeanDataParallel")
TWICE = [(outer, inner) for outer in OURS for inner in WRAPPERS]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            **{f"{inner} in {outer}": (wrapped_twice, outer, inner) for outer, inner in TWICE},
            **{f"{inner} in DDP": (wrapped_by_ddp, inner) for inner in OURS},
            "side by side": (side_by_side,),
            "fully_shard": (sharded, "fully_shard"),
            "parallelize_module": (sharded, "parallelize_module"),
        },
        2,
    )


def tensor_parallel(rank: int) -> tuple[bool, str, str]:
    """Two by two ranks: DDP averages between the halves, tensor parallelism is inside each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def model() -> nn.Module:
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        return parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    refused = error_of(lambda: DataParallel(model(), device_mesh=mesh["dp"], compress=OkTopk(0.1)))
    wrapped: list[Any] = [kind(model(), device_mesh=mesh["dp"]) for kind in (DistributedDataParallel, DataParallel)]
    local = [list(one.parameters()) for one in wrapped]  # torch takes them out of the modules in the first forward
    for step in range(8):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        inputs = torch.randn(4, 6)
        for one, parameters in zip(wrapped, local, strict=True):
            one(inputs).square().mean().backward()
            torch.optim.SGD(parameters, lr=0.1).step()
            for parameter in parameters:
                parameter.grad = None
    before: list[Any] = list(model().parameters())
    assert not any(torch.equal(now, p.to_local()) for now, p in zip(local[0], before, strict=True))  # it has trained
    same = all(torch.equal(theirs, ours) for theirs, ours in zip(*local, strict=True))
    return same, wrapped[1].explain(), refused


def test_tensor_parallel_models_run_ddps_own_buckets() -> None:
    for same, explained, refused in on_ranks(tensor_parallel, 4):
        assert same
        assert explained.startswith("No plan: 0.weight is a DTensor (tensor parallel), of which DDP averages local")
        assert refused.startswith("ValueError: DataParallel with compress=OkTopk(...) cannot run here: 0.weight is a D")
