"""The options of Lean: how it saves memory."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch

from anabranch.planning.footprint import ResidualPlacement
from anabranch.values.quantities import size_nbytes

GIVEN_CLASSES = "torch.optim."  # where classes are defined whose optimizers can be taken over
Mode = Literal["keep", "recompute", "auto"]  # what happens to activations
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Activations:
    """What happens to activations until backward: "keep" them, or "recompute" every block."""

    mode: Mode = "keep"
    budget_nbytes: None = None  # retired

    def __post_init__(self) -> None:
        if self.mode == "auto" or self.budget_nbytes is not None:
            raise ValueError(
                f"Activations mode is {self.mode!r} with budget_nbytes={self.budget_nbytes}: a budget of activations "
                'alone is retired; use Lean(within="16GiB"), which chooses for all memory of a rank'
            )
        if self.mode not in get_args(Mode):
            raise ValueError(
                f"Activations mode is {self.mode!r}: expected keep or recompute; to move activations to the host, use "
                "torch.autograd.graph.save_on_cpu() around forward"
            )


KEPT = Activations(mode="keep")


@dataclass(frozen=True)
class Lean:
    """The settings by which training saves memory.

    optimizer     makes an optimizer for the parameters it is given, such as ``lambda p: torch.optim.AdamW(p, lr=0.1)``:
                  each bucket has its own and is updated inside backward, so its gradient need not live any longer. Or
                  an optimizer of torch.optim over the model's parameters, which is taken over. None: that of the
                  framework, where an integration says so
    residuals     how residuals of Ok-Topk and int4 are stored between exchanges: "in place" (where gradients add up),
                  or rounded to "bf16" or "int8", in half or a quarter of the memory
    activations   what happens to activations until backward: "keep", or "recompute" every block
    within        what a rank may have on the device at once, such as "16GiB" or a number of bytes: how residuals are
                  stored, and which activations are recomputed, is chosen so that training is as fast as possible
    clip_norm     the average gradients are scaled down to this norm over all of them, as by
                  ``torch.nn.utils.clip_grad_norm_`` under DDP: updates are held until it is known, so averages live
                  until the end of backward; infinite: the norm is only computed, and nothing is held
    clip_value    the elements of average gradients are clipped to this magnitude, as by
                  ``torch.nn.utils.clip_grad_value_`` under DDP; nothing is held for it
    """

    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None
    residuals: ResidualPlacement = "in place"
    activations: Activations | Mode = KEPT
    within: int | str | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    norm_type: InitVar[float] = 2.0  # retired
    error_if_nonfinite: InitVar[bool] = False  # retired

    def __post_init__(self, norm_type: float, error_if_nonfinite: bool) -> None:
        if norm_type != 2.0 or error_if_nonfinite:
            raise ValueError(
                f"Lean norm_type is {norm_type!r} and error_if_nonfinite {error_if_nonfinite!r}: both are retired; "
                "clip_norm is of type 2, and a step that is not finite is left out: see model.skipped"
            )
        self._check_optimizer()
        if self.residuals not in (allowed := get_args(ResidualPlacement)):
            raise ValueError(f"Lean residuals is {self.residuals!r}: expected one of {', '.join(map(repr, allowed))}")
        if isinstance(self.activations, str):
            object.__setattr__(self, "activations", Activations(self.activations))
        if not isinstance(self.activations, Activations):
            raise ValueError(f"Lean activations is {self.activations!r}: expected Activations(mode=...)")
        self._check_within()
        for name, limit in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if limit is not None and not (isinstance(limit, Real) and not isinstance(limit, bool) and limit > 0):
                raise ValueError(f"Lean {name} is {limit!r}: expected more than 0, or None")
        if self.clip_value is not None and self.clip_norm is not None:
            raise ValueError(
                f"Lean clip_value is {self.clip_value} and clip_norm {self.clip_norm}: expected one of them, since it "
                "is not known which comes first"
            )

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            given = type(self.optimizer)
            if not given.__module__.startswith(GIVEN_CLASSES):
                raise ValueError(
                    f"Lean optimizer is a {given.__name__} of {given.__module__}: expected one of torch.optim, or a "
                    "function that makes one for the parameters it is given, since every bucket has its own; such as "
                    f"lambda params: {given.__name__}(params, ...)"
                )
        elif self.optimizer is not None and not callable(self.optimizer):
            raise ValueError(f"Lean optimizer is {self.optimizer!r}: expected a function (parameters) -> optimizer")

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
        """What happens to activations; "auto" within a budget, where a mix is chosen."""
        assert isinstance(self.activations, Activations)
        return self.activations.mode if self.within is None else "auto"

    @property
    def first_residuals(self) -> ResidualPlacement:
        """How residuals are stored at first: within a budget in the least memory, until it is chosen."""
        return self.residuals if self.within is None else "int8"

    def described(self) -> str:
        """All options but the optimizer. Ranks with equal texts have equal options."""
        return (
            f"Lean residuals {self.residuals}, {self.activations_mode} activations, within {self.within}, clipping by "
            f"norm {self.clip_norm}, by value {self.clip_value}"
        )


def check_lean(memory: Any) -> None:
    """Raise ValueError unless ``memory`` is a ``Lean``."""
    if not isinstance(memory, Lean):
        raise ValueError(f"memory is {memory!r}: expected anabranch.Lean(optimizer=...)")
