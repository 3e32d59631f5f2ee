"""Options of quantised exchanges: how gradients are rounded."""

from dataclasses import dataclass
from typing import Literal

from anabranch.values.kinds.names import COMPRESSED, INT4

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, Rounding] = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantised:
    """How gradients are rounded: ``compress="int8"`` is ``compress=Quantised("int8")``.

    kind       "bf16", "int8" or "int4": the format in which every value is sent
    rounding   "nearest", or "stochastic": up or down by chance, so that the mean of many roundings is the value. The
               errors of one step are larger. On a CPU it takes several times as long
    residual   whether rounding errors are kept and added to the next gradient, in 4 bytes a value; None keeps them for
               int4, which is too coarse to drop them
    """

    kind: str
    rounding: Rounding = "nearest"
    residual: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("kind", COMPRESSED), ("rounding", ROUNDINGS)):
            if getattr(self, name) not in allowed:
                expected = ", ".join(map(repr, allowed))
                raise ValueError(f"Quantised {name} is {getattr(self, name)!r}: expected one of {expected}")
        if self.residual is not None and not isinstance(self.residual, bool):
            raise ValueError(f"Quantised residual is {self.residual!r}: expected True, False or None")

    @property
    def keeps_residual(self) -> bool:
        """Whether rounding errors are kept."""
        return self.kind == INT4 if self.residual is None else self.residual

    @property
    def stochastic(self) -> bool:
        """Whether values are rounded up or down by chance."""
        return self.rounding == "stochastic"
