"""Planners that look at sizes only, against the frameworks they stand for."""

import random
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning.by_size import HOROVOD_CAP_NBYTES
from shorthand import trace_of
from strategies import traces

NETWORK = Network.linear(4, 1e-3, 1e-9)
MIB = 1 << 20


def groups(plan: Plan) -> list[list[str]]:
    return [list(bucket.names) for bucket in plan.buckets]


def of_sizes(*numels: int, itemsize: int = 1) -> Trace:
    return trace_of([TensorSpec(str(i), n, itemsize, float(i)) for i, n in enumerate(numels)], 0.0)


@given(traces(kinds=3))
def test_per_tensor_and_single_are_the_extremes(trace: Trace) -> None:
    assert groups(planners.per_tensor(trace, NETWORK)) == [[t.name] for t in trace.tensors]
    whole = planners.single(trace, NETWORK).check(trace)
    assert sorted(groups(whole)) == sorted([t.name for t in part] for part in trace.by_kind())


@given(
    traces(kinds=3, max_numel=8 * MIB),
    st.one_of(st.none(), st.integers(1, 40 * MIB)),
    st.one_of(st.none(), st.integers(1, 4 * MIB)),
    st.sampled_from(["reached", "before"]),
)
def test_by_bytes_is_a_partition_in_ready_order(trace: Trace, cap: int | None, first: int | None, closes: str) -> None:
    plan = planners.by_bytes(trace, NETWORK, cap, first, closes).check(trace)  # type: ignore[arg-type]
    place = {t.name: i for i, t in enumerate(trace.tensors)}
    for bucket in plan.buckets:
        assert [place[name] for name in bucket.names] == sorted(place[name] for name in bucket.names)
    ends = [place[bucket.names[-1]] for bucket in plan.buckets]
    assert ends == sorted(ends)
    size = {t.name: t.nbytes for t in trace.tensors}
    limit = max(cap or 25 * MIB, first or (1 * MIB if cap is None else cap))
    for bucket in plan.buckets:
        if closes == "before":
            assert len(bucket.names) == 1 or sum(size[name] for name in bucket.names) <= limit
        else:  # without its last tensor no bucket had reached its cap
            assert sum(size[name] for name in bucket.names[:-1]) < limit


@pytest.mark.parametrize("cap_nbytes", [None, 100, 1 * MIB, 5 * MIB])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_by_bytes_is_what_ddp_does(cap_nbytes: int | None, kinds: int) -> None:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    dtypes = [("torch.float32", 4), ("torch.bfloat16", 2), ("torch.float64", 8)][:kinds]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB] if cap_nbytes is None else [cap_nbytes]
    rng = random.Random(kinds)
    for _ in range(12):
        tensors, live = [], []
        for i in range(rng.randint(1, 60)):
            dtype, itemsize = rng.choice(dtypes)
            numel = rng.choice([0, 1, 25, 1000, 1 << 18, rng.randrange(1 << 20)])
            tensors.append(TensorSpec(str(i), numel, itemsize, float(i), dtype))
            live.append(torch.empty(numel, dtype=getattr(torch, dtype.removeprefix("torch."))))
        plan = planners.by_bytes(trace_of(tensors, 0.0), NETWORK, cap_nbytes)
        indices, _ = dist._compute_bucket_assignment_by_size(live, limits, [False] * len(live))
        ours = [[int(name) for name in bucket.names] for bucket in plan.buckets]
        if kinds == 1:
            assert ours == indices
        else:  # DDP orders buckets by their first tensor, we launch them in the order in which they are complete
            assert sorted(ours) == sorted(indices)


def test_the_defaults_are_ddps() -> None:
    dist = pytest.importorskip("torch.distributed")
    small = of_sizes(*islice(cycle([dist._DEFAULT_FIRST_BUCKET_BYTES // 2]), 60))
    plan = planners.by_bytes(small, NETWORK)
    assert [len(bucket.names) for bucket in plan.buckets] == [2, 50, 8]


def test_horovods_rule_by_hand() -> None:
    # A tensor that would overflow the buffer opens the next one; one that fills it exactly does not.
    trace = of_sizes(40, 50, 20, 80, 100, 120, 10)
    plan = planners.by_bytes(trace, NETWORK, cap_nbytes=100, closes="before")
    assert groups(plan) == [["0", "1"], ["2", "3"], ["4"], ["5"], ["6"]]
    assert groups(planners.by_bytes(trace, NETWORK, cap_nbytes=100)) == [["0", "1", "2"], ["3", "4"], ["5"], ["6"]]
    assert HOROVOD_CAP_NBYTES == 128 * MIB


def test_a_first_bucket_of_its_own() -> None:
    trace = of_sizes(10, 10, 10, 10, 10)
    assert groups(planners.by_bytes(trace, NETWORK, 30, 10)) == [["0"], ["1", "2", "3"], ["4"]]
    before = planners.by_bytes(trace, NETWORK, 30, 15, closes="before")
    assert groups(before) == [["0"], ["1", "2", "3"], ["4"]]


def test_refusals() -> None:
    trace = of_sizes(1)
    for cap, first in ((0, None), (None, 0), (-1, None)):
        with pytest.raises(ValueError, match="expected at least 1"):
            planners.by_bytes(trace, NETWORK, cap, first)
    with pytest.raises(ValueError, match="closes"):
        planners.by_bytes(trace, NETWORK, closes="after")  # type: ignore[arg-type]


def test_planners_by_name() -> None:
    trace = of_sizes(10, 10)
    assert planners.plan(trace, NETWORK) == planners.optimal(trace, NETWORK)
    assert planners.plan(trace, NETWORK, "by_bytes", cap_nbytes=5) == planners.per_tensor(trace, NETWORK)
    for name, planner in planners.PLANNERS.items():
        assert planners.plan(trace, NETWORK, name) == planner(trace, NETWORK)
    with pytest.raises(ValueError, match="'best': expected one of per_tensor"):
        planners.plan(trace, NETWORK, "best")


@given(traces(kinds=3, max_tensors=6, max_numel=1000), st.sampled_from(sorted(planners.PLANNERS)))
def test_every_planner_parts_the_trace_and_repeats_itself(trace: Trace, name: str) -> None:
    plan = planners.plan(trace, NETWORK, name)
    assert plan.check(trace) is plan
    assert sorted(n for bucket in plan.buckets for n in bucket.names) == sorted(t.name for t in trace.tensors)
    again = planners.plan(trace_of(list(trace.tensors), trace.forward_s), Network.linear(4, 1e-3, 1e-9), name)
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    kinds = {t.name: t.kind for t in trace.tensors}
    place = {t.name: i for part in trace.by_kind() for i, t in enumerate(part)}
    for bucket in plan.buckets:  # one dtype, and consecutive within it
        first = place[bucket.names[0]]
        assert [place[n] for n in bucket.names] == list(range(first, first + len(bucket.names)))
        assert len({kinds[n] for n in bucket.names}) == 1
    assert trace.tensors[-1].name in plan.buckets[-1].names
