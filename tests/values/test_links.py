"""Textbook costs against their closed forms."""

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import AlphaBeta, TwoLevel
from oracles import two_level_s
from strategies import models

A, B, G = 3e-5, 2e-9, 5e-10
POWERS = [2, 4, 8, 64, 2048]


@pytest.mark.parametrize("n", [*POWERS, 3, 6, 100])
def test_ring(n: int) -> None:
    want = (2 * (n - 1) * A, 2 * (n - 1) / n * B + (n - 1) / n * G)
    assert AlphaBeta("ring", A, B, G).line(n) == pytest.approx(want)


@pytest.mark.parametrize("n", POWERS)
def test_tree_and_halving_doubling(n: int) -> None:
    assert AlphaBeta("tree", A, B, G).line(n) == pytest.approx((2 * A * log2(n), (2 * B + G) * log2(n)))
    want = (2 * A * log2(n), 2 * B - (2 * B + G) / n + G)
    assert AlphaBeta("halving_doubling", A, B, G).line(n) == pytest.approx(want)


def test_partial_rounds_cost_whole_ones() -> None:
    for algorithm in ("tree", "halving_doubling"):
        link = AlphaBeta(algorithm, A, B, G)
        assert link.line(5)[0] == link.line(8)[0] > link.line(4)[0]


@given(models)
def test_one_rank_pays_nothing(model: AlphaBeta | TwoLevel) -> None:
    assert model.line(1) == (0.0, 0.0)


@given(models, st.integers(1, 4096))
def test_more_ranks_never_pay_less(model: AlphaBeta | TwoLevel, n: int) -> None:
    if isinstance(model, TwoLevel):
        n = max(n, model.ranks_per_node)  # below one full node another formula holds
    fewer, more = model.line(n), model.line(n + 1)
    assert more[0] >= fewer[0] * (1 - 1e-12)
    assert more[1] >= fewer[1] * (1 - 1e-12)


@given(st.integers(2, 4096), st.floats(1e-9, 10), st.floats(1e-12, 1e-3))
def test_ring_like_is_the_ring_of_that_line(n: int, start_s: float, s_per_byte: float) -> None:
    assert AlphaBeta.ring_like(n, start_s, s_per_byte).line(n) == pytest.approx((start_s, s_per_byte))


def test_two_level_by_hand() -> None:
    inside, across = AlphaBeta("ring", 1e-6, 1e-11, 3e-12), AlphaBeta("ring", 1e-4, 1e-9, 8e-12)
    two = TwoLevel(8, inside, across)
    assert two.line(8) == inside.line(8)  # one node: nothing crosses
    assert two.line(3) == inside.line(3)
    start_s, s_per_byte = two.line(32)
    assert start_s == pytest.approx(14 * 1e-6 + 6 * 1e-4)
    assert s_per_byte == pytest.approx(7 / 8 * (2e-11 + 3e-12) + 3 / 4 * (2e-9 + 8e-12 / 8))
    assert two.line(25) == pytest.approx(two.line(32))  # a last node may be partly filled
    assert TwoLevel(1, inside, across).line(16) == pytest.approx(across.line(16))


@given(st.integers(1, 40), st.integers(1, 9), *[st.floats(1e-7, 1e-2)] * 2, *[st.floats(1e-12, 1e-8)] * 2)
def test_two_levels_cost_their_rounds(nodes: int, per_node: int, a: float, b: float, c: float, d: float) -> None:
    two = TwoLevel(per_node, AlphaBeta("ring", a, c), AlphaBeta("ring", b, d))
    start_s, s_per_byte = two.line(nodes * per_node)
    for nbytes in (0, 1 << 20):
        assert start_s + s_per_byte * nbytes == pytest.approx(two_level_s(nbytes, nodes, per_node, (a, c), (b, d)))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="algorithm"):
        AlphaBeta("star", A, B)  # type: ignore[arg-type]
    for bad in (-1.0, float("nan"), float("inf")):
        for values in ((bad, B, G), (A, bad, G), (A, B, bad)):
            with pytest.raises(ValueError, match="expected"):
                AlphaBeta("ring", *values)
    with pytest.raises(ValueError, match="ranks_per_node"):
        TwoLevel(0, AlphaBeta("ring", A, B), AlphaBeta("ring", A, B))
    with pytest.raises(ValueError, match="world_size"):
        AlphaBeta("ring", A, B).line(0)
