"""Which cuts of a compiled model a plan needs."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from anabranch import Bucket, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.tuning.cut_search import MOST_PARTS, Parts, needed_parts, parts_of, step_in_parts_s
from anabranch.tuning.trial import predicted_s

LAYERS = 8
CUT_SHARE = 0.001  # of a step, that a cut costs
# A gradient of 256 KiB every millisecond.
TRACE = Trace(tuple(TensorSpec(f"t{i}", 1 << 16, 4, 1e-3 * (i + 1), "float32") for i in range(LAYERS)), 5e-3)
EACH = Plan(tuple(Bucket((tensor.name,)) for tensor in TRACE.tensors))


def network(message_s: float) -> Network:
    """Each of these gradients takes so long."""
    return Network.linear(2, 0.0, message_s / (1 << 18))


def needed(plan: Plan | None, network: Network) -> Parts:
    """The parts that are worth their cuts."""
    return needed_parts(TRACE, plan, network, CUT_SHARE * predicted_s(TRACE, plan, network))


def finish_s(parts: list[list[str]], plan: Plan, network: Network) -> float:
    """The simulated step if gradients of a part are ready when the last of them is."""
    ready = {tensor.name: tensor.ready_s for tensor in TRACE.tensors}
    late = {name: max(ready[other] for other in part) for part in parts for name in part}
    tensors = [TensorSpec(t.name, t.numel, 4, late[t.name], "float32") for t in TRACE.tensors]
    return predicted_s(Trace(tuple(tensors), TRACE.forward_s), plan, network)


@pytest.mark.parametrize("message_s", [1e-5, 0.5e-3, 0.99e-3, 1.5e-3, 4e-3, 50e-3])
def test_fewer_parts_end_as_early(message_s: float) -> None:
    links = network(message_s)
    parts = [list(part) for part in needed(EACH, links)]
    assert [name for part in parts for name in part] == [tensor.name for tensor in TRACE.tensors]
    allowed_s = (1 + LAYERS * CUT_SHARE) * predicted_s(TRACE, EACH, links)
    assert finish_s(parts, EACH, links) <= allowed_s


def test_where_messages_queue_up_only_the_first_must_leave_early() -> None:
    parts = needed(EACH, network(50e-3))
    assert list(parts[0]) == ["t0"]
    assert len(parts) == 2


def test_where_messages_take_no_time_nothing_is_cut() -> None:
    assert len(needed(EACH, network(1e-9))) == 1


def test_where_messages_just_fit_each_must_leave() -> None:
    assert len(needed(EACH, network(0.99e-3))) >= LAYERS // 2


def test_ddps_own_buckets_have_their_parts() -> None:
    assert [name for part in needed(None, network(1e-3)) for name in part] == [tensor.name for tensor in TRACE.tensors]
    assert len(needed(None, network(1e-3))) <= 2  # of 1 MiB, and the rest


def test_without_a_network_each_bucket_is_a_part() -> None:
    assert [tuple(part) for part in needed_parts(TRACE, EACH, None, 0.0)] == [tuple(part) for part in parts_of(EACH)]


@pytest.mark.slow
def test_a_thousand_buckets_are_not_compared_pair_by_pair() -> None:
    tensors = tuple(TensorSpec(f"t{i}", 1 << 12, 4, 1e-5 * (i + 1), "float32") for i in range(1000))
    trace = Trace(tensors, 5e-3)
    parts = needed_parts(trace, Plan(tuple(Bucket((tensor.name,)) for tensor in tensors)), network(1e-3), 1e-5)
    assert [name for part in parts for name in part] == [tensor.name for tensor in tensors]
    assert 1 < len(parts) <= MOST_PARTS + 1


TENSORS = 12
POSSIBLE = (1, 3, 4, 6, 7, 9, 11, TENSORS)  # a graph can be cut after so many gradients; there all end


def parts_at(cuts: Sequence[int]) -> Parts:
    """A graph's gradients in the parts that these cuts make."""
    return [[f"t{i}" for i in range(begin, end)] for begin, end in pairwise([0, *cuts, TENSORS])]


def cuts_for(parts: Parts | None) -> int:
    """How many cuts this graph needs, so that each part's gradients leave as soon as they can; None: all it may."""
    if parts is None:
        return len(POSSIBLE) - 1
    found, done = set(), 0
    for part in parts[:-1]:
        done += len(part)
        found.add(POSSIBLE[bisect_left(POSSIBLE, done)])
    return len(found - {TENSORS})


@pytest.mark.parametrize("message_s", [0.3e-3, 1e-3, 1.4e-3, 4e-3])
@pytest.mark.parametrize("cut_s", [0.0, 0.1e-3, 0.5e-3])
@pytest.mark.parametrize("lanes", [1, 2])
def test_parts_are_nearly_as_fast_as_the_best_of_all(message_s: float, cut_s: float, lanes: int) -> None:
    ends_s = [1e-3 * POSSIBLE[bisect_left(POSSIBLE, i + 1)] for i in range(TENSORS)]
    trace = Trace(tuple(TensorSpec(f"t{i}", 1 << 16, 4, s, "float32") for i, s in enumerate(ends_s)), 6e-3)
    links = Network.linear(2, 1e-4, message_s / (1 << 18), eta=0.5)
    plan = planners.lanes(trace, links, lanes=lanes)
    most = cuts_for([[f"t{i}"] for i in range(TENSORS)])
    assert most == len(POSSIBLE) - 1

    def step_s(parts: Parts) -> float:
        return step_in_parts_s(trace, plan, links, parts, cut_s * (most - cuts_for(parts)))

    subsets = [cuts for count in range(most + 1) for cuts in combinations(POSSIBLE[:-1], count)]
    fastest_s = min(step_s(parts_at(cuts)) for cuts in subsets)
    assert step_s(needed_parts(trace, plan, links, cut_s, cuts_for)) <= 1.01 * fastest_s


def test_cuts_that_nobody_needs_do_not_pay_for_one_that_hides_much() -> None:
    """Messages queue up behind the first: six cuts are better left out, which must not allow to lose the seventh."""
    parts = needed_parts(TRACE, EACH, network(4e-3), 1e-3)
    assert len(parts) == 2 and list(parts[0]) == ["t0"]


def test_where_a_step_ends_with_its_messages_a_cut_costs_it_less_than_computing() -> None:
    links, parts = network(10e-3), [["t0"], [f"t{i}" for i in range(1, LAYERS)]]
    before_s = step_in_parts_s(TRACE, EACH, links, parts)
    share = (TRACE.forward_s + TRACE.tensors[0].ready_s) / (TRACE.forward_s + TRACE.backward_s)
    assert before_s - step_in_parts_s(TRACE, EACH, links, parts, 1e-3) == pytest.approx(share * 1e-3)
