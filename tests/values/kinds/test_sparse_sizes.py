"""Sizes of messages and regions."""

import pytest

from anabranch.values.kinds.formats import Sizes, widest_numel
from anabranch.values.kinds.names import Wire
from anabranch.values.kinds.options import OkTopk

PRECISIONS: list[Wire] = ["fp32", "bf16", "int8"]


def test_positions_that_int32_cannot_hold_are_refused() -> None:
    assert widest_numel(2**33, 64) < 2**31
    with pytest.raises(ValueError, match="smaller buckets"):
        widest_numel(2**33, 2)


def test_messages_are_whole_words() -> None:
    """Kernels read and write them by words."""
    for numel in range(90_000, 90_100, 7):
        for precision in PRECISIONS:
            for ranks, density in ((1, 0.01), (2, 0.013), (7, 0.02), (3, 1.0)):
                assert Sizes.of(numel, ranks, density, OkTopk(wire=precision)).message_nbytes % 4 == 0


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 64), ("bf16", 32), ("int8", 24)])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("numel", [1_000_000, 110_000_000])
def test_bits_an_entry(numel: int, ranks: int, density: float, precision: Wire, bits: int) -> None:
    """Tables, whose size follows the widest region, take little: 1 bit an entry from densities of 1 % on."""
    sizes = Sizes.of(numel, ranks, density, OkTopk(wire=precision))
    found = 8 * (sizes.message_nbytes - 8) / sizes.capacity
    assert bits <= found <= bits + (0 if precision == "fp32" else 1 if density >= 0.01 else 3)


def test_a_small_bucket_has_no_table_of_chunks() -> None:
    assert Sizes.of(65_536, 4, 0.01, OkTopk(wire="bf16")).encoding.table_nbytes == 0
    assert Sizes.of(65_536, 4, 0.01, OkTopk(wire="int8")).encoding.table_nbytes == 2 * 8  # scales of 8,192 elements
