"""Sizes of messages and regions."""

import pytest

from anabranch.sparse.options import OkTopk
from anabranch.sparse.sizes import Sizes, widest_numel


def test_positions_that_int32_cannot_hold_are_refused() -> None:
    assert widest_numel(2**33, 64) < 2**31
    with pytest.raises(ValueError, match="smaller buckets"):
        widest_numel(2**33, 2)


def test_messages_are_whole_words() -> None:
    """Heads are counted in by atomic operations, which need them on a word's boundary."""
    for numel in range(90_000, 90_100, 7):
        for precision in ("fp32", "bf16"):
            options = OkTopk(wire="bf16" if precision == "bf16" else "fp32")
            for ranks, density in ((1, 0.01), (2, 0.013), (7, 0.02), (3, 1.0)):
                assert Sizes.of(numel, ranks, density, options).message_nbytes % 4 == 0
