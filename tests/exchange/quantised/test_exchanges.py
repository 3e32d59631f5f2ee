"""The family of quantised exchanges among processes: bf16 is the average, but for two roundings."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import Bucket
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.values.kinds.options import Quantised
from exchange.values import values_of_ranks
from parallel.twins import bits
from ranks import on_ranks

SIZES = (0, 1, 2, 5, 64, 1001)
BUCKET = Bucket(("a",), 0, "bf16")


def exchanged(family: QuantisedExchanges, buffer: torch.Tensor, divisor: float) -> torch.Tensor:
    assert dist.group.WORLD is not None
    for work in family.steps(BUCKET, buffer, dist.group.WORLD, divisor):
        work.wait()
    return buffer


def average(rank: int, dtype: str) -> dict[str, Any]:
    """Every size, against float64 sums of everyone's values; values of very different magnitude."""
    world_size = dist.get_world_size()
    family = QuantisedExchanges((Quantised("bf16"),))
    found, exact, size = [], [], []
    for numel in SIZES:
        values = values_of_ranks(numel, world_size, getattr(torch, dtype))
        found.append(exchanged(family, values[rank].clone(), world_size))
        exact.append(torch.stack(values).double().sum(dim=0) / world_size)
        size.append(torch.stack(values).double().abs().sum(dim=0) / world_size)
    return {"found": found, "exact": exact, "size": size}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_bf16_is_the_average_but_for_two_roundings(world_size: int) -> None:
    answers = on_ranks(average, world_size, "float32")
    once = 2.0**-8
    for answer in answers:
        for i, (found, exact, size) in enumerate(zip(answer["found"], answer["exact"], answer["size"], strict=True)):
            assert bits(found) == bits(answers[0]["found"][i]), "ranks must end with the same bits"
            assert torch.equal(found, found.bfloat16().float())
            allowed = once * size + once * (exact.abs() + once * size) + 2.0**-22 * size
            assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 2.0**-52), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_bf16_loses_no_more_of_other_dtypes_than_a_dense_sum(dtype: str, rounding: float) -> None:
    answers = on_ranks(average, 3, dtype)
    for answer in answers:
        for i, (found, exact, size) in enumerate(zip(answer["found"], answer["exact"], answer["size"], strict=True)):
            assert found.dtype == getattr(torch, dtype) and bits(found) == bits(answers[0]["found"][i])
            allowed = rounding * 4 * size + 3 * torch.finfo(found.dtype).smallest_normal
            assert bool(((found.double() - exact).abs() <= allowed).all())


def bfloat16_sums(rank: int) -> list[float]:
    """1 from one rank, and from the others what a sum in bfloat16 would not see."""
    return exchanged(QuantisedExchanges(), torch.full((3,), 1.0 if rank == 0 else 2.0**-9).bfloat16(), 1.0).tolist()


def test_bfloat16_gradients_are_added_in_float32() -> None:
    for values in on_ranks(bfloat16_sums, 5):
        assert values == [1.0 + 2.0**-7] * 3


def divided(rank: int) -> list[float]:
    """A divisor that is not the world size, as under join()."""
    return exchanged(QuantisedExchanges(), torch.full((5,), float(rank + 1)), 1.5).tolist()


def test_divides_by_the_divisor() -> None:
    for values in on_ranks(divided, 2):
        assert values == [2.0] * 5
