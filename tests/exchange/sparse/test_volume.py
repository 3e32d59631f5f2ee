"""Bytes counted on virtual ranks: Ok-Topk stays under 3k(P−1)/P entries, which are the published 6k(P−1)/P words.

An entry has 8 bytes as fp32, 4 as bf16, 3 as int8; heads and tables are counted in.
"""

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.values.kinds.formats import ENTRY_NBYTES, HEAD_NBYTES, Sizes
from anabranch.values.kinds.names import Wire
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.worlds import (
    DENSITY,
    EXCHANGES,
    NUMEL,
    OK_TOPK,
    check_step,
    gradients,
    imbalance,
    settled,
    states,
    step,
)

K = round(DENSITY * NUMEL)


def wire_of(name: str) -> Wire:
    return "int8" if "int8" in name else "bf16" if "bf16" in name else "fp32"


def bound_nbytes(name: str, k: float, ranks: int) -> float:
    """Bytes of 3k(P−1)/P entries."""
    return 3 * ENTRY_NBYTES[wire_of(name)] * k * (ranks - 1) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", [name for name in OK_TOPK if "roomy" not in name])
def test_under_six_k(name: str, ranks: int) -> None:
    world = settled(name, ranks, before=1)
    assert "regions" not in world.byte_counts.phases
    bound = bound_nbytes(name, K, ranks)
    assert 0.3 * bound < world.byte_counts.volume() <= bound


@pytest.mark.parametrize("ranks", [32, *(pytest.param(ranks, marks=pytest.mark.campaign) for ranks in (64, 128, 256))])
@pytest.mark.parametrize("name", ["exact", "exact bf16", "fixed", "fixed bf16", "fixed int8"])
def test_under_six_k_on_many_ranks(name: str, ranks: int) -> None:
    numel = max(50_000, 800 * ranks)  # 8 values per rank and message, so that heads weigh as much as some of them
    world = settled(name, ranks, numel=numel, before=1)
    heads = 2 * (ranks - 1) * HEAD_NBYTES if ENTRY_NBYTES[wire_of(name)] < 8 else 0
    assert world.byte_counts.volume() <= bound_nbytes(name, DENSITY * numel, ranks) + heads
    assert imbalance(world.byte_counts) < 2


@pytest.mark.parametrize("name", ["fixed", "fixed bf16", "fixed int8"])
def test_the_size_of_a_message_is_known_beforehand(name: str) -> None:
    sizes = Sizes.of(NUMEL, 4, DENSITY, OkTopk(wire=wire_of(name)))
    assert settled(name, 4, before=1).byte_counts.volume() == 2 * 3 * sizes.message_nbytes


@pytest.mark.parametrize(("ranks", "numel"), [(4, NUMEL), (2, 300_000)])
def test_rounded_values_travel_in_fewer_bytes(ranks: int, numel: int) -> None:
    """Half of the bytes as bf16, three eighths as int8, in regions of one chunk and of several."""
    whole, half, least = (
        settled(name, ranks, numel=numel, before=1).byte_counts.volume()
        for name in ("fixed", "fixed bf16", "fixed int8")
    )
    assert half == pytest.approx(whole / 2, rel=0.03)
    assert least == pytest.approx(whole * 3 / 8, rel=0.05)


@pytest.mark.parametrize("name", ["exact", "exact bf16", "exact int8"])
def test_one_owner_with_everything_hands_it_out(name: str) -> None:
    """All large sums in one region that cannot be parted in time: the rebalancing of the gather steps in."""
    held, world = states(8, 8000), VirtualWorld(8)
    step(EXCHANGES[name], gradients(8, 8000, 0), held, world, 0.02)
    made = [torch.zeros(8000) for _ in range(8)]
    low, high = int(held[0].boundaries[3]), int(held[0].boundaries[4])
    for rank, gradient in enumerate(made):
        gradient[low:high] = 1e6 + rank + torch.arange(high - low)
    world.byte_counts.clear()
    check_step(EXCHANGES[name], made, held, world, 0.02)
    assert "balance" in world.byte_counts.phases
    # 3k, and k more, because counts may go to 2k between two exact thresholds; and eight tables
    assert world.byte_counts.volume(["balance", "gather"]) <= bound_nbytes(name, 160, 8) * 4 / 3 + 100


def test_adversarial_supports_are_balanced_by_regions() -> None:
    """A tenth of the bucket holds nearly everything; regions follow it within one refresh."""
    held, world = states(8, 20_000), VirtualWorld(8)
    for number in range(2):
        world.byte_counts.clear()
        made = gradients(8, 20_000, number)
        for gradient in made:
            gradient[2000:] *= 1e-4
        step(EXCHANGES["exact"], made, held, world, 0.01)
    assert imbalance(world.byte_counts, ["split"]) < 2
    assert world.byte_counts.volume() <= bound_nbytes("exact", 200, 8)
