"""The exact exchange: exactly k values at a refresh, and rows handed out in equal parts."""

import torch
from benchmarks.virtual import VirtualWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.sparse.exact_exchange import equal_lengths, overlaps
from exchange.sparse.worlds import EXCHANGES, gradients, states, step


def test_exact_thresholds_apply_exactly_k() -> None:
    """Invariant 5, and the oracle: at a refresh the k largest of the sums of everyone's top-k are applied."""
    held, world = states(4, 5000), VirtualWorld(4)
    made, twin = gradients(4, 5000, 3), gradients(4, 5000, 3)
    step(EXCHANGES["exact"], made, held, world, 0.01)
    step(EXCHANGES["topk"], twin, states(4, 5000), world, 0.01)
    best = torch.topk(twin[0].abs(), 50).indices
    expected = torch.zeros(5000)
    expected[best] = twin[0][best]
    assert torch.equal(made[0], expected)
    for number in range(4):
        made = gradients(4, 5000, number)
        refreshed = held[0].step % 3 == 0
        step(EXCHANGES["exact"], made, held, world, 0.01)
        if refreshed:
            assert int((made[0] != 0).sum()) == 50


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_rows_are_handed_out_in_equal_parts(lengths: list[int]) -> None:
    """Invariant 8, row by row."""
    targets = equal_lengths(sum(lengths), len(lengths))
    assert max(targets) - min(targets) <= 1
    holders = [i for i, length in enumerate(lengths) for _ in range(length)]
    owners = [j for j, length in enumerate(targets) for _ in range(length)]
    for i in range(len(lengths)):
        going, coming = overlaps(lengths, targets, i), overlaps(targets, lengths, i)
        for j in range(len(lengths)):
            assert going[j] == sum(a == i and b == j for a, b in zip(holders, owners, strict=True))
            assert coming[j] == sum(a == j and b == i for a, b in zip(holders, owners, strict=True))
