"""Clipping by the norm over all average gradients, which is known only when the last bucket's average is there.

The norm is torch's: the norm of the parameters' norms, in the model's order, so that the bits are those of
``torch.nn.utils.clip_grad_norm_``, if all have one dtype (torch takes dtypes one after another).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from anabranch.exchange.contracts import record_stream


@dataclass(frozen=True)
class Clipping:
    """The largest norm over all average gradients; arguments as of ``torch.nn.utils.clip_grad_norm_``.

    ``max_norm`` may be infinite: then the norm is only computed.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    @property
    def holds_updates(self) -> bool:
        """Whether updates must wait for the norm."""
        return self.max_norm < inf or self.error_if_nonfinite

    def coefficient(self, norm: torch.Tensor) -> torch.Tensor:
        """The factor for gradients of this norm."""
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

    def refusal(self, norm: torch.Tensor) -> RuntimeError | None:
        """The error for this norm, if one was asked for; waits for the device only then."""
        if not self.error_if_nonfinite or bool(norm.isfinite()):
            return None
        return RuntimeError(
            f"the norm of order {self.norm_type} over all gradients is {float(norm)}: expected a finite one, since "
            "Lean(error_if_nonfinite=True). No rank has updated anything in this step"
        )


class StepNorm:
    """The norm over all average gradients of a step, from the norms of parameters as their buckets arrive."""

    def __init__(self, norm_type: float, order: Sequence[nn.Parameter]) -> None:
        self._norm_type = norm_type
        self._order = order
        self._norms: dict[nn.Parameter, torch.Tensor] = {}

    def add(self, parts: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Add the average gradients of a bucket; lanes may call it at the same time."""
        if parts:
            norms: Iterable[torch.Tensor] = torch._foreach_norm(list(parts.values()), self._norm_type)
            for parameter, norm in zip(parts, norms, strict=True):
                self._norms[parameter] = norm

    def taken(self) -> torch.Tensor:
        """The norm of the step that ends, on the device; the next step begins anew."""
        norms = [self._norms[parameter] for parameter in self._order if parameter in self._norms]
        self._norms.clear()
        record_stream(*norms)
        if not norms:
            return torch.zeros(())
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), self._norm_type)
        return total
