"""Monitors how large a bucket's residual is and how old: sampled on the device, read only when someone asks.

By Little's law the residual, divided by what arrives in a step, is the number of steps a value stays in the residual:
|residual|₁ / |gradient|₁. That is approximate, because values of opposite sign cancel in the residual.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

SAMPLE_PERIOD = 64  # steps between samples, at first
MAX_SAMPLES = 32  # at this number every second sample is dropped, and the next ones are taken half as often
FILL_SWEEPS = 2  # times 1/density steps: residuals fill until then, which is not growth without bound
MIN_SAMPLES = 9  # needed after that: three for each third
GROWTH = 1.35  # from the middle third to the last: 1.67 if nothing is ever sent, 1.29 for the square root of time


class ResidualSample(NamedTuple):
    """The residual at the beginning of a step: its L2 norm, and about how many steps old it is."""

    step: int
    norm: float
    age_steps: float


class ResidualMonitor:
    """The history of one bucket's residual on one rank since its first step, in at most ``MAX_SAMPLES`` samples."""

    def __init__(self, device: torch.device | None = None, period: int = SAMPLE_PERIOD) -> None:
        self._rows = torch.zeros(MAX_SAMPLES, 3, device=device)
        self._steps: list[int] = []
        self._stride = period

    def record(self, step: int, gradient: torch.Tensor, residual: torch.Tensor) -> None:
        """Record a sample, if one is due: every ``period`` steps at first. Never synchronises with the host.

        A gradient may come in parts, each recorded before it is added to the residual. The first call of a step takes
        the norm of the residual; all calls together take that of the gradient.
        """
        if step % self._stride != 0:
            return
        if not self._steps or self._steps[-1] != step:
            if len(self._steps) == MAX_SAMPLES:
                self._rows[: MAX_SAMPLES // 2] = self._rows[::2].clone()
                self._steps, self._stride = self._steps[::2], 2 * self._stride
                if step % self._stride != 0:
                    return
            row = self._rows[len(self._steps)]
            row[0], row[1], row[2] = torch.linalg.vector_norm(residual, 2), torch.linalg.vector_norm(residual, 1), 0.0
            self._steps.append(step)
        self._rows[len(self._steps) - 1, 2] += torch.linalg.vector_norm(gradient, 1)

    def samples(self) -> list[ResidualSample]:
        """All samples, except those of steps that were not finite. Synchronises with the device."""
        rows = self._rows[: len(self._steps)].tolist()
        return [
            ResidualSample(step, norm, residual / gradient if gradient else 0.0)
            for step, (norm, residual, gradient) in zip(self._steps, rows, strict=True)
            if gradient < float("inf")  # and not NaN
        ]


def residual_grows(samples: Sequence[ResidualSample], density: float) -> bool:
    """Whether both the norm and the age of the residual have kept growing since residuals were full.

    Both, because the norm also follows gradients that grow, and the age rises where gradients shrink.
    """
    full = [sample for sample in samples if sample.step - samples[0].step >= FILL_SWEEPS / density]
    if len(full) < MIN_SAMPLES:
        return False
    third = len(full) // 3
    for values in ([sample.norm for sample in full], [sample.age_steps for sample in full]):
        first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
        if not (first < middle and last > GROWTH * middle):
            return False
    return True
