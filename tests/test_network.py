"""Curves, contention and networks."""

from dataclasses import FrozenInstanceError
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import AlphaBeta, Contention, Curve, CurvePoint, Network, NetworkError, TwoLevel
from oracles import slowdown
from strategies import contentions, curves, measured_curves, measured_points, models

sizes = st.one_of(st.integers(0, 50), st.integers(0, 1 << 34))
RINGS = AlphaBeta("ring", 1e-5, 1e-10, 1e-11), AlphaBeta("tree", 1e-4, 1e-9)


# ------------------------------------------------------------------------------------------------------- Curve


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


def test_lines_by_hand() -> None:
    assert Curve.linear(2.0, 0.5).line() == (2.0, 0.5)
    assert Curve((CurvePoint(4, 3.0),), 0.5).line() == (1.0, 0.5)
    assert Curve((CurvePoint(10, 3.0),), 0.5).line() == (0.0, 0.5)  # never a negative start-up
    assert Curve.through([(0, 1.0), (2, 2.0), (4, 3.0)]).line() == pytest.approx((1.0, 0.5))


@given(curves, st.integers(1, 1 << 30), st.floats(0, 1))
def test_least_s_per_byte_is_a_bound(curve: Curve, most: int, share: float) -> None:
    least = curve.least_s_per_byte(most)
    assert least >= 0
    for nbytes in {max(1, int(most * share)), 1, most, *(p.nbytes for p in curve.points if 0 < p.nbytes <= most)}:
        assert curve.start_s + least * nbytes <= curve.seconds(nbytes) * (1 + 1e-9)


@given(curves, st.integers(1, 1 << 30))
def test_least_s_per_byte_is_reached(curve: Curve, most: int) -> None:
    tried = {1, most, *(p.nbytes for p in curve.points if 0 < p.nbytes <= most)}
    reached = min((curve.seconds(n) - curve.start_s) / n for n in tried)
    assert curve.least_s_per_byte(most) == pytest.approx(reached, rel=1e-12, abs=1e-300)


@given(measured_curves, st.floats(0, 3))
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
    assert one.shifted(1) == Curve((CurvePoint(0, 1.5, 0.5),), 0.25)


@pytest.mark.xfail(strict=True, reason="Curve.shifted recomputes the tail from the last two points: shifted(0) differs")
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
    with pytest.raises(ValueError, match="8 to 8"):
        Curve.through([(8, 1.0), (8, 2.0), (9, 3.0)])
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


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="Curve.through divides by the gap of the last points")
def test_through_refuses_the_last_size_twice() -> None:
    with pytest.raises(ValueError, match="8 to 8"):
        Curve.through([(4, 1.0), (8, 1.0), (8, 2.0)])


# -------------------------------------------------------------------------------------------------- Contention


@given(contentions(), st.integers(1, 12))
def test_slowdown_is_the_documented_law(contention: Contention, k: int) -> None:
    assert contention.slowdown(k) == pytest.approx(float(slowdown(contention, k)))
    assert 1 <= contention.slowdown(k) <= contention.slowdown(k + 1)
    if contention.link_cap is not None:
        assert k / contention.slowdown(k) <= contention.link_cap * (1 + 1e-12)


@given(st.floats(0, 4), st.integers(1, 8))
def test_the_published_law(eta: float, k: int) -> None:
    assert Contention.law(eta).slowdown(k) == pytest.approx(1 + eta * (k - 1))


def test_contention_by_hand() -> None:
    assert [Contention((1.0, 1.25, 2.0)).slowdown(k) for k in (0, 1, 2, 3, 4, 5)] == [1, 1, 1.25, 2, 2.75, 3.5]
    assert [Contention((1.0,)).slowdown(k) for k in (1, 2, 3)] == [1, 2, 3]
    assert [Contention.law(0.5, link_cap=1.25).slowdown(k) for k in (1, 2, 3)] == [1, 1.6, 2.4]
    assert Contention() == Contention.law(1.0)


def test_contention_refuses() -> None:
    for table in ((), (2.0,), (1.0, 0.5), (1.0, 3.0, 2.0), (1.0, nan), (1.0, inf)):
        with pytest.raises(ValueError, match="slowdown"):
            Contention(table)
    for cap in (0.5, 0.0, nan, inf):
        with pytest.raises(ValueError, match="link_cap"):
            Contention(link_cap=cap)
    with pytest.raises(ValueError, match="eta"):
        Contention.law(-0.1)


# ----------------------------------------------------------------------------------------------------- Network


