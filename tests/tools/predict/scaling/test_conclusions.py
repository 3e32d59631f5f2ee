"""The answer in words says what the numbers say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.tools.predict.scaling.conclusions import Gain, answer, best_at_sizes
from anabranch.values.kinds.names import COMPRESSED
from tools.report.scalings import COMPUTE_S, scaling_of

SIZES = (4, 16, 64, 256)


def steps(*values: float) -> dict[int, float]:
    """Iteration times at ``SIZES``, in units of computing."""
    return {size: COMPUTE_S * value for size, value in zip(SIZES, values, strict=True)}


def said(**strategies: dict[int, float]) -> str:
    """The answer for one network without a band."""
    curves = {name.replace("_at_", ":"): curve for name, curve in strategies.items()}
    sparse, quantised = [name for name in curves if ":" in name], [name for name in curves if name in COMPRESSED]
    return answer(scaling_of(curves, sparse=sparse, quantised=quantised, band=0.0))[0]


def test_where_dense_scheduling_helps() -> None:
    words = said(by_bytes=steps(1, 1.2, 1.5, 2), optimal=steps(1, 1.1, 1.2, 1))
    assert "net: Dense scheduling helps from 16 to 256 ranks, most at 256: optimal is 2.00× as fast" in words
    assert "Nothing needs help at 4 ranks: DDP's buckets reach 95.0% of the ideal and more." in words
    assert words.endswith("At 256 ranks optimal is best, with 100.0% efficiency.") and "Sparse" not in words


def test_where_sparse_wins() -> None:
    words = said(by_bytes=steps(2, 2, 2, 2), optimal=steps(2, 2, 2, 2), oktopk_at_01=steps(1, 2, 1.9, 3))
    assert "Dense scheduling gains less than 2% over DDP's buckets at any size." in words
    assert "Sparse wins at 4 and 64 ranks, most at 4: oktopk:01 is 2.00× as fast as the best dense plan." in words
    assert "Nothing helps at 16 and 256 ranks: at most 50.0% of the ideal, whatever the plan." in words
    assert "At 256 ranks by_bytes is best" in words


def test_where_rounding_wins_and_what_is_more_faithful_goes_first() -> None:
    """int4 gains nothing worth it over int8 at 4 ranks, and sparse nothing over int4 at 256."""
    words = said(
        by_bytes=steps(4, 4, 4, 4), int4=steps(1.99, 1, 1, 1), int8=steps(2, 2, 2, 2), bf16=steps(3, 3, 3, 3),
        oktopk_at_01=steps(1.99, 1, 1, 0.99),
    )  # fmt: skip
    assert "Rounding wins at every size from 4 to 256 ranks, most at 16: int4 is 4.00× as fast as the best" in words
    assert "Sparse wins at every size from 4 to 256 ranks, most at 256: oktopk:01 is 4.04× as fast" in words
    assert words.endswith("At 256 ranks int4 is best, with 100.0% efficiency.")
    scaling = scaling_of({"by_bytes": steps(4, 4, 4, 4), "int4": steps(1.99, 1, 1, 1), "int8": steps(2, 2, 2, 2)},
                         quantised=["int4", "int8"])  # fmt: skip
    found = [row.quantised.planner for row in best_at_sizes(scaling, scaling.on("net")) if row.quantised]
    assert found == ["int8", "int4", "int4", "int4"]


def test_where_nothing_is_needed() -> None:
    words = said(by_bytes=steps(1, 1, 1, 1), oktopk_at_01=steps(1, 1, 1, 1))
    assert "Sparse gains less than 2% over the best dense plan at any size." in words
    assert "Nothing needs help at every size from 4 to 256 ranks" in words


def test_a_gain_that_the_band_may_take_away_is_doubtful() -> None:
    scaling = scaling_of({"by_bytes": steps(1.2, 1.2, 1.2, 1.2), "optimal": steps(1.1, 1.1, 1.1, 1.1)})
    points = [replace(p, iteration_high_s=2 * p.iteration_s) if p.planner == "optimal" else p for p in scaling.points]
    words = answer(replace(scaling, points=tuple(points)))[0]
    assert "Whether it does at every size from 4 to 256 ranks depends on where in its band the network is." in words
    assert "within the band" in words


def test_where_nothing_dense_fits_nothing_is_said_of_it() -> None:
    """As with --within, where only Ok-Topk and Lean have room: they are held against each other."""
    words = said(oktopk_at_01=steps(2, 2, 2, 2), lean_at_01=steps(1, 1, 1, 1))
    assert "Another strategy helps at every size from 4 to 256 ranks" in words
    assert "lean:01 is 2.00× as fast as oktopk:01." in words and "At 256 ranks lean:01 is best" in words
    assert "ense" not in words and "Sparse" not in words


def test_without_ddp_the_first_is_the_measure() -> None:
    words = said(single=steps(2, 2, 2, 2), optimal=steps(1, 1, 1, 1))
    assert "optimal is 2.00× as fast as single." in words


times = st.lists(st.floats(1, 100), min_size=4, max_size=4).map(lambda values: steps(*values))


@given(times, times, times, st.floats(0, 1))
def test_the_best_is_best_and_gains_contain_their_middle(
    ddp: dict[int, float], dense: dict[int, float], sparse: dict[int, float], band: float
) -> None:
    curves = {"by_bytes": ddp, "optimal": dense, "oktopk:0.01": sparse}
    scaling = scaling_of(curves, sparse=["oktopk:0.01"], band=band)
    for row in best_at_sizes(scaling, scaling.on("net")):
        assert row.dense.speedup == max(row.ddp.speedup, scaling.on("net")["optimal"][row.world_size].speedup)
        assert row.sparse is not None and row.best.speedup * 1.02 >= max(row.dense.speedup, row.sparse.speedup)
        gain = Gain.over(row.sparse, row.dense)
        assert gain.low <= gain.middle <= gain.high
        assert gain.middle == pytest.approx(row.dense.iteration_s / row.sparse.iteration_s)
    assert len(answer(scaling)) == 1
