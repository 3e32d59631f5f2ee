"""bench --sharded: FSDP2 beside DDP and DataParallel, stock and in planned units."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.fsdp import find_sharding as sharding_trial
from anabranch.fsdp.planning.sharding_modes import SHARDING_MODES, sharding_mode
from anabranch.tools.bench.benchmark import Settings, run_benchmark
from anabranch.tools.bench.sharded import sharded_contestants
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.values.errors import AnabranchError
from ranks import on_ranks

WIDTH = 32
FLAT = ("fsdp2", "fsdp2:reshard", "fsdp2:planned")


def build() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = torch.randn(8, WIDTH)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        called(x).square().mean().backward()

    return model, step


WORKLOAD = Workload("net", 8, "img", torch.device("cpu"), build)


def benchmark(rank: int) -> dict[str, Any]:
    sharding_trial.MEASURING_S = 0.2
    settings = Settings(iters=2, batches=2, warmup=1, profile_steps=2, only=("nothing else",), sharded=FLAT)
    found = run_benchmark(WORKLOAD, settings, lambda _: None)
    return {row.name: [len(row.turns_s), row.predicted_s] for row in found.rows}


@pytest.mark.campaign
def test_sharded_contestants_run_beside_the_others() -> None:
    for rows in on_ranks(benchmark, 2, timeout_s=100):
        for way in FLAT:
            turns, predicted_s = rows[SHARDING_MODES[way].title]
            assert turns == 2 and predicted_s > 0


def nodes(rank: int, inside: list[str], names: list[str]) -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = inside[rank]
    sharding_trial.MEASURING_S = 0.2
    try:
        contestants = sharded_contestants(WORKLOAD, names)
    except AnabranchError as error:
        return [str(error)]
    for contestant in contestants:
        with contestant.enter() as step:
            step()
    return [
        f"{sharding_mode(name).title}, predicted: {contestant.predicted_s is not None}"
        for name, contestant in zip(names, contestants, strict=True)
        if contestant.name == sharding_mode(name).title
    ]


@pytest.mark.slow
def test_hsdp_has_the_nodes_of_the_launcher() -> None:
    asked = ["hsdp", "hsdp:reshard", "fsdp2", "hsdp@int8", "hsdp:reshard@oktopk:0.1"]
    assert (
        on_ranks(nodes, 4, ["2"] * 4, asked) == [[f"{sharding_mode(way).title}, predicted: False" for way in asked]] * 4
    )


REFUSED = {
    ("1", "1", "1"): "LOCAL_WORLD_SIZE 1, 1, 1: run e.g. anabranch lab",
    ("many", "many", "many"): "LOCAL_WORLD_SIZE many, many, many",
    ("2", "2", "1"): "LOCAL_WORLD_SIZE 2, 2, 1",
    ("2", "2", "2"): "LOCAL_WORLD_SIZE 2, 2, 2",
}


def refused(rank: int) -> list[list[str]]:
    return [nodes(rank, list(inside), ["hsdp"]) for inside in REFUSED]


def test_other_nodes_are_refused_on_all_ranks() -> None:
    for said in on_ranks(refused, 3):
        for (message,), words in zip(said, REFUSED.values(), strict=True):
            assert words in message


@pytest.mark.slow
def test_units_inside_nodes_are_planned_and_predicted() -> None:
    asked = ["hsdp:planned@int8", "hsdp@int8", "hsdp"]
    found = on_ranks(nodes, 4, ["2"] * 4, asked, timeout_s=100)
    assert found == [[f"{sharding_mode(way).title}, predicted: {'int8' in way}" for way in asked]] * 4


def test_other_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="--sharded is 'fsdp1': expected one of fsdp2, fsdp2:reshard, fsdp2:planned"):
        sharding_mode("fsdp1")
