"""The trainings whose memory is measured: each really trains, and nothing is lost."""

from collections.abc import Iterator

import pytest
import torch
from benchmarks.peak_memory import FIRST, world
from benchmarks.trainings import ON_ONE_RANK, TrainingSetup, compressed_plan, naive_exchange, training_of
from torch import nn

from anabranch.tools.bench import zoo
from anabranch.tools.predict.memory.estimator import OPTIMIZERS
from anabranch.tools.predict.memory.probe import probe
from anabranch.tools.predict.memory.training_modes import OUR_MODES
from anabranch.values.kinds.names import OKTOPK
from ranks import on_ranks
from tools.predict.memory.models import images

DENSITY = 0.1


@pytest.fixture
def alone() -> Iterator[None]:
    with world("gloo"):
        yield


def trained(mode: str, ranks: int) -> list[torch.Tensor]:
    """The weights of a small model after some steps."""
    build = images(2)
    model, loss = build(torch.device("cpu"))
    plan = compressed_plan(probe(build), mode if mode in OUR_MODES else OKTOPK, DENSITY)
    running = training_of(mode)(TrainingSetup(model, loss, OPTIMIZERS["momentum"], ranks, DENSITY, plan))
    for _ in range(FIRST):
        next(running)
    running.close()
    return [parameter.detach() for parameter in model.parameters()]


def test_one_rank_trains_ddp_and_naive(alone: None) -> None:
    before = list(images(2)(torch.device("cpu"))[0].parameters())
    for mode in ON_ONE_RANK:
        pairs = list(zip(before, trained(mode, ranks=4), strict=True))
        assert all(new.isfinite().all() for _, new in pairs) and any((new != old).any() for old, new in pairs), mode


MODES = (OKTOPK, "int8", "lean, int8", "lean, int4", "lean", "lean, dense", "lean, residuals bf16")


def on_real_ranks(rank: int) -> dict[str, list[torch.Tensor]]:
    found = {}
    for mode in MODES:
        torch.manual_seed(rank)  # another batch on each
        found[mode] = trained(mode, ranks=2)
    return found


@pytest.mark.slow
def test_every_mode_trains_on_real_ranks_which_exchange_what_they_have() -> None:
    one, other = on_ranks(on_real_ranks, 2, timeout_s=100)
    torch.manual_seed(0)
    untrained = list(images(2)(torch.device("cpu"))[0].parameters())
    for mode in MODES:
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(one[mode], other[mode], strict=True)), mode
        assert not all(torch.equal(a, b) for a, b in zip(one[mode], untrained, strict=True)), mode


def test_the_average_of_ranks_that_send_alike_is_what_one_offers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
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
