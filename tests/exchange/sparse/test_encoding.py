"""Pairs are decoded as they were encoded, but for rounding; and rounding is as small as the format allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.sparse.encoding import frame_messages, join_bodies, message_head, split_bodies, unframe_messages
from anabranch.values.kinds.formats import FP32, Encoding, encoding_for
from anabranch.values.kinds.names import Wire

PRECISIONS: list[Wire] = ["fp32", "bf16", "int8"]
DENSITY = 0.01


def made_pairs(encoding: Encoding, widest: int, lengths: list[int], seed: int = 0) -> torch.Tensor:
    """Pairs of several messages in order of position, with positions at both ends of chunks and groups."""
    chance = torch.Generator().manual_seed(seed)
    parts = []
    for length in lengths:
        edges = [0, widest - 1, 65_535, 65_536, (1 << encoding.group_bits) - 1, 1 << encoding.group_bits]
        free = torch.randint(0, widest, (2 * length,), generator=chance).tolist()
        positions = torch.tensor([p for p in dict.fromkeys([*edges, *free]) if p < widest][:length]).sort().values
        values = torch.randn(len(positions), generator=chance)
        parts.append(torch.stack([values.view(torch.int32), positions.to(torch.int32)], dim=1))
        assert len(positions) == length
    return torch.cat(parts)


def values_of(pairs: torch.Tensor) -> torch.Tensor:
    return pairs[..., 0].contiguous().view(torch.float32)


@pytest.mark.parametrize("widest", [60, 65_536, 65_537, 2**21 + 3, 2**31 - 1])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bodies_of_exactly_their_size(precision: Wire, widest: int) -> None:
    encoding = encoding_for(precision, widest, DENSITY if widest < 2**31 - 1 else 1e-6)
    lengths = [5, 0, 33, 1, 0]
    pairs = made_pairs(encoding, widest, lengths)
    bodies = join_bodies(pairs, lengths, encoding)
    assert len(bodies) == sum(encoding.body_nbytes(length) for length in lengths)
    arrived = split_bodies(bodies, lengths, encoding)
    assert torch.equal(arrived[:, 1], pairs[:, 1])
    before, after = values_of(pairs), values_of(arrived)
    if precision == "fp32":
        assert torch.equal(after, before)
    elif precision == "bf16":
        assert torch.equal(after, before.to(torch.bfloat16).float())
    else:
        assert float((after - before).abs().max()) <= 0.503 / 127 * float(before.abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_messages_of_fixed_size(precision: Wire) -> None:
    """Unused slots stay unused, counts beyond the slots fill them all, and a poisoned message has no rounded pairs."""
    encoding = encoding_for(precision, 200_000, DENSITY)
    lengths, slots = [7, 10, 4], 10
    pairs = torch.tensor([0, -1], dtype=torch.int32).repeat(3, slots, 1)
    for row, part in enumerate(made_pairs(encoding, 200_000, lengths).split(lengths)):
        pairs[row, : len(part)] = part
    heads = message_head(torch.tensor([7, 25, 4]), torch.tensor([False, False, True]), torch.tensor(2.5))
    messages = frame_messages(heads, pairs, encoding)
    assert messages.shape == (3, 8 + encoding.body_nbytes(slots))
    found, arrived = unframe_messages(messages, encoding)
    assert found[:, 0].tolist() == [7, 25, -1]
    assert found[:, 1].contiguous().view(torch.float32).tolist() == [2.5] * 3
    assert torch.equal(arrived[:2, :, 1], pairs[:2, :, 1])
    assert bool((arrived[0, 7:, 0] == 0).all())
    if encoding.rounds:
        assert bool((arrived[2, :, 1] == -1).all()) and not arrived[2, :, 0].any()
    again = unframe_messages(frame_messages(heads, arrived, encoding), encoding)[1]
    assert torch.equal(again[:2], arrived[:2])  # what is rounded already stays as it is


def test_float32_values_are_encoded_without_a_copy() -> None:
    pairs = torch.zeros(4, 2, dtype=torch.int32)
    bodies = join_bodies(pairs, [1, 3], FP32)
    assert bodies.data_ptr() == pairs.data_ptr() == split_bodies(bodies, [1, 3], FP32).data_ptr()


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**125), 2.0**125, width=32), min_size=1, max_size=40),
    precision=st.sampled_from(["bf16", "int8"]),
)
def test_any_finite_value_arrives_finite_and_its_error_is_exact(values: list[float], precision: Wire) -> None:
    """Zeros, subnormal numbers, huge ones: value − sent is a float32, so that nothing is lost in the residual."""
    encoding = encoding_for(precision, 64, 0.5)
    before = torch.tensor(values)
    pairs = torch.stack([before.view(torch.int32), torch.arange(len(values), dtype=torch.int32)], dim=1)
    after = values_of(split_bodies(join_bodies(pairs, [len(values)], encoding), [len(values)], encoding))
    assert bool(after.isfinite().all())
    assert torch.equal((before - after).double(), before.double() - after.double())
    allowed = (2.0**-8 if precision == "bf16" else 0.503 / 127) * float(before.abs().max()) + 1e-30
    assert float((before - after).abs().max()) <= allowed


def test_negligible_groups_arrive_as_zeros_and_others_do_not_suffer() -> None:
    encoding = encoding_for("int8", 2**16, 1.0)  # groups of 128
    positions = torch.tensor([3, 100, 130, 140], dtype=torch.int32)
    pairs = torch.stack([torch.tensor([1e-40, -1e-31, 5.0, 0.01]).view(torch.int32), positions], dim=1)
    after = values_of(split_bodies(join_bodies(pairs, [4], encoding), [4], encoding))
    assert after[:2].tolist() == [0.0, 0.0]
    assert after[2:].tolist() == pytest.approx([5.0, 0.0], rel=0.004)
