"""The dense collective leaves the average in the buffer, the same bits on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.exchange.dense import all_finite, dense, dense_traffic
from exchange.values import values_of_ranks
from parallel.twins import bits
from ranks import cases_on_ranks

SIZES = (0, 1, 2, 5, 64, 1001)


def average(rank: int, dtype: str) -> dict[str, Any]:
    """Every size, against float64 sums of everyone's values; values of very different magnitude."""
    world_size = dist.get_world_size()
    assert dist.group.WORLD is not None
    found, exact, size = [], [], []
    for numel in SIZES:
        values = values_of_ranks(numel, world_size, getattr(torch, dtype))
        buffer = values[rank].clone()
        for work in dense(buffer, dist.group.WORLD, world_size):
            work.wait()
        found.append(buffer)
        exact.append(sum(v.double() for v in values) / world_size if numel else torch.zeros(0).double())
        size.append(sum(v.double().abs() for v in values) / world_size if numel else torch.zeros(0).double())
    return {"found": found, "exact": exact, "size": size}


ROUNDING = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_is_the_average(world_size: int) -> None:
    found = cases_on_ranks(
        {**{dtype: (average, dtype) for dtype in ROUNDING}, "divided": (divided,), "large": (large,)}, world_size
    )
    for dtype, rounding in ROUNDING.items():
        check_averages(found[dtype], getattr(torch, dtype), rounding, world_size)
    for values in found["divided"]:
        assert values == pytest.approx([sum(range(1, world_size + 1)) / 1.5] * 5, rel=2.0**-23 * world_size, abs=0)
    for values in found["large"]:
        assert values == pytest.approx([3e38] * 3), "scaled before they are added"


def check_averages(answers: list[dict[str, Any]], dtype: torch.dtype, rounding: float, world_size: int) -> None:
    for answer in answers:
        for i, (found, exact, size) in enumerate(zip(answer["found"], answer["exact"], answer["size"], strict=True)):
            assert found.dtype == dtype
            assert bits(found) == bits(answers[0]["found"][i]), "ranks must end with the same bits"
            allowed = rounding * (world_size + 1) * size + world_size * torch.finfo(dtype).smallest_normal
            assert bool(((found.double() - exact).abs() <= allowed).all())


def divided(rank: int) -> list[float]:
    """A divisor that is not the world size, as under join()."""
    assert dist.group.WORLD is not None
    buffer = torch.full((5,), float(rank + 1))
    for work in dense(buffer, dist.group.WORLD, 1.5):
        work.wait()
    return buffer.tolist()


def large(rank: int) -> list[float]:
    """Sums that float32 could not hold are averages that it can."""
    assert dist.group.WORLD is not None
    buffer = torch.full((3,), 3e38)
    for work in dense(buffer, dist.group.WORLD, dist.get_world_size()):
        work.wait()
    return buffer.tolist()


def test_traffic() -> None:
    assert dense_traffic(1000, torch.float32, 4) == (6000, 6000, 1.0)
    assert dense_traffic(1000, torch.float32, 1) == (0, 0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_all_finite(dtype: torch.dtype, bad: float) -> None:
    good = torch.full((3000,), 60000.0).to(dtype)
    wrong = good.clone()
    wrong[2345] = bad
    assert all_finite() and all_finite(good, good[:0], torch.ones(2))
    assert not all_finite(good, wrong)
