"""Contestants: what DDP users do today, and DataParallel with each planner, lanes and wire precision."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from anabranch import planners
from anabranch.bench.zoo import Step
from anabranch.ddp.reducer import unwrap
from anabranch.network import Network
from anabranch.parallel import DataParallel
from anabranch.plan import Plan
from anabranch.report.benchmark import BASELINE, COMPUTE
from anabranch.trace import Trace
from anabranch.tuning.candidates import predicted_s
from anabranch.tuning.policy import DEFAULT_POLICY

MIB = 1 << 20
ALL_REDUCE = "one all-reduce"
POWER_SGD_FROM = 2  # the first step that torch lets it compress
SETTLE_STEPS = DEFAULT_POLICY.settle_steps
PLANNED_AFTER = 2 * SETTLE_STEPS + 1  # a given plan is in force from the step after the first few, and settles then
FEWEST_MIB, MOST_MIB = 1e-6, 1e6  # no merging and one bucket, as a size for DDP
# For all alike: it saves a copy, and everyone who is after speed sets it.
OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True}

Running = AbstractContextManager[Callable[[], None]]  # gives a function that runs one step


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to run the step. ``enter`` sets it up; ``warmup`` steps later it does what it is named for.

    ``plan`` is what it runs in our terms and ``predicted_s`` how long a step of it should take, where these are known.
    """

    name: str
    enter: Callable[[], Running]
    plan: Plan | None = None
    predicted_s: float | None = None
    warmup: int = SETTLE_STEPS


def baselines(model: nn.Module, step: Step, device: torch.device) -> list[Contestant]:
    """Computing without sending, and sending everything at once without computing."""
    elements = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // 4
    return [Contestant(COMPUTE, lambda: _just(step)), Contestant(ALL_REDUCE, lambda: _whole(elements, device))]


def rivals(
    model: nn.Module, step: Step, trace: Trace, network: Network, sizes_mib: Sequence[float], nccl: bool
) -> list[Contestant]:
    """Stock DDP in every way its users know; PowerSGD only on NCCL, since torch's hook hangs on Gloo."""

    def stock(name: str, plan: Plan, **options: Any) -> Contestant:
        return Contestant(name, partial(_ddp, model, step, **options), plan, predicted_s(trace, plan, network))

    def sized(name: str, mib: float) -> Contestant:
        plan = planners.by_bytes(trace, network, cap_nbytes=max(1, int(mib * MIB)))
        return stock(name, plan, bucket_cap_mb=mib)

    found = [
        stock(BASELINE, planners.by_bytes(trace, network)),
        *(sized(f"DDP, {mib:g} MiB", mib) for mib in sizes_mib),
        sized("DDP, no merging", FEWEST_MIB),
        sized("DDP, one bucket", MOST_MIB),
        Contestant("DDP, fp16 hook", partial(_ddp, model, step, hook=_fp16)),
    ]
    if nccl:
        hooked = partial(_ddp, model, step, hook=_power_sgd)
        found.append(Contestant("DDP, PowerSGD rank 4", hooked, warmup=POWER_SGD_FROM + SETTLE_STEPS))
    return found


def ours(model: nn.Module, step: Step, trace: Trace, network: Network, lanes: Sequence[int]) -> list[Contestant]:
    """DataParallel told to run each planner's plan, without choosing: each different plan once."""

    def expected(plan: Plan) -> float:
        return predicted_s(trace, plan, network)

    plans = {name: planner(trace, network) for name, planner in planners.PLANNERS.items() if name != "lanes"}
    plans |= {f"lanes ({count})": planners.lanes(trace, network, lanes=count) for count in lanes if count > 1}
    if "bf16" in network.curves:
        plans["optimal, bf16"] = planners.optimal(trace, network, collective="bf16")
    distinct: dict[Plan, str] = {}
    for name, plan in plans.items():
        distinct[plan] = f"{distinct[plan]} = {name}" if plan in distinct else name
    return [
        Contestant(f"plan: {name}", partial(_planned, model, step, plan), plan, expected(plan), PLANNED_AFTER)
        for plan, name in distinct.items()
    ]


@contextmanager
def _ddp(
    model: nn.Module, step: Step, hook: Callable[[DistributedDataParallel], None] | None = None, **options: Any
) -> Iterator[Callable[[], None]]:
    wrapped = DistributedDataParallel(model, **OPTIONS, **options)
    if hook is not None:
        hook(wrapped)
    try:
        yield partial(step, wrapped)
    finally:
        unwrap(wrapped)


@contextmanager
def _planned(model: nn.Module, step: Step, plan: Plan) -> Iterator[Callable[[], None]]:
    wrapped = DataParallel(model, plan=plan, profile_steps=0, **OPTIONS)
    try:
        yield partial(step, wrapped)
    finally:
        wrapped.close()


def _fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=POWER_SGD_FROM)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@contextmanager
def _just(step: Callable[[], None]) -> Iterator[Callable[[], None]]:
    yield step


@contextmanager
def _whole(elements: int, device: torch.device) -> Iterator[Callable[[], None]]:
    buffer = torch.zeros(elements, device=device)
    yield lambda: dist.all_reduce(buffer)


def living(name: str, parallel: DataParallel, step: Step) -> Contestant:
    """A DataParallel that has chosen already and lives on between its turns, on a model of its own; plans no more."""
    assert parallel.trace is not None and parallel.network is not None
    parallel.hold()
    expected_s = predicted_s(parallel.trace, parallel.plan, parallel.network)
    return Contestant(name, lambda: _just(partial(step, parallel)), parallel.plan, expected_s)