def test_linear_prices() -> None:
    network = Network.linear(8, 1e-3, 2e-9)
    assert network.allreduce_s(10**6) == network.seconds("dense", 10**6) == pytest.approx(3e-3)
    assert network.contention == Contention.law(1.0)
    assert Network.linear(8, 1e-3, 2e-9, eta=0.5, link_cap=1.5).contention == Contention.law(0.5, 1.5)


def test_an_unknown_collective_is_our_error() -> None:
    with pytest.raises(NetworkError, match=r"oktopk.*\['dense'\]"):
        Network.linear(8, 1, 1).seconds("oktopk", 1)


@given(models, st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 1 << 30))
def test_at_follows_the_model(model: AlphaBeta | TwoLevel, here: int, there: int, nbytes: int) -> None:
    carried = Network.modelled(here, model, Contention.law(0.5)).at(there)
    start_s, s_per_byte = model.line(there)
    assert carried.world_size == there
    assert carried.allreduce_s(nbytes) == pytest.approx(start_s + s_per_byte * nbytes)
    assert carried.contention == Contention.law(0.5)
    assert carried.at(here) == Network.modelled(here, model, Contention.law(0.5))


def test_constructors_are_their_models() -> None:
    ring, tree = RINGS
    assert Network.ring(64, 1e-5, 1e-10, 1e-11).model == ring
    assert Network.tree(64, 1e-4, 1e-9).model == tree
    assert Network.halving_doubling(64, 1e-5, 1e-10).model == AlphaBeta("halving_doubling", 1e-5, 1e-10)
    assert Network.two_level(64, 8, ring, tree).model == TwoLevel(8, ring, tree)
    assert Network.ring(64, 1e-5, 1e-10).allreduce_s(0) == pytest.approx(126e-5)


def test_meta_travels_with_a_model() -> None:
    ring = Network.ring(8, 1e-5, 1e-10)
    marked = Network(8, ring.curves, ring.contention, ring.model, {"site": "x"})
    assert marked.at(16).meta == {"site": "x"}


def test_a_measured_network_is_carried_as_a_ring_and_says_so() -> None:
    line = [(nbytes, 1e-3 + 2e-9 * nbytes) for nbytes in (0, 1 << 10, 1 << 20, 1 << 24)]
    network = Network.measured(8, {"dense": line, "other": line}, contention=Contention.law(0.5), meta={"nic": "x"})
    assert network.at(8) is network
    far = network.at(64)
    assert far.allreduce_s(1 << 20) == pytest.approx(1e-3 * 63 / 7 + 2e-9 * (63 / 64) / (7 / 8) * (1 << 20))
    assert far.contention == network.contention
    assert far.meta["nic"] == "x"
    assert "ring fitted to 8 ranks" in str(far.meta["assumption"])
    assert "assumption" not in network.meta
    assert set(far.curves) == {"dense"}  # the others cannot be carried
    assert network.at(1).allreduce_s(1 << 20) == 0
    with pytest.raises(NetworkError, match="1 rank cannot be carried to 4"):
        Network.linear(1, 1e-3, 1e-9).at(4)


def test_measured_takes_points_or_kinds_of_points() -> None:
    points = [(0, 1.0), (10, 2.0)]
    assert Network.measured(4, points) == Network.measured(4, {"dense": points})


def test_shifted_network() -> None:
    network = Network.measured(4, [(0, 1.0, 0.5), (10, 2.0, 0.5)])
    assert network.shifted(1).allreduce_s(0) == 1.5
    assert network.shifted(-1).allreduce_s(10) == 1.5
    assert network.shifted(0) == network


def test_a_network_refuses() -> None:
    with pytest.raises(ValueError, match="world_size"):
        Network(0, {"dense": Curve.linear(0, 0)})
    with pytest.raises(ValueError, match="dense"):
        Network(2, {"other": Curve.linear(0, 0)})


def test_frozen_slotted_hashable() -> None:
    network = Network.ring(4, 1, 1)
    for noun, name in ((network, "world_size"), (network.curves["dense"], "points"), (Contention(), "link_cap"),
                       (CurvePoint(0, 1), "seconds"), (RINGS[0], "alpha_s"),
                       (TwoLevel(1, *RINGS), "inside")):  # fmt: skip
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, 1)
        assert not hasattr(noun, "__dict__")
        assert hash(noun) == hash(noun)
    with pytest.raises(TypeError):
        network.curves["dense"] = Curve.linear(0, 0)  # type: ignore[index]
    with pytest.raises(TypeError):
        network.meta["a"] = 1  # type: ignore[index]
    assert hash(Network.ring(4, 1, 1)) == hash(network)
