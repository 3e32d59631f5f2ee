"""bench --sharded: FSDP2 beside DDP and DataParallel, stock and in planned units."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.bench.run import Settings, run
from anabranch.bench.sharded import HSDP, NAMES, PLANNED, RESHARD, check_sharded, sharded_contestants
from anabranch.bench.workload import Workload
from anabranch.bench.zoo import Step
from anabranch.errors import AnabranchError
from anabranch.integrations import sharding_trial
from ranks import on_ranks

WIDTH = 32


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
    settings = Settings(2, 2, 1, 2, (), (), (), ("nothing else",), sharded=("fsdp2", RESHARD, PLANNED))
    found = run(WORKLOAD, settings, lambda _: None)
    return {row.name: [len(row.turns_s), row.predicted_s] for row in found.rows}


@pytest.mark.slow
def test_sharded_contestants_run_beside_the_others() -> None:
    for rows in on_ranks(benchmark, 2, timeout_s=100):
        for way in ("fsdp2", RESHARD, PLANNED):
            turns, predicted_s = rows[NAMES[way]]
            assert turns == 2 and predicted_s > 0


def nodes(rank: int, inside: str) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = inside
    try:
        (contestant,) = sharded_contestants(WORKLOAD, [HSDP])
    except AnabranchError as error:
        return str(error)
    with contestant.enter() as step:
        step()
    return contestant.name


def test_hsdp_has_the_nodes_of_the_launcher() -> None:
    assert on_ranks(nodes, 4, "2") == [NAMES[HSDP]] * 4
    assert "there are 2 ranks, 1 in this node (LOCAL_WORLD_SIZE)" in on_ranks(nodes, 2, "1")[0]


def test_other_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="--sharded is 'fsdp1': expected one of fsdp2, fsdp2:reshard, fsdp2:planned"):
        check_sharded(["fsdp1"])
