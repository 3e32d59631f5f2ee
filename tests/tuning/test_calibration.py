"""A network corrected by live steps: what was put in comes out, and nothing implausible does."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Bucket, Curve, Network, Plan, Span, TensorSpec, Timeline, Trace
from anabranch.exchange.groups import default_group
from anabranch.planning.simulator import finish_s
from anabranch.tuning.calibration import (
    END_NOTE,
    FACTORS,
    MAX_ETA,
    WAITING_NOTE,
    bucket_seconds,
    calibrate,
    with_calibrated_contention,
    with_calibrated_costs,
    with_calibrated_delays,
    with_calibrated_waiting,
    with_costs_bounded_by_end,
)
from anabranch.tuning.trial import (
    OF_RECORDED,
    StepTimes,
    Trial,
    as_recorded,
    computed_faster,
    predicted_s,
    share_of_recorded,
)
from ranks import on_ranks

KIB = 1 << 10


def case(sizes: list[int]) -> tuple[Trace, Plan]:
    tensors = tuple(TensorSpec(f"t{i}", size, 1, float(i)) for i, size in enumerate(sizes))
    return Trace(tensors, 0.0), Plan(tuple(Bucket((tensor.name,)) for tensor in tensors))


def test_seconds_count_from_when_the_lane_was_free() -> None:
    spans = [
        Span("compute", "backward", 0.0, 9.0),
        Span("lane 0", "a", 1.0, 4.0),
        Span("lane 0", "b", 2.0, 6.0),  # launched while a was still on its way
        Span("lane 0", "c", 8.0, 8.5),
    ]
    assert bucket_seconds([Timeline(tuple(spans))]) == [3.0, 2.0, 0.5]


@given(st.floats(0.9, 1.9), st.floats(0, 0.01))
def test_a_factor_and_an_extra_are_found_again(factor: float, extra_s: float) -> None:
    network = Network.linear(4, 1e-3, 1e-8)
    trace, plan = case([KIB << k for k in range(0, 14, 2)])
    took_s = [factor * network.allreduce_s(tensor.nbytes) + extra_s for tensor in trace.tensors]
    better = with_calibrated_costs(network, trace, plan, took_s)
    for tensor, seconds in zip(trace.tensors, took_s, strict=True):
        assert better.allreduce_s(tensor.nbytes) == pytest.approx(seconds, rel=1e-6)
    assert "refined" in better.meta and better.contention == network.contention


@pytest.mark.parametrize(("wild", "bound"), [(50.0, FACTORS[1]), (0.01, FACTORS[0])])
def test_implausible_costs_are_clipped(wild: float, bound: float) -> None:
    network = Network.linear(4, 1e-3, 1e-8)
    trace, plan = case([KIB << k for k in range(0, 14, 2)])
    took_s = [wild * network.allreduce_s(tensor.nbytes) for tensor in trace.tensors]
    better = with_calibrated_costs(network, trace, plan, took_s)
    assert better.curve("dense").tail_s_per_byte == pytest.approx(bound * 1e-8)


def test_equal_buckets_tell_only_what_a_message_costs_more() -> None:
    network = Network.linear(4, 1e-3, 1e-8)
    trace, plan = case([KIB] * 5)
    better = with_calibrated_costs(network, trace, plan, [network.allreduce_s(KIB) + 2e-3] * 5)
    assert better.curve("dense").tail_s_per_byte == pytest.approx(1e-8)
    assert better.allreduce_s(0) == pytest.approx(3e-3)


def test_a_few_large_messages_tell_what_bytes_cost_more() -> None:
    """Seen on a Llama at 25 Gbit/s: three buckets that took 13 % longer made every message 20 ms dearer."""
    network = Network.linear(4, 1e-4, 1e-9)
    trace, plan = case([100 << 20] * 3)
    took_s = [1.13 * network.allreduce_s(tensor.nbytes) for tensor in trace.tensors]
    better = with_calibrated_costs(network, trace, plan, took_s)
    assert better.curve("dense").tail_s_per_byte == pytest.approx(1.13e-9)
    assert better.allreduce_s(KIB) < 2e-4
    wild = with_calibrated_costs(network, trace, plan, [10 * seconds for seconds in took_s])
    assert wild.curve("dense").tail_s_per_byte == pytest.approx(FACTORS[1] * 1e-9)


def test_several_steps_give_the_median_of_each_message() -> None:
    timelines = [
        Timeline(
            (Span("compute", "backward", 0.0, 9.0), Span("lane 0", "a", 0.0, a), Span("lane 0", "b", 5.0, 5.0 + b))
        )
        for a, b in ((1.0, 3.0), (2.0, 1.0), (4.0, 2.0))
    ]
    assert bucket_seconds(timelines) == [2.0, 2.0]
    assert bucket_seconds([*timelines, Timeline((Span("compute", "backward", 0.0, 9.0),))]) == []


def test_compressed_kinds_that_were_not_tried_are_corrected_as_those_that_were() -> None:
    line = Curve.linear(1e-3, 1e-8)
    network = Network(4, dict.fromkeys(("dense", "int8", "int4", "oktopk:0.01", "all_gather"), line))
    trace, plan = case([KIB] * 3)
    rounded = Plan(tuple(replace(bucket, collective="int8") for bucket in plan.buckets))
    better = with_calibrated_costs(network, trace, rounded, [line.seconds(KIB) + 2e-3] * 3)
    for kind in ("int8", "int4", "oktopk:0.01"):
        assert better.seconds(kind, 0) == pytest.approx(3e-3)
    assert better.curve("dense") == line == better.curve("all_gather")
    # what was tried once keeps its own correction
    coarser = Plan(tuple(replace(bucket, collective="int4") for bucket in plan.buckets))
    later = with_calibrated_costs(better, trace, coarser, [better.seconds("int4", KIB) + 1e-3] * 3)
    assert later.seconds("int8", 0) == pytest.approx(3e-3) and later.seconds("oktopk:0.01", 0) == pytest.approx(4e-3)


def test_what_dense_messages_cost_on_two_levels_says_nothing_about_compressed_ones() -> None:
    line = Curve.linear(1e-3, 1e-8)
    network = Network(4, dict.fromkeys(("dense", "dense@nodes", "int8", "int8@nodes"), line))
    trace, plan = case([KIB] * 3)
    exact = Plan(tuple(replace(bucket, collective="dense@nodes") for bucket in plan.buckets))
    better = with_calibrated_costs(network, trace, exact, [line.seconds(KIB) + 2e-3] * 3)
    assert better.seconds("dense@nodes", 0) == pytest.approx(3e-3)
    assert better.curve("dense") == better.curve("int8") == better.curve("int8@nodes") == line


def test_the_delay_of_a_message_is_what_computing_took_longer() -> None:
    line = Curve.linear(1e-3, 1e-8)
    network = Network(4, dict.fromkeys(("dense", "int8", "int4", "all_gather"), line))
    trace, plan = case([KIB] * 5)  # 4 s of backward
    rounded = Plan((replace(plan.buckets[0], collective="int8"), *plan.buckets[1:3],
                    replace(plan.buckets[3], collective="int8"), plan.buckets[4]))  # fmt: skip
    better = with_calibrated_delays(network, trace, rounded, 4.4, inf)
    assert better.delays == {"int8": pytest.approx(0.2), "int4": pytest.approx(0.2)}
    assert "refined_delay_int8" in better.meta and "refined_delay_int4" not in better.meta
    # the plan is predicted as it was measured; DDP's own buckets, under which the trace was recorded, as before
    assert finish_s(trace, rounded, better) == pytest.approx(4.4, abs=0.1)
    assert predicted_s(trace, None, better) == predicted_s(trace, None, network)
    dense = with_calibrated_delays(better, trace, plan, 5.0, inf)
    assert dense.delay_s("dense") == pytest.approx(0.2) and dense.delay_s("int8") == better.delay_s("int8")
    # what dense buckets delay is known then, and no fault of the compressed ones beside them
    assert with_calibrated_delays(dense, trace, rounded, 4.8, inf).delay_s("int8") == pytest.approx(0.1)


def test_a_kind_that_was_tried_keeps_its_own_delay_and_others_get_the_last() -> None:
    kinds = ("dense", "int8", "int4", "oktopk:0.01")
    network = Network(4, dict.fromkeys(kinds, Curve.linear(1e-3, 1e-8)))
    trace, plan = case([KIB] * 5)
    for kind, computing_s in (("int8", 4.0), ("int4", 9.0)):
        used = Plan(tuple(replace(bucket, collective=kind) for bucket in plan.buckets))
        network = with_calibrated_costs(network, trace, used, [network.seconds(kind, KIB)] * 5)
        network = with_calibrated_delays(network, trace, used, computing_s, inf)
    assert [network.delay_s(kind) for kind in kinds] == [0.0, 0.0, 1.0, 1.0]


def test_computing_that_takes_as_long_as_recorded_shows_no_delay() -> None:
    trace, plan = case([KIB] * 5)
    network = Network.linear(4, 1e-3, 1e-8)
    for took_s in (4.05, 3.0):
        late = with_calibrated_delays(network, trace, plan, 5.0, inf)
        found = with_calibrated_delays(late, trace, plan, took_s, inf)
        assert late.meta != network.meta and late.delay_s("dense") > 0
        assert found.delays == {"dense": 0.0} and found.meta == network.meta


def test_computing_that_waited_for_messages_is_not_counted_twice() -> None:
    """Seen on BERT-base in 51 buckets of bf16: computing took 316 ms for 80, as long as the messages, 373 predicted."""
    network = Network(4, dict.fromkeys(("dense", "bf16"), Curve.linear(0.0, 1e-3)))
    trace, plan = case([KIB] * 5)  # 1.024 s a message, one ready each second
    used = Plan(tuple(replace(bucket, collective="bf16") for bucket in plan.buckets))
    alone_s = finish_s(trace, used, network)
    blocked = with_calibrated_delays(network, trace, used, computing_s=alone_s, ended_s=alone_s)
    assert finish_s(trace, used, blocked) == pytest.approx(alone_s, rel=1e-3)
    late = with_calibrated_delays(network, trace, used, computing_s=alone_s, ended_s=alone_s + 0.5)
    assert alone_s < finish_s(trace, used, late) <= alone_s + 0.5


@pytest.mark.parametrize("missing_s", [0.5, 3.0])
def test_what_many_messages_wait_for_each_other_is_a_part_of_their_price(missing_s: float) -> None:
    network = Network(4, dict.fromkeys(("dense", "int8", "int4"), Curve.linear(1e-3, 1e-3)))
    trace, plan = case([KIB] * 20)
    used = Plan(tuple(replace(bucket, collective="int8") for bucket in plan.buckets))
    ended_s = finish_s(trace, used, network) + missing_s
    found = with_calibrated_waiting(network, trace, used, ended_s)
    assert finish_s(trace, used, found) == pytest.approx(ended_s, rel=1e-6)
    assert found.seconds("int8", KIB) > network.seconds("int8", KIB)
    assert found.seconds("int4", KIB) == pytest.approx(found.seconds("int8", KIB))  # nobody has tried it
    assert found.curve("dense") == network.curve("dense")
    assert "more per message" in str(found.meta[WAITING_NOTE])
    # of fewer messages less is missing
    one = Plan((Bucket(tuple(name for bucket in plan.buckets for name in bucket.names), collective="int8"),))
    assert finish_s(trace, one, found) - finish_s(trace, one, network) < missing_s / 2


def test_a_step_that_ended_as_predicted_or_earlier_shows_no_waiting() -> None:
    network = Network.linear(4, 1e-3, 1e-8)
    trace, plan = case([KIB] * 5)
    ended_s = finish_s(trace, plan, network)
    for took_s in (0.5 * ended_s, ended_s, 1.01 * ended_s):
        assert with_calibrated_waiting(network, trace, plan, took_s) == network


@pytest.mark.parametrize("share", [0.9, 0.82])
def test_a_step_that_ended_earlier_makes_its_messages_cheaper(share: float) -> None:
    network = Network(4, dict.fromkeys(("dense", "int8"), Curve.linear(1e-3, 5e-3)))
    trace, plan = case([KIB] * 20)  # the wire is the limit
    ended_s = finish_s(trace, plan, network) * share
    found = with_costs_bounded_by_end(network, trace, plan, ended_s)
    assert finish_s(trace, plan, found) == pytest.approx(ended_s, rel=1e-6)
    assert found.curve("int8") == network.curve("int8")  # which the plan does not use
    assert "from the end of live steps" in str(found.meta[END_NOTE])
    assert END_NOTE not in with_costs_bounded_by_end(found, trace, plan, ended_s).meta  # nothing is left to explain


def calibrated_by_steps_that_end_early(rank: int) -> tuple[bool, float]:
    """Calibrates by messages that took what they cost and by steps that ended earlier, rank 0's the latest.

    Returns whether a note says so, and what is then predicted, as a share of the median step of rank 0.
    """
    network = Network.linear(2, 1e-3, 5e-3)
    trace, plan = case([KIB] * 20)
    cost_s, predicted_s = network.allreduce_s(KIB), finish_s(trace, plan, network)
    starts_s = [trace.backward_s + index * cost_s for index in range(20)]
    spans = [Span("compute", "backward", 0.0, trace.backward_s)]
    spans += [Span("lane 0", "a message", start_s, start_s + cost_s) for start_s in starts_s]
    ends_s = [(share - 0.05 * rank) * predicted_s for share in (1.0, 0.88, 0.9)]  # the first step was timed
    computing_s = trace.forward_s + trace.backward_s
    steps = tuple(StepTimes(trace.forward_s + s, trace.forward_s + s - computing_s, s) for s in ends_s)
    found = calibrate(network, trace, Trial("optimal", plan, steps, (Timeline(tuple(spans)),)), default_group())
    return END_NOTE in found.meta, finish_s(trace, plan, found) / (0.9 * predicted_s)


def test_all_ranks_learn_from_the_end_of_a_step_of_the_slowest() -> None:
    (noted, predicted), other = on_ranks(calibrated_by_steps_that_end_early, 2)
    assert noted and predicted == pytest.approx(1.0, rel=1e-6)
    assert other == (noted, predicted)


def test_kinds_that_were_not_tried_cost_no_more_with_each_calibration() -> None:
    """They get the costs of timed steps, and so must get what the end of the others says about these."""
    network = Network(4, dict.fromkeys(("dense", "int8", "int4"), Curve.linear(1e-3, 5e-3)))
    trace, plan = case([KIB] * 20)
    rounded = Plan(tuple(replace(bucket, collective="int8") for bucket in plan.buckets))
    took_s = [network.seconds("int8", KIB)] * len(rounded)
    ended_s = 0.85 * finish_s(trace, rounded, network)
    found = network
    for _ in range(4):
        found = with_costs_bounded_by_end(with_calibrated_costs(found, trace, rounded, took_s), trace, rounded, ended_s)
        assert finish_s(trace, rounded, found) == pytest.approx(ended_s, rel=1e-6)
        assert found.seconds("int4", KIB) == pytest.approx(found.seconds("int8", KIB), rel=1e-6)
    assert found.curve("dense") == network.curve("dense")
    assert str(found.meta[END_NOTE]).startswith("int8 then × 0.85, ")


def test_delays_of_an_earlier_trial_make_no_message_cheaper() -> None:
    """A step may end earlier because messages no longer delay it, which is seen by its computing, after its costs."""
    trace, plan = case([KIB] * 9 + [40 * KIB])  # the last message is exposed
    rounded = Plan(tuple(replace(bucket, collective="int8") for bucket in plan.buckets))
    network = Network(4, dict.fromkeys(("dense", "int8"), Curve.linear(1e-3, 1e-4)))
    ended_s = finish_s(trace, rounded, network)
    delayed = replace(network, delays={"int8": 0.05})
    assert finish_s(trace, rounded, delayed) > 1.02 * ended_s
    assert with_costs_bounded_by_end(delayed, trace, rounded, ended_s) == delayed


def test_what_no_plausible_price_explains_changes_no_price() -> None:
    network = Network.linear(4, 1e-3, 5e-3)
    trace, plan = case([KIB] * 20)
    ended_s = finish_s(trace, plan, network)
    for took_s in (0.5 * ended_s, 0.99 * ended_s, ended_s, 2 * ended_s):
        assert with_costs_bounded_by_end(network, trace, plan, took_s) == network
    free = Network.linear(4, 1e-6, 1e-12)  # computing is the limit, and was faster than recorded
    assert with_costs_bounded_by_end(free, trace, plan, 0.9 * trace.backward_s) == free


@pytest.mark.parametrize("kind", ["int8", "dense"])
def test_computing_beside_other_messages_may_be_faster_than_recorded(kind: str) -> None:
    network = Network(4, dict.fromkeys(("dense", "int8"), Curve.linear(1e-3, 1e-8)))
    trace, plan = case([KIB] * 5)  # 4 s of backward
    rounded = Plan(tuple(replace(bucket, collective=kind) for bucket in plan.buckets))
    faster = computed_faster(trace, rounded, 3.6, 4.0)
    assert faster.backward_s == pytest.approx(3.6) and share_of_recorded(faster) == pytest.approx(0.9)
    again = computed_faster(faster, rounded, 3.24, 4.0)
    assert share_of_recorded(again) == pytest.approx(0.81)
    assert as_recorded(again).backward_s == pytest.approx(4.0)
    for share in (1e-300, 0.0, -1.0, 2.0, "half"):  # as a file may say
        assert as_recorded(replace(trace, meta={OF_RECORDED: share})).tensors == trace.tensors
    # DDP's own buckets are predicted as before
    assert predicted_s(again, None, network) == pytest.approx(predicted_s(trace, None, network))
    assert predicted_s(again, rounded, network) < predicted_s(trace, rounded, network)


@pytest.mark.parametrize(("kind", "computing_s"), [("dense", 3.95), ("int8", 3.95), ("int8", 5.0), ("int8", 0.0)])
def test_computing_stays_as_recorded_otherwise(kind: str, computing_s: float) -> None:
    trace, plan = case([KIB] * 5)
    used = Plan(tuple(replace(bucket, collective=kind) for bucket in plan.buckets))
    assert computed_faster(trace, used, computing_s, 4.0) is trace
    assert computed_faster(trace, None, computing_s, 4.0) is trace
    # ranks that differ: the slowest computed as long before, and the trace has the latest of them at each gradient
    assert computed_faster(trace, used, 3.0, 3.05) is trace


def test_where_messages_cost_less_than_measured_the_bytes_do() -> None:
    network = Network.linear(4, 1e-3, 1e-8)
    trace, plan = case([KIB << k for k in range(0, 14, 2)])
    better = with_calibrated_costs(network, trace, plan, [0.9 * network.allreduce_s(t.nbytes) for t in trace.tensors])
    assert sum(better.allreduce_s(t.nbytes) for t in trace.tensors) == pytest.approx(
        0.9 * sum(network.allreduce_s(t.nbytes) for t in trace.tensors)
    )


@given(st.floats(0.0, MAX_ETA))
def test_the_contention_of_a_step_is_found_again(eta: float) -> None:
    trace, plan = case([1 << 20] * 6)
    plan = Plan(tuple(Bucket(bucket.names, lane=i % 2) for i, bucket in enumerate(plan.buckets)))
    real = Network.linear(4, 1e-3, 1e-6, eta=eta)  # a second a message, as often as one is ready: lanes meet
    found = with_calibrated_contention(Network.linear(4, 1e-3, 1e-6, eta=0.3), trace, plan, finish_s(trace, plan, real))
    assert finish_s(trace, plan, found) == pytest.approx(finish_s(trace, plan, real))
    if found.contention.slowdown(2) > 1:
        assert "refined_contention" in found.meta


def test_messages_that_never_meet_say_nothing_of_contention() -> None:
    trace, plan = case([KIB] * 4)
    plan = Plan(tuple(Bucket(bucket.names, lane=i % 2) for i, bucket in enumerate(plan.buckets)))
    network = Network.linear(4, 1e-3, 1e-8, eta=0.3)
    assert with_calibrated_contention(network, trace, plan, 100.0) is network


def test_contention_beyond_what_is_plausible_is_not_believed() -> None:
    trace, plan = case([1 << 20] * 6)
    plan = Plan(tuple(Bucket(bucket.names, lane=i % 2) for i, bucket in enumerate(plan.buckets)))
    network = Network.linear(4, 1e-3, 1e-6, eta=0.3)
    assert with_calibrated_contention(network, trace, plan, 1e6).contention.slowdown(2) == pytest.approx(1 + MAX_ETA)
