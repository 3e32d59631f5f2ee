"""Curves: measured points made non-falling, straight lines between them."""

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch import Curve, CurvePoint, Network, TensorSpec, Trace
from anabranch import planning as planners
from strategies import curves, measured_curves, measured_points

sizes = st.one_of(st.integers(0, 50), st.integers(0, 1 << 34))


@given(curves, sizes, sizes)
def test_a_curve_never_falls(curve: Curve, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert curve.seconds(low) <= curve.seconds(high) * (1 + 1e-12)


@given(curves, sizes)
def test_between_its_points_a_curve_is_what_numpy_interpolates(curve: Curve, nbytes: int) -> None:
    last = curve.points[-1]
    want = float(np.interp(nbytes, [p.nbytes for p in curve.points], [p.seconds for p in curve.points]))
    want += curve.tail_s_per_byte * max(0, nbytes - last.nbytes)
    assert curve.seconds(nbytes) == pytest.approx(want, rel=1e-9, abs=1e-15)


@given(curves)
def test_a_curve_passes_its_points(curve: Curve) -> None:
    assert [curve.seconds(p.nbytes) for p in curve.points] == [p.seconds for p in curve.points]
    assert curve.start_s == curve.seconds(0) == curve.points[0].seconds


@given(curves, sizes)
def test_segments_are_the_curve(curve: Curve, nbytes: int) -> None:
    segments = curve.segments()
    assert segments[0].nbytes == 0
    assert all(low.nbytes < high.nbytes for low, high in pairwise(segments))
    here = [s for s in segments if s.nbytes <= nbytes][-1]
    assert here.seconds + here.s_per_byte * (nbytes - here.nbytes) == pytest.approx(curve.seconds(nbytes), rel=1e-12)


@given(measured_points)
def test_smoothing_is_the_isotonic_regression(points: list[tuple[int, float, float]]) -> None:
    curve = Curve.through(reversed(points))
    raw = np.array([s for _, s, _ in sorted(points)])
    smooth = np.array([p.seconds for p in curve.points])
    assert [p.nbytes for p in curve.points] == sorted(n for n, _, _ in points)
    assert [p.spread_s for p in curve.points] == [spread for _, _, spread in sorted(points)]
    assert np.all(np.diff(smooth) >= 0)
    assert np.sum(smooth) == pytest.approx(np.sum(raw))  # averaging moves no weight
    assert raw.min() - 1e-12 <= smooth.min()
    assert smooth.max() <= raw.max() + 1e-12
    # The least-squares non-falling fit is the max-min of means, a formula that pools nothing.
    n = len(raw)
    want = [max(min(raw[low : high + 1].mean() for high in range(i, n)) for low in range(i + 1)) for i in range(n)]
    assert smooth == pytest.approx(np.array(want), rel=1e-9, abs=1e-12)


@given(measured_curves)
def test_smoothing_leaves_a_rising_curve_alone(curve: Curve) -> None:
    assert Curve.through([(p.nbytes, p.seconds, p.spread_s) for p in curve.points]) == curve


def test_through_by_hand() -> None:
    curve = Curve.through([(10, 3.0), (0, 1.0), (20, 2.0), (30, 4.5)])
    assert [(p.nbytes, p.seconds) for p in curve.points] == [(0, 1.0), (10, 2.5), (20, 2.5), (30, 4.5)]
    assert curve.tail_s_per_byte == 0.2
    assert curve.seconds(5) == 1.75
    assert curve.seconds(40) == 6.5


@given(curves)
def test_the_line_of_a_curve(curve: Curve) -> None:
    start_s, s_per_byte = curve.line()
    assert start_s >= 0
    assert s_per_byte >= 0
    if len(curve.points) > 1:
        slope, intercept = np.polyfit([p.nbytes for p in curve.points], [p.seconds for p in curve.points], 1)
        assert s_per_byte == pytest.approx(slope, rel=1e-6, abs=1e-12)
        assert start_s == pytest.approx(max(0.0, intercept), rel=1e-6, abs=1e-6)


def test_the_line_of_a_flat_curve_does_not_fall() -> None:
    """Rounding alone made the slope −6e-38, which Network.at and planners.lanes then refused."""
    flat = Curve.through([(n, 0.5024285989524275) for n in (95050, 543160, 711533, 794659, 832721, 844219)])
    assert flat.line() == pytest.approx((0.5024285989524275, 0.0))
    assert flat.line()[1] >= 0
    network = Network(8, {"dense": flat})
    assert network.at(64).allreduce_s(0) == pytest.approx(0.5024285989524275 * 63 / 7)
    assert len(planners.lanes(Trace((TensorSpec("a", 10, 4, 1.0),), 0.0), network)) == 1


def test_lines_by_hand() -> None:
    assert Curve.linear(2.0, 0.5).line() == (2.0, 0.5)
    assert Curve((CurvePoint(4, 3.0),), 0.5).line() == (1.0, 0.5)
    assert Curve((CurvePoint(10, 3.0),), 0.5).line() == (0.0, 0.5)  # never a negative start-up
    assert Curve.through([(0, 1.0), (2, 2.0), (4, 3.0)]).line() == pytest.approx((1.0, 0.5))


@given(curves, st.integers(1, 1 << 30), st.floats(0, 1))
def test_least_s_per_byte_is_a_bound(curve: Curve, most: int, share: float) -> None:
    least, transfer = curve.least_s_per_byte(most), curve.least_transfer_s_per_byte(most)
    assert 0 <= transfer <= least * (1 + 1e-12)
    for nbytes in {max(1, int(most * share)), 1, most, *(p.nbytes for p in curve.points if 0 < p.nbytes <= most)}:
        assert least * nbytes <= curve.seconds(nbytes) * (1 + 1e-9)
        assert curve.start_s + transfer * nbytes <= curve.seconds(nbytes) * (1 + 1e-9)


@given(curves, st.integers(1, 1 << 30))
def test_least_s_per_byte_is_reached(curve: Curve, most: int) -> None:
    tried = {1, most, *(p.nbytes for p in curve.points if 0 < p.nbytes <= most)}
    reached = min((curve.seconds(n) - curve.start_s) / n for n in tried)
    assert curve.least_transfer_s_per_byte(most) == pytest.approx(reached, rel=1e-12, abs=1e-300)
    assert curve.least_s_per_byte(most) == pytest.approx(min(curve.seconds(n) / n for n in tried), rel=1e-12)


@given(measured_curves, st.floats(0, 3))
@example(Curve.through([(0, 0.0), (1, 5e-324, 1.0)]), 1.0)
def test_shifted(curve: Curve, spreads: float) -> None:
    assert curve.shifted(0) == curve
    worse, better = curve.shifted(spreads), curve.shifted(-spreads)
    for at in curve.points:
        assert better.seconds(at.nbytes) <= at.seconds * (1 + 1e-9) + 1e-12
        assert at.seconds <= worse.seconds(at.nbytes) * (1 + 1e-9) + 1e-12
        assert better.seconds(at.nbytes) >= 0


def test_shifted_by_hand() -> None:
    curve = Curve.through([(0, 1.0, 0.5), (10, 2.0, 0.25), (20, 3.0, 0.0)])
    assert [p.seconds for p in curve.shifted(2).points] == [2.0, 2.5, 3.0]
    assert [p.seconds for p in curve.shifted(-4).points] == [0.0, 1.0, 3.0]
    one = Curve((CurvePoint(0, 1.0, 0.5),), 0.25)
    assert one.shifted(1) == Curve((CurvePoint(0, 1.5, 0.5),), 0.375)  # steeper by the same factor
    assert one.shifted(-2) == Curve((CurvePoint(0, 0.0, 0.5),), 0.0)


def test_shifted_keeps_a_tail_of_its_own() -> None:
    curve = Curve((CurvePoint(0, 1.0), CurvePoint(10, 2.0)), 5.0)
    assert curve.shifted(0) == curve


def test_a_curve_refuses() -> None:
    with pytest.raises(ValueError, match="no points"):
        Curve((), 0.0)
    with pytest.raises(ValueError, match="rising sizes"):
        Curve((CurvePoint(1, 1.0), CurvePoint(1, 1.0)), 0.0)
    with pytest.raises(ValueError, match=r"falls.*Curve\.through"):
        Curve((CurvePoint(1, 2.0), CurvePoint(2, 1.0)), 0.0)
    with pytest.raises(ValueError, match="at least two"):
        Curve.through([(1, 1.0)])
    for bad in (-1.0, nan, inf):
        with pytest.raises(ValueError, match="tail_s_per_byte"):
            Curve.linear(0.0, bad)
        with pytest.raises(ValueError, match="cost of 1 bytes"):
            CurvePoint(1, bad)
        with pytest.raises(ValueError, match="spread"):
            CurvePoint(1, 1.0, bad)
    with pytest.raises(ValueError, match="bytes"):
        CurvePoint(-1, 1.0)
    for size in (-1, (1 << 53) + 1):
        with pytest.raises(ValueError, match="a message"):
            Curve.linear(0.0, 0.0).seconds(size)


def test_one_point_per_size() -> None:
    for sizes in ((8, 8), (8, 8, 9), (4, 8, 8)):
        with pytest.raises(ValueError, match="8 bytes were measured twice"):
            Curve.through([(size, 1.0) for size in sizes])
