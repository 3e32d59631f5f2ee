"""Errors of averages, sampled: found where they are, in the same steps on all ranks, not in steps that are timed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.exchange import error_samples
from anabranch.exchange.dense import dense
from anabranch.exchange.error_samples import FIRST, PERIOD, ErrorSamples
from anabranch.exchange.interface import Steps
from anabranch.exchange.residuals.store import Residuals
from anabranch.observe.measure import drive
from anabranch.values.plan import Bucket, Plan
from ranks import on_ranks

PLAN = Plan((Bucket(("a",), collective="int8"), Bucket(("b",), collective="int8"), Bucket(("c",))))


def doubled(buffer: torch.Tensor) -> Steps:
    """An exchange that is off by 100 %."""
    group = dist.group.WORLD
    assert group is not None
    yield from dense(buffer, group, float(dist.get_world_size()))
    buffer.mul_(2)


def sampled_in(samples: ErrorSamples, index: int, exchanges: int, value: float = 1.0) -> list[int]:
    """The exchanges, counted from 1, that were sampled."""
    group, found = dist.group.WORLD, []
    assert group is not None
    for number in range(1, exchanges + 1):
        buffer = torch.full((10,), value)
        steps = doubled(buffer)
        if samples.due(index):
            steps = samples.sampled(steps, index, buffer, group, float(dist.get_world_size()))
            found.append(number)
        drive(steps)
        assert torch.equal(buffer, torch.full((10,), 2 * value)) or value != value
    return found


def by_last_name(samples: ErrorSamples) -> dict[str, float]:
    return {bucket.names[-1]: error for bucket, error in samples.relative_errors().items()}


def seen(rank: int) -> dict[str, Any]:
    samples = ErrorSamples(PLAN, Residuals())
    first = sampled_in(samples, 0, FIRST + PERIOD)
    second = sampled_in(samples, 1, FIRST + 1)
    dense_one = sampled_in(samples, 2, FIRST + 2)
    errors = by_last_name(samples)
    samples.postpone()
    late = sampled_in(samples, 0, FIRST)
    kept = by_last_name(samples)
    other = ErrorSamples(PLAN, Residuals())
    nan = sampled_in(other, 0, FIRST, float("nan"))
    return {
        "sampled": (first, second, dense_one, late, nan),
        "errors": errors,
        "kept": kept,
        "nan": by_last_name(other),
    }


def test_buckets_take_turns_and_nothing_that_is_not_finite_counts() -> None:
    for answer in on_ranks(seen, 2):
        assert answer["sampled"] == ([FIRST, FIRST + PERIOD], [FIRST + 1], [], [FIRST], [FIRST])
        assert answer["errors"] == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}
        assert answer["kept"]["a"] == pytest.approx(1.0)
        assert answer["nan"] == {}


def slices(rank: int) -> float:
    """A bucket of three slices, of which the second is wrong."""
    error_samples.FIRST, error_samples.PERIOD, error_samples.SLICE_NUMEL, error_samples.KEPT = 1, 1, 4, 1.0
    samples, group = ErrorSamples(PLAN, Residuals()), dist.group.WORLD
    assert group is not None
    for _ in range(3):
        buffer = torch.ones(10)

        def half_wrong(buffer: torch.Tensor = buffer) -> Steps:
            assert group is not None
            yield from dense(buffer, group, 2.0)
            buffer[4:8] += 0.5

        assert samples.due(0)
        drive(samples.sampled(half_wrong(), 0, buffer, group, 2.0))
    return samples.relative_errors()[PLAN.buckets[0]]


def test_every_slice_has_its_turn() -> None:
    for found in on_ranks(slices, 2):
        assert found == pytest.approx((4 * 0.25 / 10) ** 0.5)
