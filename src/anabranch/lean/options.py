"""The options of Lean: how it saves memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch

from anabranch.activations.policy import Activations

KEPT = Activations(mode="keep")
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
ResidualPlacement = Literal["in place", "host"]


@dataclass(frozen=True)
class Lean:
    """How training saves memory.

    optimizer     makes an optimizer for the parameters it is given, such as ``lambda p: torch.optim.AdamW(p, lr=0.1)``:
                  each bucket has its own and is updated inside backward, so its gradient need not live any longer
    residuals     where residuals of sparse buckets are: "in place" (on the device, where gradients add up) or "host"
                  (in pinned host memory, fetched while the bucket before is computed)
    activations   where activations are until backward: kept, or Activations(mode="offload"), "recompute", or "auto"
                  within a budget
    clip_norm     each bucket's average gradient is scaled down to this norm; the norm over all buckets cannot be
                  clipped, since it is known only when most of them have been updated
    """

    optimizer: OptimizerFactory
    residuals: ResidualPlacement = "in place"
    activations: Activations = KEPT
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"Lean optimizer is a {type(self.optimizer).__name__}: expected a function that makes one for the "
                "parameters it is given, since every bucket has its own; such as "
                f"lambda params: torch.optim.{type(self.optimizer).__name__}(params, ...)"
            )
        if not callable(self.optimizer):
            raise ValueError(f"Lean optimizer is {self.optimizer!r}: expected a function (parameters) -> optimizer")
        if self.residuals not in ("in place", "host"):
            raise ValueError(f"Lean residuals is {self.residuals!r}: expected 'in place' or 'host'")
        if not isinstance(self.activations, Activations):
            raise ValueError(f"Lean activations is {self.activations!r}: expected Activations(mode=...)")
        clip_norm = self.clip_norm
        is_number = isinstance(clip_norm, Real) and not isinstance(clip_norm, bool)
        if clip_norm is not None and not (is_number and clip_norm > 0):
            raise ValueError(f"Lean clip_norm is {self.clip_norm!r}: expected more than 0, or None")

    def described(self) -> list[str]:
        """Return a line per setting. Ranks with equal lines have equal options."""
        return [f"Lean residuals {self.residuals}", f"Lean clip_norm {self.clip_norm}", f"Lean {self.activations}"]


def check_lean(memory: Any) -> None:
    """Raise ValueError unless ``memory`` is a ``Lean``."""
    if not isinstance(memory, Lean):
        raise ValueError(f"memory is {memory!r}: expected anabranch.Lean(optimizer=...)")
