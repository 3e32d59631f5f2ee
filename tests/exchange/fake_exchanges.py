"""A family of exchanges and a memory of its own, for tests of what is independent of real exchanges."""

from typing import Any

import torch

from anabranch import Bucket, Plan
from anabranch.exchange.collectives import ResidualState
from anabranch.exchange.contracts import Collective, Group, Steps, Traffic
from anabranch.exchange.dense import dense
from anabranch.exchange.error_samples import Velocity


def eighths(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
    """An all-reduce of values that each rank has rounded to multiples of 1/8."""
    buffer.mul_(8).round_().div_(8)
    yield from dense(buffer, group, divisor)


class EighthsExchanges:
    """One kind, "eighths", for float32 alone; keeps the names of the buckets that it has exchanged."""

    kinds: tuple[str, ...] = ("eighths",)

    def __init__(self) -> None:
        self.exchanged: list[tuple[str, ...]] = []

    def handles(self, kind: str) -> bool:
        return kind == "eighths"

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and dtype == torch.float32

    def on_side_stream(self, kind: str) -> bool:
        return self.handles(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        self.exchanged.append(bucket.names)
        return eighths(buffer, group, divisor)

    def sends_little(self, kind: str) -> bool:
        return self.handles(kind)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic | None:
        return Traffic(numel * ranks, numel, 0.5) if self.supports(bucket.collective, dtype) else None

    def probe(self, kind: str) -> Collective:
        assert self.handles(kind)
        return eighths

    def close(self) -> None:
        self.exchanged.append(("closed",))


class FakeMemory:
    """An ``ExchangeMemory`` that keeps its calls, and the states it was given."""

    warmup_steps = 7

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: list[Any] = []

    def keeps_residual(self, kind: str) -> bool:
        return kind == "eighths"

    def residual_state(self, bucket: Bucket) -> ResidualState | None:
        self.calls.append(f"residual_state {bucket.names[0]}")
        return None

    def sends_velocities(self, kind: str) -> bool:
        return False

    def velocity(self, bucket: Bucket) -> Velocity | None:
        return None

    def on_step_end(self) -> None:
        self.calls.append("on_step_end")

    def use_plan(self, plan: Plan | None) -> None:
        self.calls.append(f"use_plan {None if plan is None else len(plan)}")

    def store_residuals(self, how: str) -> None:
        self.calls.append(f"store_residuals {how}")

    def summary(self) -> list[str]:
        return ["a line of the memory"]

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {"weight": torch.ones(1)}}

    def load_state_dict(self, *states: Any) -> None:
        self.states += states

    def loaded(self) -> list[str]:
        return [str(state) for state in self.states]

    def rescale(self, scale: float) -> None:
        self.calls.append(f"rescale {scale}")

    def close(self) -> None:
        self.calls.append("close")
