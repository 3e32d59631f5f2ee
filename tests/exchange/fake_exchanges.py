"""A family of exchanges and residuals that record, for tests of what is independent of real exchanges."""

from typing import Any

import torch

from anabranch import Bucket, Plan
from anabranch.exchange.dense import dense
from anabranch.exchange.interface import Collective, ExchangeFamily, Group, Steps, Traffic
from anabranch.exchange.residuals.store import Residuals


def eighths(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """An all-reduce of values that each rank has rounded to multiples of 1/8."""
    buffer.mul_(8).round_().div_(8)
    yield from dense(buffer, group, divisor)


class EighthsExchanges(ExchangeFamily):
    """One kind, "eighths", for float32 alone; keeps the names of the buckets that it has exchanged."""

    kinds: tuple[str, ...] = ("eighths",)

    def __init__(self) -> None:
        self.exchanged: list[tuple[str, ...]] = []

    def handles(self, kind: str) -> bool:
        return kind == "eighths"

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and dtype == torch.float32

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        self.exchanged.append(bucket.names)
        return eighths(buffer, group, divisor)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        return Traffic(numel * ranks, numel, 0.5) if self.supports(bucket.collective, dtype) else None

    def probe(self, kind: str) -> Collective:
        assert self.handles(kind)
        return eighths

    def close(self) -> None:
        self.exchanged.append(("closed",))


class RecordingResiduals(Residuals):
    """Residuals of a kind called "eighths", which keep their calls and the states they were given, and nothing else."""

    def __init__(self) -> None:
        super().__init__(keeps=lambda kind: kind == "eighths", warmup_steps=7)
        self.calls: list[str] = []
        self.states: list[Any] = []

    def use_plan(self, plan: Plan | None) -> None:
        self.calls.append(f"use_plan {None if plan is None else len(plan)}")

    def load_state_dict(self, *states: Any) -> None:
        self.states += states

    def loaded(self) -> list[str]:
        return [str(state) for state in self.states]

    def close(self) -> None:
        self.calls.append("close")
