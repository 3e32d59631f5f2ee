"""The twins themselves, by hand."""

from itertools import pairwise

import pytest

from anabranch import Contention, Curve, CurvePoint, TensorSpec
from oracles import (
    Best,
    Task,
    all_cuts,
    allowed,
    brute_force,
    fifo,
    finish_of,
    fluid,
    lane_choices,
    naive_dp,
    published_groups,
    slowdown,
    work_done,
)
from shorthand import trace_of

TRACE = trace_of([TensorSpec("3", 4, 1, 1.0), TensorSpec("2", 1, 1, 4.0), TensorSpec("1", 1, 1, 8.0)], 0.0)


def test_fifo_waits_for_the_gradient_and_for_the_channel() -> None:
    assert fifo([1.0, 2.0, 9.0], [3.0, 1.0, 1.0]) == [4.0, 5.0, 10.0]


def test_all_cuts_are_all_partitions() -> None:
    assert len(set(all_cuts(6))) == 2**5
    assert all(low < high for cuts in all_cuts(6) for low, high in pairwise((0, *cuts, 6)))


def test_brute_force_on_the_counter_example() -> None:
    curve = Curve.linear(4, 1)
    by_hand = {(): 18.0, (1,): 15.0, (2,): 18.0, (1, 2): 19.0}  # e.g. (1,): 1+8 = 9, then max(9, 8) + 6
    assert {cuts: finish_of(TRACE, curve, cuts) for cuts in all_cuts(3)} == by_hand
    assert brute_force(TRACE, curve) == naive_dp(TRACE, curve) == Best(15.0, 2)


def test_brute_force_prefers_fewer_buckets_and_obeys_the_cap() -> None:
    free = Curve.linear(0, 0)
    assert brute_force(TRACE, free) == naive_dp(TRACE, free) == Best(8.0, 1)
    assert brute_force(TRACE, free, 2) == naive_dp(TRACE, free, 2) == Best(8.0, 2)
    assert not allowed(TRACE, (2,), 4)
    assert allowed(TRACE, (1,), 2)  # the tensor of four bytes travels by itself


def test_brute_force_takes_any_curve() -> None:
    jump = Curve((CurvePoint(0, 1.0), CurvePoint(1, 1.0), CurvePoint(2, 50.0)), 0.0)
    assert brute_force(TRACE, jump) == naive_dp(TRACE, jump) == Best(53.0, 3)  # 1+50, then 1, then 1


def test_published_rule_by_hand() -> None:
    assert published_groups([4, 3, 1], [1, 1, 4], 4, 1) == [[3, 2], [1]]
    assert published_groups([4, 3, 1], [1, 1, 4], 0, 1) == [[3], [2], [1]]  # no start-up: nothing to wait for
    assert published_groups([1, 1, 1], [1, 1, 1], 4, 1) == [[3, 2, 1]]
    assert published_groups([1, 1, 1], [1, 1, 1], 4, 1, rule="asc") == [[3], [2, 1]]  # 1 is there while 2 queues


def test_slowdown_by_hand() -> None:
    assert [slowdown(Contention.law(0.5), k) for k in (1, 2, 3)] == [1, 1.5, 2]
    assert [slowdown(Contention((1.0, 1.25, 2.0)), k) for k in (3, 4, 5)] == [2, 2.75, 3.5]
    assert [slowdown(Contention.law(0, link_cap=1.5), k) for k in (1, 2, 3)] == [1, pytest.approx(4 / 3), 2]


def test_fluid_by_hand() -> None:
    # Both start up 1 s; A (4 s of transfer) and B (1 s) share at half speed until B is over at 3; A is over at 6.
    tasks = [Task(0.0, 0, 1.0, 4.0), Task(0.0, 1, 1.0, 1.0)]
    law = Contention.law(1.0)
    assert fluid(tasks, law) == [(0.0, 6.0), (0.0, 3.0)]
    assert work_done(tasks, [(0.0, 6.0), (0.0, 3.0)], law) == [4.0, 1.0]
    assert work_done(tasks, [(0.0, 5.0), (0.0, 2.0)], law) != [4.0, 1.0]


def test_fluid_launches_in_order() -> None:
    tasks = [Task(5.0, 0, 0.0, 1.0), Task(0.0, 1, 0.0, 1.0)]  # the second is ready first, and waits
    assert fluid(tasks, Contention.law(0.0)) == [(5.0, 6.0), (5.0, 6.0)]


def test_lane_choices_are_set_partitions() -> None:
    assert len(list(lane_choices(4, 4))) == 15  # Bell's number
    assert sorted(lane_choices(3, 2)) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
