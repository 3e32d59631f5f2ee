"""How much waits in a bucket, and for how long: looked at now and then on the device, read only when someone asks.

By Little's law what waits, over what arrives in a step, is how many steps it waits: |residual|₁ / |gradient|₁, roughly,
because values of opposite sign cancel while they wait.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

SAMPLE_PERIOD = 64  # steps between samples, at first
KEPT = 32  # samples; when there are so many, every second is forgotten and the next ones come half as often
SWEEPS = 2  # times 1/density steps: until then residuals fill, which is no growth without bound
LEAST = 9  # samples after that: three for each third
GROWTH = 1.35  # from the middle third to the last: 1.67 if nothing is ever sent, 1.29 for the square root of time


class ResidualSample(NamedTuple):
    """What waited at the beginning of a step: its L2 norm, and about how many steps it had waited."""

    step: int
    norm: float
    age_steps: float


class ResidualMonitor:
    """The history of one bucket's residual on one rank, from its first step to now in at most ``KEPT`` samples."""

    def __init__(self, device: torch.device | None = None, period: int = SAMPLE_PERIOD) -> None:
        self._rows = torch.zeros(KEPT, 3, device=device)
        self._steps: list[int] = []
        self._stride = period

    def look(self, step: int, gradient: torch.Tensor, residual: torch.Tensor) -> None:
        """Note what waits, if it is time to: every ``period`` steps at first. Nothing waits for the host.

        A gradient may come in pieces, each with a look of its own before it is added to what waits: the first look of a
        step sees what had waited, all together what arrived.
        """
        if step % self._stride != 0:
            return
        if not self._steps or self._steps[-1] != step:
            if len(self._steps) == KEPT:
                self._rows[: KEPT // 2] = self._rows[::2].clone()
                self._steps, self._stride = self._steps[::2], 2 * self._stride
                if step % self._stride != 0:
                    return
            row = self._rows[len(self._steps)]
            row[0], row[1], row[2] = torch.linalg.vector_norm(residual, 2), torch.linalg.vector_norm(residual, 1), 0.0
            self._steps.append(step)
        self._rows[len(self._steps) - 1, 2] += torch.linalg.vector_norm(gradient, 1)

    def samples(self) -> list[ResidualSample]:
        """All that was noted, but for steps that were not finite. Waits for the device."""
        rows = self._rows[: len(self._steps)].tolist()
        return [
            ResidualSample(step, norm, waiting / arriving if arriving else 0.0)
            for step, (norm, waiting, arriving) in zip(self._steps, rows, strict=True)
            if arriving < float("inf")  # and not NaN
        ]


def residual_grows(samples: Sequence[ResidualSample], density: float) -> bool:
    """Whether what waits has been growing ever since residuals were full, and waits ever longer.

    Both, because residuals also follow gradients that grow, and wait longer where gradients shrink.
    """
    full = [look for look in samples if look.step - samples[0].step >= SWEEPS / density]
    if len(full) < LEAST:
        return False
    third = len(full) // 3
    for values in ([look.norm for look in full], [look.age_steps for look in full]):
        first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
        if not (first < middle and last > GROWTH * middle):
            return False
    return True
