"""bench --compile: every contestant's compiled twin, and the seconds that compiling took."""

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.tools.bench import compiled as compiled_bench
from anabranch.tools.bench.benchmark import Settings, run_benchmark
from anabranch.tools.bench.compiled import CountingBackend, compiled_references, compiled_step, start_compiler
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPUTE, OURS
from ddp.compiled.models import WIDTH, Net
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
    settings = Settings(
        iters=2, batches=2, warmup=1, profile_steps=2, compress=("int8",),
        only=("nothing else",), compiled=True,
    )  # fmt: skip
    said: list[str] = []
    found = run_benchmark(Workload("net", 8, "img", torch.device("cpu"), build), settings, said.append)
    return {
        "said": said,
        "names": [row.name for row in found.rows],
        "compile_s": {row.name: row.compile_s for row in found.rows if row.compile_s},
        "explained": found.explanation,
    }


@pytest.mark.campaign
def test_compiled_twins_run_beside_the_others() -> None:
    for answer in on_ranks(benchmark, 2, timeout_s=100):
        for name in (COMPUTE, BASELINE, OURS):
            assert {name, f"{name}, compiled"} <= set(answer["names"])
            assert name not in answer["compile_s"]
        assert f"{OURS}, int8, compiled" in answer["names"]
        assert len(answer["compile_s"]["compute only, compiled"]) == len(answer["compile_s"]["DDP, compiled"]) == 1
        assert all(1 <= len(answer["compile_s"][f"{name}, compiled"]) <= 2 for name in (OURS, f"{OURS}, int8"))
        assert answer["explained"].count("Compiled: 1 graph in") == 2
        assert "one graph serves several modules" not in answer["explained"]
        chosen = [line for line in answer["said"] if "chosen in" in line]
        assert ["s compiling" in line for line in chosen] == [False, False, True, True]
        assert sum("Compiled: 1 graph in" in line for line in answer["said"]) == 2


def references(rank: int) -> dict[str, list[int]]:
    """By name, how many graphs the compiled references have after each of two steps."""
    warnings.simplefilter("ignore")
    compiled_bench.BACKEND = "aot_eager"
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000  # type: ignore[attr-defined]  # so that torch cuts this small model, too
    backends: dict[str, CountingBackend] = defaultdict(CountingBackend)
    workload = Workload("net", 8, "img", torch.device("cpu"), build)
    graphs = {}
    for contestant in compiled_references(workload, backends):
        with contestant.enter() as run_step:
            graphs[contestant.name] = [(run_step(), backends[contestant.name].graphs)[1] for _ in range(2)]
    return graphs


def many(rank: int) -> list[int]:
    """How many graphs of each of several models of one class torch compiles, each for a contestant of its own."""
    warnings.simplefilter("ignore")
    compiled_bench.BACKEND = "eager"
    start_compiler(torch.device("cpu"))
    graphs = []
    for _ in range(9):  # by default torch runs the ninth without compiling it
        model, step = build()
        backend = CountingBackend()
        compiled_step(step, DistributedDataParallel(model), backend)(model)
        graphs.append(backend.graphs)
    return graphs


def compiled(rank: int) -> dict[str, Any]:
    return {"references": references(rank), "many": many(rank)}


@pytest.mark.slow
def test_ddp_is_compiled_in_parts_and_every_contestant_of_a_class_is_compiled() -> None:
    for found in on_ranks(compiled, 2, timeout_s=100):
        graphs = found["references"]
        assert graphs["compute only, compiled"] == [1, 1]
        assert graphs["DDP, compiled"] == [2, 2]
        assert min(found["many"]) == max(found["many"]) > 0
