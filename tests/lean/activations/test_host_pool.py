"""Host buffers are used again, fit closely, stay within the limit, and do not pile up."""

from anabranch.lean.activations.host_pool import MAX_HELD, HostPool


def test_a_returned_buffer_is_used_again_if_it_fits_closely() -> None:
    pool = HostPool(pinned=False)
    buffer = pool.take(1000)
    assert buffer is not None
    assert (pool.nbytes, pool.free_nbytes, pool.allocations) == (1000, 0, 1)
    pool.give(buffer)
    assert pool.free_nbytes == 1000
    assert pool.take(900) is buffer
    pool.give(buffer)
    assert pool.take(500) is not buffer  # too large for that


def test_the_limit_frees_unused_buffers_first_and_then_refuses() -> None:
    pool = HostPool(pinned=False, limit_nbytes=1000)
    first = pool.take(600)
    assert first is not None and pool.take(500) is None
    pool.give(first)
    assert pool.take(900) is not None
    assert pool.nbytes == 900


def test_sizes_that_are_no_longer_asked_for_do_not_stay() -> None:
    pool = HostPool(pinned=False)
    for nbytes in range(1000, 100_000, 1000):
        buffer = pool.take(nbytes)
        assert buffer is not None
        pool.give(buffer)
        assert pool.nbytes <= MAX_HELD * nbytes
    pool.clear()
    assert pool.nbytes == 0
