"""The trainings whose memory is measured: each really trains, and nothing is lost."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from anabranch.tools.bench import zoo
from anabranch.tools.bench.memory import FIRST, OPTIMIZERS, compressed_plan, world
from anabranch.tools.bench.trainings import ON_ONE_RANK, Training, TrainingSetup, naive_exchange, training_of
from anabranch.tools.predict.memory.modes import OKTOPK
from anabranch.tools.predict.memory.probe import probe
from ranks import on_ranks
from tools.predict.memory.models import images

DENSITY = 0.1


@pytest.fixture
def alone() -> Iterator[None]:
    with world("gloo"):
        yield


@pytest.mark.parametrize("training", [training_of(mode) for mode in ON_ONE_RANK])
def test_it_trains(training: Training, alone: None) -> None:
    model, loss = images(2)(torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plan = compressed_plan(probe(images(2)), OKTOPK, DENSITY)
    running = training(TrainingSetup(model, loss, OPTIMIZERS["momentum"], 4, DENSITY, plan))
    for _ in range(3):  # DDP lays out its buckets anew after the first
        next(running)
    running.close()
    pairs = list(zip(before, model.parameters(), strict=True))
    assert all(new.isfinite().all() for _, new in pairs) and any((new != old).any() for old, new in pairs)


def on_real_ranks(rank: int, mode: str = OKTOPK) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # another batch on each
    build = images(2)
    model, loss = build(torch.device("cpu"))
    plan = compressed_plan(probe(build), mode, DENSITY)
    running = training_of(mode)(TrainingSetup(model, loss, OPTIMIZERS["momentum"], 2, DENSITY, plan))
    for _ in range(FIRST):
        next(running)
    running.close()
    return [parameter.detach() for parameter in model.parameters()]


def test_real_ranks_exchange_what_they_have() -> None:
    one, other = on_ranks(on_real_ranks, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    mirrored = on_ranks(on_real_ranks, 1)[0]
    assert not all(torch.equal(a, b) for a, b in zip(one, mirrored, strict=True))


@pytest.mark.parametrize(
    "mode", ["int8", "lean, int8", "lean, int4, host", "lean", "lean, dense", "lean, residuals bf16"]
)
def test_every_mode_trains_on_real_ranks(mode: str) -> None:
    one, other = on_ranks(on_real_ranks, 2, mode)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(one, other, strict=True))
    torch.manual_seed(0)
    untrained, _ = images(2)(torch.device("cpu"))
    assert not all(torch.equal(a, b) for a, b in zip(one, untrained.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_ranks_that_send_alike_is_what_one_offers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.randn(1000, dtype=dtype)
    given, residual = parameter.grad.clone(), torch.zeros(1000)
    naive_exchange([parameter], residual, 4, 100)
    torch.testing.assert_close(parameter.grad + residual, given.float())
    assert int((parameter.grad != 0).sum()) == 100


def test_the_plan_is_whole_and_vectors_travel_dense() -> None:
    plan = compressed_plan(probe(images(2)), OKTOPK, DENSITY)
    model, _ = images(2)(torch.device("cpu"))
    kinds = {name: bucket.collective for bucket in plan.buckets for name in bucket.names}
    assert set(kinds) == {name for name, _ in model.named_parameters()}
    assert kinds["0.bias"] == "dense" and kinds["6.weight"] == "oktopk:0.1"


def test_rounding_takes_vectors_too() -> None:
    plan = compressed_plan(probe(images(2)), "lean, int4", DENSITY)
    assert {bucket.collective for bucket in plan.buckets} == {"int4"}


def test_an_unknown_model_is_told() -> None:
    with pytest.raises(ValueError, match="model is 'resnet9': expected one of googlenet"):
        zoo.model_and_loss("resnet9", torch.device("meta"), 1)
