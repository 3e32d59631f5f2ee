"""The contestants of a benchmark: stock DDP with its settings and hooks, and DataParallel with each planner."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from anabranch import planning as planners
from anabranch.ddp.reducer import unwrap
from anabranch.parallel import DataParallel
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPUTE
from anabranch.tuning.options import DEFAULT_POLICY
from anabranch.tuning.trial import predicted_s
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

MIB = 1 << 20
ALL_REDUCE = "one all-reduce"
POWER_SGD_START = 2  # the first step in which torch allows it to compress
SETTLE_STEPS = DEFAULT_POLICY.warmup_steps
PLAN_WARMUP_STEPS = 2 * SETTLE_STEPS + 1  # a given plan is used after SETTLE_STEPS, and needs as many to settle
SIZES_MIB = (1, 5, 10, 50, 100)  # of DDP's buckets
BUCKETINGS_MIB = {**{f"DDP, {mib} MiB": mib for mib in SIZES_MIB}, "DDP, no merging": 1e-6, "DDP, one bucket": 1e6}
LANES = (2, 4)  # of the planner "lanes"
# The same for all contestants: it saves a copy, and users who want speed set it.
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True}

EnteredStep = AbstractContextManager[Callable[[], None]]  # yields a function that runs one step


@dataclass(frozen=True, slots=True)
class Contestant:
    """A competitor that runs the step. ``enter`` sets it up; it needs ``warmup`` steps before it can be timed.

    ``plan``: its buckets, and ``predicted_s``: the predicted step, where these are known.
    """

    name: str
    enter: Callable[[], EnteredStep]
    plan: Plan | None = None
    predicted_s: float | None = None
    warmup: int = SETTLE_STEPS

    @classmethod
    def ready(
        cls, name: str, step: Callable[[], None], plan: Plan | None = None, predicted_s: float | None = None
    ) -> "Contestant":
        """One that needs no setting up, because its model is kept between its turns."""
        return cls(name, lambda: nullcontext(step), plan, predicted_s)


def reference_contestants(model: nn.Module, step: Step, device: torch.device) -> list[Contestant]:
    """Computation without communication, and one all-reduce of all gradients without computation."""
    numel = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // 4
    return [
        Contestant.ready(COMPUTE, partial(step, model)),
        Contestant(ALL_REDUCE, lambda: nullcontext(partial(dist.all_reduce, torch.zeros(numel, device=device)))),
    ]


def ddp_contestants(model: nn.Module, step: Step, trace: Trace, network: Network, nccl: bool) -> list[Contestant]:
    """Stock DDP with each bucket size and comm hook; PowerSGD only on NCCL, since torch's hook hangs on Gloo."""

    def stock(name: str, plan: Plan, **options: Any) -> Contestant:
        return Contestant(name, partial(_ddp, model, step, **options), plan, predicted_s(trace, plan, network))

    found = [
        stock(BASELINE, planners.by_bytes(trace, network)),
        *(
            stock(name, planners.by_bytes(trace, network, cap_nbytes=max(1, int(mib * MIB))), bucket_cap_mb=mib)
            for name, mib in BUCKETINGS_MIB.items()
        ),
        Contestant("DDP, fp16 hook", partial(_ddp, model, step, lambda: (None, default_hooks.fp16_compress_hook))),
    ]
    if nccl:
        hooked = partial(_ddp, model, step, _power_sgd)
        found.append(Contestant("DDP, PowerSGD rank 4", hooked, warmup=POWER_SGD_START + SETTLE_STEPS))
    return found


def planned_contestants(model: nn.Module, step: Step, trace: Trace, network: Network) -> list[Contestant]:
    """DataParallel with the plan of each planner, without tuning; planners that make the same plan share an entry."""
    plans = {name: planner(trace, network) for name, planner in planners.PLANNERS.items() if name != "lanes"}
    plans |= {f"lanes ({count})": planners.lanes(trace, network, lanes=count) for count in LANES}
    if "bf16" in network.curves:
        plans["optimal, bf16"] = planners.optimal(trace, network, collective="bf16")
    distinct: dict[Plan, str] = {}
    for name, plan in plans.items():
        distinct[plan] = f"{distinct[plan]} = {name}" if plan in distinct else name
    return [
        Contestant(
            f"plan: {name}",
            partial(_planned, model, step, plan),
            plan,
            predicted_s(trace, plan, network),
            PLAN_WARMUP_STEPS,
        )
        for plan, name in distinct.items()
    ]


@contextmanager
def _ddp(
    model: nn.Module, step: Step, hook: Callable[[], tuple[Any, Callable[..., Any]]] | None = None, **options: Any
) -> Iterator[Callable[[], None]]:
    wrapped = DistributedDataParallel(model, **DDP_OPTIONS, **options)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    try:
        yield partial(step, wrapped)
    finally:
        unwrap(wrapped)


@contextmanager
def _planned(model: nn.Module, step: Step, plan: Plan) -> Iterator[Callable[[], None]]:
    wrapped = DataParallel(model, plan=plan, profile_steps=0, **DDP_OPTIONS)
    try:
        yield partial(step, wrapped)
    finally:
        wrapped.close()


def _power_sgd() -> tuple[Any, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=POWER_SGD_START)
    return state, powerSGD_hook.powerSGD_hook
