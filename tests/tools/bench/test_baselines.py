"""The baseline exchanges: they send as many bytes as they are known to, and their sums are those of the oracle."""

import math

import pytest
import torch

from anabranch.tools.bench.baselines import gaussian_magnitude
from anabranch.tools.bench.virtual import VirtualWorld
from exchange.sparse.worlds import DENSITY, EXCHANGES, NUMEL, gradients, settled, states, step

K = round(DENSITY * NUMEL)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
def test_baselines_send_as_many_bytes_as_they_should(ranks: int) -> None:
    n, k, part = 4 * NUMEL, 4 * K, (ranks - 1) / ranks  # in bytes: values and positions have four each
    assert settled("dense", ranks).byte_counts.volume() == pytest.approx(2 * n * part)
    assert settled("topk", ranks).byte_counts.volume(["gather"]) == 2 * k * (ranks - 1)
    tree = settled("gtopk", ranks).byte_counts
    assert tree.volume(["up"]) + tree.volume(["down"]) == 4 * k * math.ceil(math.log2(ranks))
    dsa = settled("dsa", ranks).byte_counts
    assert 4 * k * part * 0.8 <= dsa.volume(["split", "gather"]) <= (2 * k + n) * part * 1.3
    gathered = settled("gaussian", ranks).byte_counts
    assert gathered.volume(["gather"]) > 2 * k * (ranks - 1), "heavy tails pass a Gaussian's threshold too often"


@pytest.mark.parametrize(("density", "dense"), [(0.5, True), (0.001, False)])
def test_dsa_sends_plain_values_where_pairs_would_be_longer(density: float, dense: bool) -> None:
    """The owners' sums are those of the top-k all-gather, however they are sent."""
    ranks, numel = 8, 4000
    made, expected, world = gradients(ranks, numel, 0), gradients(ranks, numel, 0), VirtualWorld(ranks)
    step(EXCHANGES["topk"], expected, states(ranks, numel), VirtualWorld(ranks), density)
    step(EXCHANGES["dsa"], made, states(ranks, numel), world, density)
    assert torch.equal(made[0], expected[0])
    pair_words = 2 * int(made[0].count_nonzero())
    assert (pair_words > numel) == dense
    if dense:
        assert world.byte_counts.received(["gather"]).tolist() == [4 * numel * (ranks - 1) / ranks] * ranks
    else:
        assert world.byte_counts.received(["gather"]).sum() == 4 * pair_words * (ranks - 1)


def test_a_gaussian_threshold_is_right_for_gaussians_only() -> None:
    chance = torch.Generator().manual_seed(3)
    values = torch.randn(200_000, generator=chance)
    assert int((values.abs() >= gaussian_magnitude(values, 0.01)).sum()) == pytest.approx(2000, rel=0.1)
    assert float(gaussian_magnitude(values, 1.0)) == 0.0
