"""The other sparse exchanges as contestants: on lanes and beside backward, as Ok-Topk runs, in the same buckets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anabranch import planners
from anabranch.bench.baselines import RIVALS
from anabranch.bench.compress import Rival
from anabranch.bench.contestants import DDP_OPTIONS, PLAN_WARMUP_STEPS, Contestant
from anabranch.bench.zoo import Step
from anabranch.comm.collectives import Collectives, DenseCollectives
from anabranch.comm.communicator import GroupComm
from anabranch.comm.dense import COLLECTIVES, Group, Steps, dense
from anabranch.network import Network
from anabranch.parallel import DataParallel
from anabranch.plan import Bucket, Plan
from anabranch.sparse.naming import density_of
from anabranch.sparse.state import SparseState
from anabranch.trace import Trace


class RivalCollectives(DenseCollectives):
    """A rival's exchange for every bucket that names it, with what was not sent kept for the next step.

    Buckets of other dtypes than float32, which no exchange knows, travel dense.
    """

    def __init__(self, kind: str, rival: Rival, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._kind, self._rival = kind, rival
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device
        self._state = SparseState(dist.get_rank(), dist.get_world_size(), device)

    def runs(self, kind: str, dtype: torch.dtype) -> bool:
        """See ``Collectives``."""
        return kind == self._kind or super().runs(kind, dtype)

    def aside(self, kind: str) -> bool:
        """It selects before it sends."""
        return kind == self._kind

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """See ``Collectives``."""
        if bucket.collective != self._kind or buffer.dtype != torch.float32:
            return COLLECTIVES.get(bucket.collective, dense)(buffer, group, divisor)
        state = self._state.bucket(bucket.names, [self._numels[name] for name in bucket.names])
        return RIVALS[self._rival.name](buffer, state, GroupComm(group), divisor, self._rival.density)


class RivalParallel(DataParallel):
    """DataParallel, told what to run and with whose exchange."""

    def __init__(self, module: nn.Module, plan: Plan, collectives: Collectives) -> None:
        self._theirs = collectives  # before nn.Module is set up, which takes attributes that are no modules
        super().__init__(module, plan=plan, profile_steps=0, **DDP_OPTIONS)

    def _collectives(self, compress: Any) -> Collectives:  # noqa: ARG002
        return self._theirs


def sparse_rivals(
    model: nn.Module,
    step: Step,
    trace: Trace,
    network: Network,
    asked: Mapping[str, Rival],
    plans: Sequence[Plan | None],
) -> list[Contestant]:
    """A contestant for each, by the text that asked for it.

    They send what Ok-Topk sends sparsely in the first of ``plans`` that has any such bucket, in the same buckets; if
    none has, everything in DDP's own.
    """
    sparse = [plan for plan in plans if plan is not None and any(_sparse(bucket) for bucket in plan.buckets)]
    found = []
    for kind, rival in asked.items():
        plan = _sent_by(kind, sparse[0]) if sparse else planners.using(planners.by_bytes(trace, network), kind)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # One for all its turns: like a DataParallel that lives on, it goes on with what waits.
        collectives = RivalCollectives(kind, rival, parameters)
        found.append(Contestant(kind, partial(_raced, model, step, plan, collectives), plan, warmup=PLAN_WARMUP_STEPS))
    return found


def _sparse(bucket: Bucket) -> bool:
    return density_of(bucket.collective) is not None


def _sent_by(kind: str, plan: Plan) -> Plan:
    """The same plan with this exchange for its sparse buckets."""
    return Plan(tuple(replace(b, collective=kind) if _sparse(b) else b for b in plan.buckets))


@contextmanager
def _raced(model: nn.Module, step: Step, plan: Plan, collectives: Collectives) -> Iterator[Callable[[], None]]:
    wrapped = RivalParallel(model, plan, collectives)
    try:
        yield partial(step, wrapped)
    finally:
        wrapped.close()
