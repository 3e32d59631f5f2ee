"""How memory is saved: the settings of Lean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anabranch.activations.policy import Activations

KEPT = Activations(mode="keep")
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
Residuals = Literal["in place", "host"]


@dataclass(frozen=True)
class Lean:
    """How memory is saved.

    optimizer     makes an optimizer for the parameters it is given, such as ``lambda p: torch.optim.AdamW(p, lr=0.1)``:
                  a bucket is updated inside backward, so that its gradient need not live until the end
    residuals     what waits to be sent: "in place" (it is the gradient memory) or "host" (in pinned host memory,
                  fetched while the bucket before is computed)
    activations   Activations(mode="offload"), "recompute", or "auto" within a budget: where they are until backward
    clip_norm     each bucket's average gradient is scaled down to this norm; the norm over all buckets is known only
                  when most of them have been updated, so that it cannot be clipped
    """

    optimizer: OptimizerFactory
    residuals: Residuals = "in place"
    activations: Activations = KEPT
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
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
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"Lean clip_norm is {self.clip_norm!r}: expected more than 0, or None")

    def described(self) -> list[str]:
        """A line per setting, such that ranks with equal lines wish the same."""
        return [f"Lean residuals {self.residuals}", f"Lean clip_norm {self.clip_norm}", f"Lean {self.activations}"]


def check_lean(memory: Any) -> None:
    """Refuse what is no Lean."""
    if not isinstance(memory, Lean):
        raise ValueError(f"memory is {memory!r}: expected anabranch.Lean(optimizer=...)")
