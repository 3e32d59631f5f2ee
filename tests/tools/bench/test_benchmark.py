"""A whole benchmark on tiny sizes, as the command line runs it: two ranks on Gloo, every contestant."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.tools.bench import benchmark
from anabranch.tools.bench.contestants import ALL_REDUCE, ddp_contestants, planned_contestants, reference_contestants
from anabranch.tools.bench.workload import replay_workload, zoo_workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE as DDP
from anabranch.tools.report.documents import COMPUTE
from anabranch.tools.report.documents import OURS as AUTO
from ranks import on_ranks, patience
from tuning.given_times import give_times


def tiny() -> ab.Trace:
    tensors = [ab.TensorSpec(f"layer{i}.weight", 3000 + 10 * i, 4, 0.002 * (i + 1)) for i in range(8)]
    return ab.Trace(tuple(tensors), 0.004, {"batch": 16})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], str]:
    """What --json printed, and the Markdown report."""
    folder = tmp_path_factory.mktemp("bench")
    ab.save(tiny(), folder / "tiny.json")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", "-m", "anabranch", "bench", "--trace", str(folder / "tiny.json"), "--num-iters", "2",
        "--num-batches-per-iter", "2", "--num-warmup-batches", "1", "--profile-steps", "2", "--compress", "bf16",
        "--report", str(folder / "report.md"), "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANABRANCH_LAB": "a lab for tests"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110 * patience(), env=environment, check=False
    )
    assert done.stdout.startswith("{"), done.stderr  # not its exit code: Gloo may abort a process that is through
    (benchmark,) = json.loads(done.stdout)["benchmarks"]
    return benchmark, (folder / "report.md").read_text(encoding="utf-8")


def rows(ran: tuple[dict[str, object], str]) -> dict[str, dict[str, object]]:
    found = ran[0]["rows"]
    assert isinstance(found, list)
    return {row["name"]: row for row in found}


def test_every_rival_and_every_plan_has_run(ran: tuple[dict[str, object], str]) -> None:
    names = rows(ran)
    stock = {DDP, "DDP, 1 MiB", "DDP, 5 MiB", "DDP, no merging", "DDP, one bucket", "DDP, fp16 hook"}
    assert {COMPUTE, ALL_REDUCE, AUTO, f"{AUTO}, bf16", *stock} <= set(names)
    plans = " ".join(name for name in names if name.startswith("plan: "))
    for planner in ("per_tensor", "single", "by_bytes", "mgwfbp", "optimal", "asc", "lanes (2)", "optimal, bf16"):
        assert planner in plans
    for row in names.values():
        turns = row["turns_s"]
        assert isinstance(turns, list) and len(turns) == 2 and all(seconds > 0 for seconds in turns)


def test_ours_show_predicted_beside_measured(ran: tuple[dict[str, object], str]) -> None:
    for name, row in rows(ran).items():
        predicted = name.startswith((AUTO, "plan: ")) or (name.startswith(DDP) and "hook" not in name)
        assert (row["predicted_s"] is not None) == predicted
        assert (row["prediction_error"] is not None) == predicted
    assert rows(ran)[DDP]["ratio_to_ddp"] == 1.0
    assert rows(ran)["DDP, no merging"]["buckets"] == 8 and rows(ran)["DDP, one bucket"]["buckets"] == 1


def test_a_step_of_the_replay_takes_at_least_the_recorded_time(ran: tuple[dict[str, object], str]) -> None:
    for name, row in rows(ran).items():
        seconds = row["step_s"]
        assert isinstance(seconds, float) and (name == ALL_REDUCE or seconds >= 0.019)


def test_the_report_says_where_and_what_was_left_out(ran: tuple[dict[str, object], str]) -> None:
    benchmark, report = ran
    assert "a lab for tests" in report and "PowerSGD" in report and "| **DataParallel** |" in report
    assert benchmark["batch"] == 16 and benchmark["ranks"] == 2
    assert "anabranch: running" in str(benchmark["explanation"])


def gradients(rank: int) -> dict[str, list[float]]:
    """The averaged gradient under every contestant, of a model whose ranks disagree."""
    trace = ab.Trace(tuple(ab.TensorSpec(f"{i}.weight", 12, 4, 0.001 * (3 - i)) for i in (2, 1, 0)), 0.001)
    network = ab.Network.measured(2, {kind: [(4, 1e-4, 0.0), (400, 1e-3, 0.0)] for kind in ("dense", "bf16")})
    model = nn.Sequential(
        *(nn.Linear(4, 3, bias=False) if i % 2 == 0 else nn.Linear(3, 4, bias=False) for i in range(3))
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        called(torch.full((2, 4), 1.0 + rank)).sum().backward()

    found = {}
    for contestant in [
        *ddp_contestants(model, step, trace, network, False),
        *planned_contestants(model, step, trace, network),
    ]:
        with contestant.enter() as run:
            for _ in range(contestant.warmup + 1):
                run()
        found[contestant.name] = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    with reference_contestants(model, step, torch.device("cpu"))[0].enter() as run:
        run()  # after all of them, nobody's hooks are left on the model
    found[COMPUTE] = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    return found


def unmeasured() -> str:
    usual, benchmark.THOROUGH = (
        benchmark.THOROUGH,
        ab.TuningPolicy(min_predicted_gain=2.0, obvious_gain=2.0),
    )  # nothing is worth a measurement
    settings = benchmark.Settings(iters=1, batches=1, warmup=0, profile_steps=2)
    with pytest.raises(RuntimeError) as caught:
        benchmark.run_benchmark(replay_workload("tiny", tiny()), settings, lambda _: None)
    benchmark.THOROUGH = usual
    return str(caught.value)


def searched(search_steps: int | None) -> int:
    """How many steps a search took whose trials nothing ends but the limit; that it knows a network is required."""
    workload, taken = replay_workload("tiny", tiny()), [0]

    def build() -> tuple[nn.Module, Step]:
        model, step = workload.build()

        def counted(called: nn.Module) -> None:
            taken[0] += 1
            step(called)

        return model, counted

    benchmark.THOROUGH = replace(
        benchmark.THOROUGH,
        min_predicted_gain=-1e9,
        min_gain=-10.0,
        max_pairs=100,
        confidence=1e9,
        first_search_steps=10_000,
        search_share=1e9,
    )
    give_times(lambda plan: 1e-3)
    settings = benchmark.Settings(profile_steps=2, search_steps=search_steps)
    tuned = benchmark.tune(replace(workload, build=build), settings, AUTO, benchmark.Variant(None), lambda text: None)
    tuned.parallel.close()
    return taken[0]


def scenarios(rank: int) -> dict[str, Any]:
    return {
        "gradients": gradients(rank),
        "unmeasured": unmeasured(),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(scenarios, 2, timeout_s=100)


@pytest.mark.slow
def test_all_contestants_average_the_same_gradients_and_leave_no_hooks(found: list[dict[str, Any]]) -> None:
    first, second = (one["gradients"] for one in found)
    assert first[COMPUTE] != second[COMPUTE]
    expected = [(a + b) / 2 for a, b in zip(first[COMPUTE], second[COMPUTE], strict=True)]
    for name, sums in first.items():
        if name != COMPUTE:
            assert sums == pytest.approx(expected, rel=0.02 if "16" in name else 1e-5), name
            assert second[name] == pytest.approx(sums, rel=1e-6), name


def test_every_data_parallel_can_also_race_flat() -> None:
    found = benchmark.Settings(compress=["int8"], flat=True).parallels
    assert {name: (one.compress, one.nodes) for name, one in found.items()} == {
        AUTO: (None, "auto"),
        f"{AUTO}, int8": ("int8", "auto"),
        f"{AUTO}, flat": (None, False),
        f"{AUTO}, int8, flat": ("int8", False),
    }
    assert list(benchmark.Settings().parallels) == [AUTO]


def both_searched(rank: int) -> list[int]:
    return [searched(25), searched(None)]


@pytest.mark.campaign
def test_a_search_can_be_ended_after_some_steps() -> None:
    for steps, unheld_steps in on_ranks(both_searched, 2, timeout_s=100):
        assert 5 < steps <= 40
        assert unheld_steps > 60


@pytest.mark.slow
def test_a_search_that_ends_before_it_measures_is_said(found: list[dict[str, Any]]) -> None:
    for one in found:
        said = one["unmeasured"]
        assert said.startswith("DataParallel has measured no network, which the other contestants need: run it again")
        assert "waits for communication" in said


def test_workloads() -> None:
    workload = replay_workload("tiny", tiny(), slower=2.0)
    assert (workload.name, workload.batch, workload.unit) == ("tiny (replayed, 2 times slower)", 16, "img")
    model, step = workload.build()
    step(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="model is 'nonsense': expected one of googlenet"):
        zoo_workload("nonsense", torch.device("cpu"))
    assert [zoo_workload(text, torch.device("cpu")).batch for text in ("gpt2:16", "gpt2")] == [16, 8]
    for text in ("gpt2:0", "gpt2:many", "gpt2:-1", "gpt2:1:2"):
        with pytest.raises(ValueError, match="expected a batch from 1 on after the colon, such as gpt2:8"):
            zoo_workload(text, torch.device("cpu"))


class Convolutional(nn.Module):
    """Takes images and returns logits, as the models of torchvision do; remembers what its convolution was given."""

    def __init__(self, weights: None) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, stride=32), nn.Linear(8, 1000)
        self.images: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images = images
        result: torch.Tensor = self.head(self.conv(images).mean(dim=(2, 3)))
        return result


@pytest.fixture
def small_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision may not be here: its resnet50 is a small one."""
    models = ModuleType("torchvision.models")
    monkeypatch.setattr(models, "resnet50", Convolutional, raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


@pytest.mark.usefixtures("small_resnet")
def test_a_model_of_images_gets_its_batch() -> None:
    workload = zoo_workload("resnet50:2", torch.device("cpu"))
    for _ in range(2):  # every contestant builds a model of its own
        model, step = workload.build()
        assert isinstance(model, Convolutional)
        step(model)
        assert model.images is not None and model.images.shape == (2, 3, 224, 224)
        assert model.conv.weight.grad is not None
