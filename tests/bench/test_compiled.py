"""bench --compile: every contestant's compiled twin, and the seconds that compiling took."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.bench import compiled as compiled_bench
from anabranch.bench.run import Settings, run
from anabranch.bench.workload import Workload
from anabranch.bench.zoo import Step
from anabranch.report.documents import BASELINE, COMPUTE, OURS
from compiled.models import WIDTH, Net
from ranks import on_ranks


def build() -> tuple[nn.Module, Step]:
    model = Net()
    x = torch.randn(8, WIDTH)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        called(x).square().mean().backward()

    return model, step


def benchmark(rank: int) -> dict[str, Any]:
    """A short benchmark with torch's fastest compiler."""
    warnings.simplefilter("ignore")
    compiled_bench.BACKEND = "aot_eager"
    settings = Settings(2, 2, 1, 2, (), (), ("int8",), ("nothing else",), compiled=True)
    found = run(Workload("net", 8, "img", torch.device("cpu"), build), settings, lambda _: None)
    return {
        "names": [row.name for row in found.rows],
        "compile_s": {row.name: row.compile_s for row in found.rows if row.compile_s},
        "explained": found.explanation,
    }


@pytest.mark.slow
def test_compiled_twins_run_beside_the_others() -> None:
    for answer in on_ranks(benchmark, 2, timeout_s=100):
        for name in (COMPUTE, BASELINE, OURS, f"{OURS}, int8"):
            assert {name, f"{name}, compiled"} <= set(answer["names"])
            assert name not in answer["compile_s"]
        assert len(answer["compile_s"]["compute only, compiled"]) == len(answer["compile_s"]["DDP, compiled"]) == 1
        assert all(1 <= len(answer["compile_s"][f"{name}, compiled"]) <= 4 for name in (OURS, f"{OURS}, int8"))
        assert answer["explained"].count("Compiled: 1 graph in") == 2
        assert "one graph serves several modules" not in answer["explained"]
