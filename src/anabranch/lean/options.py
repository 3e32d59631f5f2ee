"""The options of Lean: how it saves memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, Literal, get_args

import torch

from anabranch.planning.memory import ResidualPlacement
from anabranch.values.quantities import size_nbytes

GIVEN_CLASSES = "torch.optim."  # where classes are defined whose optimizers can be taken over
Mode = Literal["keep", "recompute", "auto"]  # what happens to activations
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Activations:
    """What happens to activations between forward and backward.

    mode            "keep" them, "recompute" every block, or "auto": a mix within a budget
    budget_nbytes   what "auto" may have on the device at once
    """

    mode: Mode = "auto"
    budget_nbytes: int | None = None

    def __post_init__(self) -> None:
        if str(self.mode) == "offload":
            raise ValueError(
                "Activations mode is 'offload': moving activations to the host is retired; use 'recompute', 'auto' "
                "with a budget, or torch.autograd.graph.save_on_cpu() around forward"
            )
        if self.mode not in get_args(Mode):
            raise ValueError(f"Activations mode is {self.mode!r}: expected one of {', '.join(get_args(Mode))}")
        budget = self.budget_nbytes
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise ValueError(f"Activations budget_nbytes is {budget!r}: expected a whole number from 1 on, or None")
        if self.mode != "auto" and budget is not None:
            raise ValueError(
                f"Activations mode is {self.mode!r} with budget_nbytes={budget}: expected one with 'auto' only"
            )
        if self.mode == "auto" and budget is None:
            raise ValueError(
                "Activations mode is 'auto' without budget_nbytes: expected a budget, since recomputing takes time; or "
                'use Lean(within="16GiB"), which chooses for all memory of a rank'
            )


KEPT = Activations(mode="keep")


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


@dataclass(frozen=True)
class Lean:
    """How training saves memory.

    optimizer     makes an optimizer for the parameters it is given, such as ``lambda p: torch.optim.AdamW(p, lr=0.1)``:
                  each bucket has its own and is updated inside backward, so its gradient need not live any longer. Or
                  an optimizer of torch.optim over the model's parameters, which is taken over. None: that of the
                  framework, where an integration says so
    residuals     how residuals of Ok-Topk and int4 are stored between exchanges: "in place" (where gradients add up),
                  or rounded to "bf16" or "int8", in half or a quarter of the memory
    activations   what happens to activations until backward: Activations("keep"), "recompute", or "auto" within a
                  budget; "keep" and "recompute" may be given by their names alone
    within        what a rank may have on the device at once, such as "16GiB" or a number of bytes: how residuals are
                  stored, and which activations are recomputed, is chosen so that training is as fast as possible
    clip_norm     the average gradients are scaled down to this norm over all of them, as by
                  ``torch.nn.utils.clip_grad_norm_`` under DDP: updates are held until it is known, so averages live
                  until the end of backward; infinite: the norm is only computed, and nothing is held
    norm_type     of that norm: 2, inf or any other number above 0
    error_if_nonfinite   raise an error on every rank if that norm is not finite, and update nothing
    clip_value    the elements of average gradients are clipped to this magnitude, as by
                  ``torch.nn.utils.clip_grad_value_`` under DDP; nothing is held for it
    """

    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None
    residuals: ResidualPlacement = "in place"
    activations: Activations | Mode = KEPT
    within: int | str | None = None
    clip_norm: float | None = None
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    clip_value: float | None = None

    def __post_init__(self) -> None:
        given = type(self.optimizer)
        is_optimizer = isinstance(self.optimizer, torch.optim.Optimizer)
        if is_optimizer and not given.__module__.startswith(GIVEN_CLASSES):
            raise ValueError(
                f"Lean optimizer is a {given.__name__} of {given.__module__}: expected one of torch.optim, or a "
                "function that makes one for the parameters it is given, since every bucket has its own; such as "
                f"lambda params: {given.__name__}(params, ...)"
            )
        if self.optimizer is not None and not is_optimizer and not callable(self.optimizer):
            raise ValueError(f"Lean optimizer is {self.optimizer!r}: expected a function (parameters) -> optimizer")
        if str(self.residuals) == "host":
            raise ValueError(
                "Lean residuals is 'host': residuals in host memory are retired; use 'bf16' or 'int8', which round "
                "them on the device to half or a quarter of the memory"
            )
        if self.residuals not in (allowed := get_args(ResidualPlacement)):
            raise ValueError(f"Lean residuals is {self.residuals!r}: expected one of {', '.join(map(repr, allowed))}")
        if isinstance(self.activations, str):
            object.__setattr__(self, "activations", Activations(self.activations))
        if not isinstance(self.activations, Activations):
            raise ValueError(f"Lean activations is {self.activations!r}: expected Activations(mode=...)")
        self._check_within()
        if self.clip_norm is not None and not _is_positive(self.clip_norm):
            raise ValueError(f"Lean clip_norm is {self.clip_norm!r}: expected more than 0, or None")
        if self.clip_value is not None and not _is_positive(self.clip_value):
            raise ValueError(f"Lean clip_value is {self.clip_value!r}: expected more than 0, or None")
        if self.clip_value is not None and self.clip_norm is not None:
            raise ValueError(
                f"Lean clip_value is {self.clip_value} and clip_norm {self.clip_norm}: expected one of them, since it "
                "is not known which comes first"
            )
        if not _is_positive(self.norm_type):
            raise ValueError(f"Lean norm_type is {self.norm_type!r}: expected more than 0, such as 2 or inf")
        if self.clip_norm is None and (self.norm_type != 2.0 or self.error_if_nonfinite):
            raise ValueError(
                f"Lean norm_type is {self.norm_type} and error_if_nonfinite {self.error_if_nonfinite} without a "
                "clip_norm: give clip_norm, too; clip_norm=math.inf computes the norm and clips nothing"
            )

    def _check_within(self) -> None:
        if self.within is None:
            return
        if isinstance(self.within, str):
            object.__setattr__(self, "within", size_nbytes("Lean within", self.within))
        if not isinstance(self.within, int) or isinstance(self.within, bool) or self.within < 1:
            raise ValueError(f"Lean within is {self.within!r}: expected a size such as '16GiB', or a number of bytes")
        if self.residuals != "in place" or self.activations != KEPT:
            raise ValueError(
                f"Lean within is {self.within} bytes with residuals {self.residuals!r} and {self.activations}: "
                "expected within alone, which chooses both; leave out the others, or within"
            )

    @property
    def within_nbytes(self) -> int | None:
        """The budget in bytes; None if there is none."""
        assert not isinstance(self.within, str)  # __post_init__ has read it
        return self.within

    @property
    def activations_mode(self) -> Mode:
        """How activations are managed; within a budget a mix is chosen."""
        assert isinstance(self.activations, Activations)
        return self.activations.mode if self.within is None else "auto"

    @property
    def activations_nbytes(self) -> int | None:
        """The budget of activations alone; None if there is none."""
        assert isinstance(self.activations, Activations)
        return self.activations.budget_nbytes

    @property
    def first_residuals(self) -> ResidualPlacement:
        """How residuals are stored at first: in little memory, while it is not chosen yet."""
        return self.residuals if self.within is None else "int8"

    @property
    def clipping(self) -> Clipping | None:
        """How gradients are clipped; None if not at all, and nobody asked for their norm."""
        if self.clip_norm is None:
            return None
        return Clipping(float(self.clip_norm), float(self.norm_type), self.error_if_nonfinite)

    def described(self) -> list[str]:
        """Return a line per setting. Ranks with equal lines have equal options."""
        return [
            f"Lean residuals {self.residuals}",
            f"Lean clipping {self.clipping}, by value {self.clip_value}",
            f"Lean {self.activations}",
            f"Lean within {self.within}",
        ]


def _is_positive(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and 0 < float(number) <= inf


def check_lean(memory: Any) -> None:
    """Raise ValueError unless ``memory`` is a ``Lean``."""
    if not isinstance(memory, Lean):
        raise ValueError(f"memory is {memory!r}: expected anabranch.Lean(optimizer=...)")
