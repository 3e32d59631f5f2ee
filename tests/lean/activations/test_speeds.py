"""Speeds are measured when all ranks are ready, so that what they share counts as shared."""

import torch

from anabranch.lean.activations import speeds as measuring
from anabranch.lean.activations.speeds import MAX_ROUNDS, SpeedMeter, measure_link

CPU = torch.device("cpu")


def test_a_device_has_speeds() -> None:
    link, memory_nbytes_per_s = SpeedMeter(CPU, 1 << 20).measure()
    assert link.out_nbytes_per_s > 0 and link.back_nbytes_per_s > 0 and memory_nbytes_per_s > 0
    assert link.window_nbytes is None and measure_link(CPU, 1 << 20).out_nbytes_per_s > 0


def test_short_copies_are_repeated_and_long_ones_are_not() -> None:
    assert measuring._rounds(measuring.MEASURED_S / 10) == 10
    assert measuring._rounds(10.0) == 1 and measuring._rounds(1e-9) == MAX_ROUNDS
