"""What a format makes of values, written without any of the exchange's code."""

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


def rounded(values: torch.Tensor, ranks: int, form: BlockFormat) -> torch.Tensor:
    """Values as a rank sends them, in float64."""
    padded = torch.zeros(ranks * form.region_numel(len(values), ranks), dtype=torch.float32)
    padded[: len(values)] = values
    if form.kind == "bf16":
        return padded.bfloat16().double()[: len(values)]
    turn = rotation(form)
    out = torch.zeros(len(padded), dtype=torch.float64)
    for start in range(0, len(padded), form.block):
        at = slice(start, start + form.block)
        block = turn @ padded[at].double()
        largest = float(block.abs().max())
        if largest < NEGLIGIBLE:
            continue
        scale = torch.tensor(largest).float() * (1.0 / form.most)
        scale = scale.bfloat16().float()
        # As precise as the exchange: a value between two integers becomes the same one here and there.
        in_units = (block.float() * (1.0 / scale)).double()
        integers = in_units.round()
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
