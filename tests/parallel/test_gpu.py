"""What only a GPU can show: stream lanes, event clocks and the plan's hook on NCCL, one rank on one device.

Run where there is one: pytest -m gpu tests/parallel/test_gpu.py
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.ddp.layout import PlanHook
from anabranch.ddp.reducer import reduced_parameters, relayout
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import probe_of
from anabranch.exchange.dense import DenseExchanges
from anabranch.exchange.lanes import Lanes, Message
from anabranch.observe.clock import CudaClock
from anabranch.observe.measure import measure
from anabranch.observe.recorder import record
from anabranch.observe.step_timer import StepTimer
from anabranch.tuning.trial import Trial
from ddp.inspection import layout_in_force

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """The GPU, with an NCCL world of one rank."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.BatchNorm1d(256)).to(device)


@pytest.mark.parametrize("kind", ["dense", "bf16"])
def test_collectives_on_a_stream_lane(device: torch.device, kind: str) -> None:
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, device)
    lanes.grow(2)
    for lane in (0, 1):
        buffer = torch.randn(10_001, device=device)
        expected = buffer.clone() if kind == "dense" else buffer.to(torch.bfloat16).float()
        steps = probe_of(kind)(buffer, lanes[lane].group, 1)
        result = lanes[lane].submit(Message([steps], buffer, "a test")).wait()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    lanes.close()


def streams_of(profiled: torch.profiler.profile, path: Path) -> set[int]:
    """The streams on which kernels and copies ran."""
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return {e["args"]["stream"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_an_exchange_that_computes_runs_on_one_stream(device: torch.device, kind: str, tmp_path: Path) -> None:
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, device, max_ctas=1)
    lanes.grow(1)
    buffers = [torch.randn(100_000, device=device) for _ in range(3)]
    # Made here: the probe of int4 fills its residual on the current stream.
    exchanges = [probe_of(kind)(buffer, lanes[0].group, 1) for buffer in buffers]
    messages = [
        Message([steps], buffer, "a test", on_side_stream=True)
        for steps, buffer in zip(exchanges, buffers, strict=True)
    ]
    lanes[0].submit(messages[0]).wait()  # compiles kernels
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiled:
        for message in messages[1:]:
            lanes[0].submit(message).wait()
        torch.cuda.synchronize()
    assert len(streams_of(profiled, tmp_path / "trace.json")) == 1
    lanes.close()


def test_events_time_work_without_waiting_for_it(device: torch.device) -> None:
    clock = CudaClock(device)
    start = clock.mark()
    torch.cuda._sleep(4_000_000_000)  # clock cycles: about two seconds
    end = clock.mark()
    assert not clock.settled(end)
    clock.settle()
    assert clock.settled(end)
    assert clock.elapsed_s(start, end) > 1.0


def test_a_plan_runs_on_nccl_as_ddp_does(device: torch.device) -> None:
    model, twin = network(device), network(device)
    ddp, stock = DistributedDataParallel(model), DistributedDataParallel(twin)
    names = list(reduced_parameters(ddp))
    plan = ab.Plan(
        tuple(ab.Bucket(tuple(names[i : i + 3]), lane=i // 3 % 2) for i in reversed(range(0, len(names), 3)))
    )
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, device)
    lanes.grow(2)
    timer = StepTimer(CudaClock(device))
    timing = ExitStack()
    timing.enter_context(timer.bucket_timing())
    timing.enter_context(timer.attached(ddp))
    numels = {name: parameter.numel() for name, parameter in reduced_parameters(ddp).items()}
    launcher = BucketLauncher(plan, lanes, Collectives(DenseExchanges()), numels, timer.mark_bucket)
    relayout(ddp, plan.indices(names), PlanHook(launcher, lambda lane: None).run)
    for _ in range(4):
        inputs = torch.randn(32, 256, device=device)
        for result in (ddp(inputs), stock(inputs)):
            result.square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
        ddp.zero_grad()
        stock.zero_grad()
    assert layout_in_force(ddp) == plan.indices(names)
    timer.clock.settle()
    trial = Trial.of("a test", plan, timer.last_steps(3), timer.clock)
    assert trial.timeline is not None
    assert len(trial.timeline.communication) == len(plan)
    assert all(span.seconds >= 0 for span in trial.timeline.communication), "nothing ends before it began"
    timing.close()
    lanes.close()


def test_record_and_measure_on_the_gpu(device: torch.device) -> None:
    model = network(device)
    inputs = torch.randn(64, 256, device=device)

    def step() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    trace = record(model, step, steps=5)
    assert [t.name for t in trace.tensors][:2] == ["6.weight", "6.bias"]
    assert trace.tensors[-1].name.startswith("0.") and trace.meta["device"] == torch.cuda.get_device_name(device)
    assert dist.group.WORLD is not None
    measured = measure([dist.group.WORLD], device, 1 << 20, budget_s=0.5)
    assert measured.world_size == 1 and measured.meta["backend"] == "nccl"
