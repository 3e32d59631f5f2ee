"""A scaling is whole: every place once, and names that tell networks and strategies apart."""

from dataclasses import replace

import pytest

from tools.report.scalings import scaling_of

STEPS = {"by_bytes": {4: 0.06, 16: 0.08}, "optimal": {4: 0.05, 16: 0.06}}


def test_points_by_strategy_and_size() -> None:
    scaling = scaling_of(STEPS, more=["other"])
    assert scaling.world_sizes == [4, 16]
    found = {
        name: {size: point.iteration_s for size, point in curve.items()} for name, curve in scaling.on("net").items()
    }
    assert found == STEPS


def test_what_is_missing_or_out_of_order_is_refused() -> None:
    scaling = scaling_of(STEPS)
    for points in (scaling.points[:-1], scaling.points[::-1], ()):
        with pytest.raises(ValueError, match="in this order"):
            replace(scaling, points=points)


def test_a_small_file_cannot_ask_for_many_places() -> None:
    scaling = scaling_of(STEPS)
    networks = tuple(replace(scaling.networks[0], name=f"{number}") for number in range(30_000))
    strategies = tuple(replace(scaling.strategies[0], name=f"{number}") for number in range(30_000))
    with pytest.raises(ValueError, match="4 points for 1800000000 places"):  # which would not fit in memory
        replace(scaling, networks=networks, strategies=strategies)


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ValueError, match="the network 'net' twice"):
        scaling_of(STEPS, more=["net"])
    scaling = scaling_of(STEPS)
    twice = (*scaling.strategies, scaling.strategies[0])
    with pytest.raises(ValueError, match="the strategy 'by_bytes' twice"):
        replace(scaling, strategies=twice)


def test_a_step_is_within_its_band() -> None:
    point = scaling_of(STEPS).points[-1]
    worst, best = point.efficiencies
    assert worst < point.efficiency < best
    assert best * point.iteration_low_s == pytest.approx(worst * point.iteration_high_s)
    with pytest.raises(ValueError, match="outside its band"):
        replace(point, iteration_low_s=2 * point.iteration_s)
