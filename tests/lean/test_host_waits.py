"""What backward does not hide of residuals in host memory, beside a version that follows the words of the docstring."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.lean.activations.cost_model import HostLink
from anabranch.lean.host_waits import HostBucket, predicted_wait_s

FAST = HostLink(1e30, 1e30)
buckets_of = st.lists(st.builds(HostBucket, st.integers(1, 1000), st.floats(0.0, 10.0)), max_size=7)
links = st.builds(HostLink, st.floats(10.0, 1e4), st.floats(10.0, 1e4))


def naive_wait_s(buckets: Sequence[HostBucket], link: HostLink, forward_s: float) -> float:
    """Every instant by its definition."""

    @cache
    def complete(i: int) -> float:
        return buckets[i].computed_s + (launched(i - 1) if i else 0.0)

    @cache
    def launched(i: int) -> float:
        begin = launched(i - 1) if i else complete(i)  # of its fetch
        arrived = max(begin, stored(i - 2)) + buckets[i].nbytes / link.back_nbytes_per_s
        return max(complete(i), arrived)

    @cache
    def stored(i: int) -> float:
        return max(launched(i), stored(i - 1)) + buckets[i].nbytes / link.out_nbytes_per_s if i >= 0 else 0.0

    if not buckets:
        return 0.0
    last = len(buckets) - 1
    in_backward = sum(launched(i) - complete(i) for i in range(len(buckets)))
    return in_backward + max(0.0, stored(last) - launched(last) - forward_s - buckets[0].computed_s)


@given(buckets_of, links, st.floats(0.0, 10.0))
def test_it_is_what_the_definitions_say(buckets: list[HostBucket], link: HostLink, forward_s: float) -> None:
    found_s = predicted_wait_s(buckets, link, forward_s)
    assert found_s == pytest.approx(naive_wait_s(buckets, link, forward_s))
    fetched_s = sum(bucket.nbytes for bucket in buckets) / link.back_nbytes_per_s
    assert found_s >= fetched_s - sum(bucket.computed_s for bucket in buckets[1:]) - 1e-9
    assert predicted_wait_s(buckets, FAST, forward_s) == pytest.approx(0.0)


def test_a_slower_link_is_waited_for_longer() -> None:
    buckets = [HostBucket(100, 1.0) for _ in range(4)]
    alone, shared = (predicted_wait_s(buckets, HostLink(rate, rate), 10.0) for rate in (1000.0, 25.0))
    assert alone == pytest.approx(0.1)  # the first bucket's fetch, which begins when the bucket is complete
    assert shared > 4 * 4.0 - 3 * 1.0 - 1e-9


def test_a_large_bucket_right_behind_another_is_not_hidden() -> None:
    """As the tied embedding of a language model: its gradient comes last, with nothing to compute before it."""
    layers = [HostBucket(10, 1.0) for _ in range(10)]
    link = HostLink(100.0, 100.0)
    assert predicted_wait_s([*layers, HostBucket(500, 0.0)], link, 100.0) == pytest.approx(0.1 + 5.0)
    assert predicted_wait_s([HostBucket(500, 10.0), *layers], link, 100.0) > 5.0  # and a large one that is first


def test_what_is_stored_in_the_next_forward_is_hidden_by_it() -> None:
    one = [HostBucket(100, 1.0)]
    link = HostLink(10.0, 1e9)
    assert predicted_wait_s(one, link, 20.0) == pytest.approx(0.0, abs=1e-6)
    assert predicted_wait_s(one, link, 4.0) == pytest.approx(10.0 - 4.0 - 1.0, abs=1e-6)
    assert predicted_wait_s([], link, 0.0) == 0.0
