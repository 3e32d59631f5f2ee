"""What a format makes of values, written without any of the exchange's code."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anabranch.values.kinds.formats import NEGLIGIBLE, BlockFormat


def hashed(numel: int, seed: int) -> npt.NDArray[np.uint32]:
    """The random bits of the first positions, in unsigned arithmetic."""
    bits = np.arange(numel, dtype=np.uint32) ^ np.uint32(seed % 2**32)
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    found: npt.NDArray[np.uint32] = bits ^ (bits >> np.uint32(16))
    return found


def rounded(values: torch.Tensor, ranks: int, form: BlockFormat, seed: int | None) -> torch.Tensor:
    """Values as a rank sends them, in float64; with a seed, rounded by chance."""
    padded = torch.zeros(ranks * form.region_numel(len(values), ranks), dtype=torch.float32)
    padded[: len(values)] = values
    bits = None if seed is None else hashed(len(padded), seed)
    if form.kind == "bf16":
        return _bfloat16(padded, bits)[: len(values)]
    turn = rotation(form)
    out = torch.zeros(len(padded), dtype=torch.float64)
    for start in range(0, len(padded), form.block):
        at = slice(start, start + form.block)
        block = turn @ padded[at].double()
        largest = float(block.abs().max())
        if largest < NEGLIGIBLE:
            continue
        scale = torch.tensor(largest).float() * (1.0 / form.most)
        scale = scale.bfloat16().float() if bits is None else torch.tensor(np.array(_next_bfloat16(scale.numpy())))
        # As precise as the exchange: a value between two integers becomes the same one here and there.
        in_units = (block.float() * (1.0 / scale)).double()
        if bits is None:
            integers = in_units.round()
        else:
            chance = torch.tensor((bits[at] >> 8) / 2.0**24)
            integers = (in_units.floor() + (chance < in_units - in_units.floor())).clamp(-form.most, form.most)
        out[at] = turn @ (integers * scale.double())
    return out[: len(values)]


def rotation(form: BlockFormat) -> torch.Tensor:
    """The matrix by which a block is multiplied, its own inverse; the identity where the format does not rotate."""
    if not form.rotates:
        return torch.eye(form.block, dtype=torch.float64)
    turn = torch.ones(1, 1, dtype=torch.float64)
    while len(turn) < form.block:
        turn = torch.kron(turn, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / 2**0.5
    return turn


def _bfloat16(values: torch.Tensor, bits: npt.NDArray[np.uint32] | None) -> torch.Tensor:
    if bits is None:
        return values.bfloat16().double()
    low = (values.numpy().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    high = np.where(low == values.numpy(), low, _away(low))
    share = np.where(high == low, 0.0, (values.numpy() - low) / np.where(high == low, 1.0, high - low))
    up = (bits & 0xFFFF) >= 2**16 * (1 - share)
    return torch.tensor(np.where(up, high, low))


def _away(numbers: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """The bfloat16 next to each, away from 0."""
    return (numbers.astype(np.float32).view(np.uint32) + np.uint32(0x10000)).view(np.float32).astype(np.float64)


def _next_bfloat16(scale: npt.NDArray[np.float32]) -> np.float32:
    """The least bfloat16 that is not smaller."""
    low = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.float32(low if low == scale else _away(low))
