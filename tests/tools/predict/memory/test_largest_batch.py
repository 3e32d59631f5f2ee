"""The largest batch that fits is found with few tries."""

from anabranch.tools.predict.memory.estimator import largest_batch


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    for fixed, each, limit in ((10, 3, 100), (0, 1, 7), (5, 2, 5), (99, 1, 50), (10, 1, 10_000)):
        looked: list[int] = []

        def nbytes(batch: int) -> int:
            looked.append(batch)  # noqa: B023
            return fixed + each * batch + (batch % 3 == 0)  # noqa: B023  # nearly a line

        found = largest_batch(nbytes, limit)
        tried = len(looked)
        naive = max((batch for batch in range(limit + 2) if nbytes(batch) <= limit), default=0)
        assert abs(found - naive) <= 1 and (found == 0 or nbytes(found) <= limit)
        assert tried <= 10


def test_a_peak_that_does_not_grow_at_first() -> None:
    for flat, limit in ((0, 1000), (600, 1000), (999, 1000), (2000, 1000)):
        found = largest_batch(lambda batch: max(flat, 10 + 3 * batch), limit)  # noqa: B023
        assert found == (0 if flat > limit else 330)


def test_a_batch_without_bound_ends_somewhere() -> None:
    assert largest_batch(lambda batch: 1, 10, max_batch=1000) == 1000
