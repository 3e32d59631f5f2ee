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
from ranks import Case, cases_on_ranks

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


def bfloat16_sums(rank: int) -> list[float]:
    """1 from one rank, and from the others what a sum in bfloat16 would not see."""
    return exchanged(QuantisedExchanges(), torch.full((3,), 1.0 if rank == 0 else 2.0**-9).bfloat16(), 1.0).tolist()


def divided(rank: int) -> list[float]:
    """A divisor that is not the world size, as under join()."""
    return exchanged(QuantisedExchanges(), torch.full((5,), float(rank + 1)), 1.5).tolist()


DENSELY = {"float64": 2.0**-52, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # rounding of a sum in the dtype itself


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_bf16_among_processes(world_size: int) -> None:
    cases: dict[str, Case] = {dtype: (average, dtype) for dtype in ("float32", *DENSELY)}
    found = cases_on_ranks({**cases, "sums": (bfloat16_sums,), "divided": (divided,)}, world_size)
    check_two_roundings(found["float32"])
    for dtype, rounding in DENSELY.items():
        check_loss_of_a_dense_sum(found[dtype], getattr(torch, dtype), rounding, world_size)
    summed = torch.tensor(1.0 + (world_size - 1) * 2.0**-9).bfloat16().item()
    assert found["sums"] == [[summed] * 3] * world_size, "bfloat16 gradients are added in float32"
    ranks = torch.arange(1, world_size + 1)
    for values in found["divided"]:
        assert values == ([2.0] * 5 if world_size == 2 else pytest.approx([float(ranks.sum()) / 1.5] * 5, rel=2.0**-7))


def check_two_roundings(answers: list[dict[str, Any]]) -> None:
    once = 2.0**-8
    for answer in answers:
        for i, (found, exact, size) in enumerate(zip(answer["found"], answer["exact"], answer["size"], strict=True)):
            assert bits(found) == bits(answers[0]["found"][i]), "ranks must end with the same bits"
            assert torch.equal(found, found.bfloat16().float())
            allowed = once * size + once * (exact.abs() + once * size) + 2.0**-22 * size
            assert bool(((found.double() - exact).abs() <= allowed).all())


def check_loss_of_a_dense_sum(
    answers: list[dict[str, Any]], dtype: torch.dtype, rounding: float, world_size: int
) -> None:
    """Other dtypes lose no more than in a dense sum."""
    for answer in answers:
        for i, (found, exact, size) in enumerate(zip(answer["found"], answer["exact"], answer["size"], strict=True)):
            assert found.dtype == dtype and bits(found) == bits(answers[0]["found"][i])
            allowed = rounding * (world_size + 1) * size + world_size * torch.finfo(dtype).smallest_normal
            assert bool(((found.double() - exact).abs() <= allowed).all())
