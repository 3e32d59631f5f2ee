"""Which cuts of a compiled model a plan needs."""

import pytest

from anabranch import Bucket, Network, Plan, TensorSpec, Trace
from anabranch.tuning.candidates import predicted_s
from anabranch.tuning.graph_cuts import MOST_PARTS, Parts, needed_parts, parts_of

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


def test_a_thousand_buckets_are_not_compared_pair_by_pair() -> None:
    tensors = tuple(TensorSpec(f"t{i}", 1 << 12, 4, 1e-5 * (i + 1), "float32") for i in range(1000))
    trace = Trace(tensors, 5e-3)
    parts = needed_parts(trace, Plan(tuple(Bucket((tensor.name,)) for tensor in tensors)), network(1e-3), 1e-5)
    assert [name for part in parts for name in part] == [tensor.name for tensor in tensors]
    assert 1 < len(parts) <= MOST_PARTS + 1
