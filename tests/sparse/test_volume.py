"""Words counted on virtual ranks: Ok-Topk stays under 6k(P−1)/P."""

import pytest
import torch

from anabranch.bench.virtual import VirtualWorld
from anabranch.sparse.options import OkTopk
from anabranch.sparse.sizes import Sizes
from sparse.worlds import DENSITY, EXCHANGES, NUMEL, OK_TOPK, gradients, imbalance, settled, states, step

K = round(DENSITY * NUMEL)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", [name for name in OK_TOPK if "roomy" not in name])
def test_under_six_k(name: str, ranks: int) -> None:
    world = settled(name, ranks, before=1)
    assert "regions" not in world.word_counts.phases
    bound = 6 * K * (ranks - 1) / ranks
    assert 0.15 * bound < world.word_counts.volume() <= bound


@pytest.mark.parametrize("ranks", [32, 64, 128, 256])
@pytest.mark.parametrize("name", ["exact", "fixed", "fixed bf16"])
def test_under_six_k_on_many_ranks(name: str, ranks: int) -> None:
    numel = max(50_000, 800 * ranks)  # 8 values per rank and message: with fewer, heads are what is counted
    world = settled(name, ranks, numel=numel, before=1)
    assert world.word_counts.volume() <= 6 * DENSITY * numel * (ranks - 1) / ranks
    assert imbalance(world.word_counts) < 2


@pytest.mark.parametrize("name", ["fixed", "fixed bf16"])
def test_the_size_of_a_message_is_known_beforehand(name: str) -> None:
    options = OkTopk(wire="bf16" if "bf16" in name else "fp32")
    sizes = Sizes.of(NUMEL, 4, DENSITY, options)
    assert settled(name, 4, before=1).word_counts.volume() == 2 * 3 * sizes.message_nbytes / 4


def test_bf16_travels_in_fewer_words() -> None:
    """Half of the words where regions are narrow, three quarters where they are not."""
    whole = settled("fixed", 4, before=1).word_counts
    narrow = settled("fixed bf16", 4, before=1).word_counts
    wide_whole = settled("fixed", 2, numel=70_000, before=1).word_counts
    wide = settled("fixed bf16", 2, numel=70_000, before=1).word_counts
    assert narrow.volume() == pytest.approx(whole.volume() / 2, rel=0.02)
    assert wide.volume() == pytest.approx(wide_whole.volume() * 3 / 4, rel=0.02)


def test_one_owner_with_everything_hands_it_out() -> None:
    """All large sums in one region that cannot be parted in time: the rebalancing of the gather steps in."""
    held, world = states(8, 8000), VirtualWorld(8)
    step(EXCHANGES["exact"], gradients(8, 8000, 0), held, world, 0.02)
    made = [torch.zeros(8000) for _ in range(8)]
    low, high = int(held[0].boundaries[3]), int(held[0].boundaries[4])
    for rank, gradient in enumerate(made):
        gradient[low:high] = 1e6 + rank + torch.arange(high - low)
    world.word_counts.clear()
    step(EXCHANGES["exact"], made, held, world, 0.02)
    assert "balance" in world.word_counts.phases
    # 6k, and 2k more, because counts may go to 2k between two exact thresholds
    assert world.word_counts.volume(["balance", "gather"]) <= 2 * 4 * 160 * 7 / 8


def test_adversarial_supports_are_balanced_by_regions() -> None:
    """A tenth of the bucket holds nearly everything; regions follow it within one refresh."""
    held, world = states(8, 20_000), VirtualWorld(8)
    for number in range(2):
        world.word_counts.clear()
        made = gradients(8, 20_000, number)
        for gradient in made:
            gradient[2000:] *= 1e-4
        step(EXCHANGES["exact"], made, held, world, 0.01)
    assert imbalance(world.word_counts, ["split"]) < 2
    assert world.word_counts.volume() <= 6 * 200 * 7 / 8
