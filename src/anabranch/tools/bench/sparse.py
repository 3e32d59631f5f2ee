"""Contestants made of the baseline exchanges: they run as Ok-Topk does, on lanes, in the same buckets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anabranch import planning as planners
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.communicator import GroupCommunicator
from anabranch.exchange.contracts import Collective, Group, Steps, Traffic
from anabranch.exchange.dense import DenseExchanges, dense
from anabranch.exchange.residuals.state import BucketStates
from anabranch.parallel import DataParallel
from anabranch.tools.bench.baselines import BASELINES
from anabranch.tools.bench.compress import Rival
from anabranch.tools.bench.contestants import DDP_OPTIONS, PLAN_WARMUP_STEPS, Contestant
from anabranch.tools.bench.zoo import Step
from anabranch.values.kinds.names import density_of
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace


class BaselineExchanges:
    """The family of one baseline exchange, with error feedback.

    Buckets that are not float32 are sent dense, because the exchanges need float32.
    """

    kinds: tuple[str, ...] = ()  # it runs the plans it is given, and is not planned with

    def __init__(self, kind: str, rival: Rival, parameters: Mapping[str, torch.Tensor]) -> None:
        self._kind = kind
        self._rival = rival
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device
        self._state = BucketStates(dist.get_rank(), dist.get_world_size(), device)

    def handles(self, kind: str) -> bool:
        return kind == self._kind

    def supports(self, kind: str, dtype: torch.dtype) -> bool:  # noqa: ARG002 - what is not float32 goes dense
        return kind == self._kind

    def sends_little(self, kind: str) -> bool:
        return kind == self._kind

    def on_side_stream(self, kind: str) -> bool:
        return kind == self._kind

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        if buffer.dtype != torch.float32:
            return dense(buffer, group, divisor)
        state = self._state.bucket(bucket.names, [self._numels[name] for name in bucket.names])
        return BASELINES[self._rival.name](buffer, state, GroupCommunicator(group), divisor, self._rival.density)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:  # noqa: ARG002
        return None  # it is counted on the wire

    def probe(self, kind: str) -> Collective:
        raise NotImplementedError(f"{kind} is not planned with, so it is not timed by itself")

    def close(self) -> None:
        """No-op: residuals are for the next turn."""


class BaselineParallel(DataParallel):
    """A DataParallel that runs the given plan with the given collectives."""

    def __init__(self, module: nn.Module, plan: Plan, collectives: Collectives) -> None:
        self._given_collectives = collectives  # DataParallel.__init__ asks for it, so it comes first
        super().__init__(module, plan=plan, profile_steps=0, **DDP_OPTIONS)

    def _make_collectives(self, compress: Any) -> Collectives:  # noqa: ARG002
        return self._given_collectives


def sparse_rivals(
    model: nn.Module,
    step: Step,
    trace: Trace,
    network: Network,
    asked: Mapping[str, Rival],
    plans: Sequence[Plan | None],
) -> list[Contestant]:
    """One contestant for each baseline in ``asked``, whose keys are the --compress arguments.

    They send the sparse buckets of the first of ``plans`` that has any. If none has, they send everything, in DDP's own
    buckets.
    """
    sparse = [plan for plan in plans if plan is not None and any(_sparse(bucket) for bucket in plan.buckets)]
    found = []
    for kind, rival in asked.items():
        plan = _sent_by(kind, sparse[0]) if sparse else planners.using(planners.by_bytes(trace, network), kind)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # One for all turns of the contestant, so that residuals are kept between them, as in one DataParallel.
        collectives = Collectives(BaselineExchanges(kind, rival, parameters), DenseExchanges())
        found.append(Contestant(kind, partial(_raced, model, step, plan, collectives), plan, warmup=PLAN_WARMUP_STEPS))
    return found


def _sparse(bucket: Bucket) -> bool:
    return density_of(bucket.collective) is not None


def _sent_by(kind: str, plan: Plan) -> Plan:
    """The same plan with the collective ``kind`` for its sparse buckets."""
    return Plan(tuple(replace(b, collective=kind) if _sparse(b) else b for b in plan.buckets))


@contextmanager
def _raced(model: nn.Module, step: Step, plan: Plan, collectives: Collectives) -> Iterator[Callable[[], None]]:
    wrapped = BaselineParallel(model, plan, collectives)
    try:
        yield partial(step, wrapped)
    finally:
        wrapped.close()
