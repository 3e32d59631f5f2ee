"""Pairs are decoded as they were encoded."""

import pytest
import torch

from anabranch.sparse.encoding import decode, encode, frame_messages, message_head, unframe_messages
from anabranch.sparse.sizes import FP32, encoding_for


@pytest.mark.parametrize(
    ("precision", "widest", "nbytes"), [("fp32", 10, 8), ("bf16", 2**31 - 1, 6), ("bf16", 65_535, 4)]
)
def test_pairs_arrive_as_they_were_sent(precision: str, widest: int, nbytes: int) -> None:
    encoding = encoding_for("bf16" if precision == "bf16" else "fp32", widest)
    assert encoding.pair_nbytes == nbytes
    values = (1e3 * torch.randn(3, 50)).to(torch.bfloat16).float()
    positions = torch.randint(0, widest, (3, 50), dtype=torch.int32)
    positions[0, :3] = torch.tensor([0, widest - 1, -1], dtype=torch.int32)
    pairs = torch.stack([values.view(torch.int32), positions], dim=-1)
    assert torch.equal(decode(encode(pairs, encoding), encoding), pairs)
    heads = message_head(torch.tensor([5, 6, 7]), torch.tensor([False, True, False]), torch.tensor(2.5))
    found, arrived = unframe_messages(frame_messages(heads, pairs, encoding), encoding)
    assert torch.equal(arrived, pairs)
    assert found[:, 0].tolist() == [5, -1, 7]
    assert found[:, 1].contiguous().view(torch.float32).tolist() == [2.5] * 3


def test_float32_values_are_encoded_without_a_copy() -> None:
    pairs = torch.zeros(4, 2, dtype=torch.int32)
    assert encode(pairs, FP32).data_ptr() == pairs.data_ptr()
