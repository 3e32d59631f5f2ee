"""Options of Ok-Topk: how gradients are sparsified."""

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Literal

from anabranch.values.kinds.sparse_sizes import ENTRY_NBYTES, Precision

MAX_CAPACITY_FACTOR = 1e6


@dataclass(frozen=True)
class OkTopk:
    """How gradients are sparsified.

    density             share of a bucket's elements to send per step; "auto": the highest the backward pass hides
    warmup_steps        first steps in which all values are sent, rounded where that is faster, because early gradients
                        change too fast to be delayed. A plan that the user gives runs from the first step on
    start_density       density right after warm-up, from which it falls geometrically over ``decay_steps``
    momentum            of each rank's own gradients, before they are sent, such as 0.9: then call
                        ``model.share_momentum(optimizer)``, or give the optimizer none
    threshold_period    steps between exact thresholds in an exact exchange; in between they are sampled
    region_period       steps between re-balanced regions
    wire                how values are sent: "fp32" (8 bytes a value with its position), "bf16" (4) or "int8" (3, and a
                        scale for about 128 values); what rounding changes stays in the residual
    capacity_factor     slots of a fixed-size message per expected value; values without a slot stay in the residual
    deterministic       the same bits in every run: sums in the order of ranks
    exact               counts first, then messages of exactly their size: always on CPU groups, optional on GPUs
    """

    density: float | Literal["auto"] = "auto"
    warmup_steps: int = 100
    start_density: float | None = None
    decay_steps: int = 300
    momentum: float = 0.0
    threshold_period: int = 32
    region_period: int = 64
    wire: Precision = "fp32"
    capacity_factor: float = 1.25
    deterministic: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("density", "start_density"):
            value = getattr(self, name)
            free = "auto" if name == "density" else None
            if value != free and not (
                isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
            ):
                raise ValueError(f"OkTopk {name} is {value!r}: expected a share of the elements in (0, 1], or {free!r}")
        for name, least in (("warmup_steps", 0), ("decay_steps", 1), ("threshold_period", 1), ("region_period", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise ValueError(f"OkTopk {name} is {getattr(self, name)!r}: expected a whole number from {least} on")
        if not isinstance(self.wire, str) or self.wire not in ENTRY_NBYTES:
            raise ValueError(f"OkTopk wire is {self.wire!r}: expected one of {', '.join(ENTRY_NBYTES)}")
        if not _is_real(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"OkTopk momentum is {self.momentum!r}: expected a number from 0 to below 1")
        if not _is_real(self.capacity_factor) or not 1 <= self.capacity_factor <= MAX_CAPACITY_FACTOR:
            most = MAX_CAPACITY_FACTOR
            raise ValueError(
                f"OkTopk capacity_factor is {self.capacity_factor!r}: expected a number from 1 to {most:g}"
            )
        for name in ("deterministic", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"OkTopk {name} is {getattr(self, name)!r}: expected True or False")

    def density_at(self, step: int, density: float) -> float:
        """The density of sparse step ``step``, counted after warm-up: falls from ``start_density`` to ``density``."""
        if self.start_density is None or self.start_density <= density:
            return density
        progress = min(1.0, step / self.decay_steps)
        return float(self.start_density ** (1 - progress) * density**progress)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
