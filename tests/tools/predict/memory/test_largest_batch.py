"""The largest batch that fits is found with few tries."""

import pytest

from anabranch.tools.predict.memory.largest_batch import largest_batch


@pytest.mark.parametrize(("fixed", "each", "limit"), [(10, 3, 100), (0, 1, 7), (5, 2, 5), (99, 1, 50), (10, 1, 10_000)])
def test_the_largest_batch_fits_and_the_next_does_not(fixed: int, each: int, limit: int) -> None:
    looked: list[int] = []

    def nbytes(batch: int) -> int:
        looked.append(batch)
        return fixed + each * batch + (batch % 3 == 0)  # nearly a line

    found = largest_batch(nbytes, limit)
    naive = max((batch for batch in range(limit + 2) if fixed + each * batch + (batch % 3 == 0) <= limit), default=0)
    assert abs(found - naive) <= 1 and (found == 0 or nbytes(found) <= limit)
    assert len(looked) <= 10


@pytest.mark.parametrize(("flat", "limit"), [(0, 1000), (600, 1000), (999, 1000), (2000, 1000)])
def test_where_looks_are_dear_nearly_the_largest_will_do(flat: int, limit: int) -> None:
    looked: list[int] = []

    def nbytes(batch: int) -> int:
        """Does not grow at first; too much is not known any better."""
        looked.append(batch)
        found = max(flat, 10 + 3 * batch)
        return found if found <= limit else 2 * limit

    found = largest_batch(nbytes, limit, enough_nbytes=0.95 * limit, growth=4)
    looks = list(looked)
    assert found == 0 if flat > limit else 0.95 * limit <= nbytes(found) <= limit
    for at, batch in enumerate(looks):
        assert batch <= max([8, *(4 * before for before in looks[:at] if nbytes(before) <= limit)])
    assert len(looks) == len(set(looks)) <= 12


def test_a_batch_without_bound_ends_somewhere() -> None:
    assert largest_batch(lambda batch: 1, 10, max_batch=1000) == 1000
