"""Options of compression, as users give them: ``Quantised``, ``OkTopk``, and ``Auto``, which lets a planner choose."""

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from math import isfinite
from numbers import Real
from typing import Literal

from anabranch.values.kinds.fidelity import LEAST, by_fidelity, error_of, ladder
from anabranch.values.kinds.names import COMPRESSED, DENSE, INT4, WIRES, Wire


@dataclass(frozen=True)
class Quantised:
    """How gradients are rounded: ``compress="int8"`` is ``compress=Quantised("int8")``.

    kind       "bf16", "int8" or "int4": the format in which every value is sent
    residual   whether rounding errors are kept and added to the next gradient, in 4 bytes a value; None keeps them for
               int4, which is too coarse to drop them
    """

    kind: str
    rounding: InitVar[str] = "nearest"  # retired
    residual: bool | None = None

    def __post_init__(self, rounding: str) -> None:
        if self.kind not in COMPRESSED:
            raise ValueError(f"Quantised kind is {self.kind!r}: expected one of {', '.join(map(repr, COMPRESSED))}")
        if rounding != "nearest":
            raise ValueError(
                f"Quantised rounding is {rounding!r}: expected 'nearest', the only one left; where errors of single "
                "steps must not add up, use residual=True"
            )
        if self.residual is not None and not isinstance(self.residual, bool):
            raise ValueError(f"Quantised residual is {self.residual!r}: expected True, False or None")

    @property
    def keeps_residual(self) -> bool:
        """Whether rounding errors are kept."""
        return self.kind == INT4 if self.residual is None else self.residual


MAX_CAPACITY_FACTOR = 1e6
A_SHARE = "a share of the elements in (0, 1]"


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
    wire: Wire = "fp32"
    capacity_factor: float = 1.25
    deterministic: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        self._check("density", self.density == "auto" or _is_share(self.density), f"{A_SHARE}, or 'auto'")
        self._check("start_density", self.start_density is None or _is_share(self.start_density), f"{A_SHARE}, or None")
        for name, least in (("warmup_steps", 0), ("decay_steps", 1), ("threshold_period", 1), ("region_period", 1)):
            value = getattr(self, name)
            self._check(name, type(value) is int and value >= least, f"a whole number from {least} on")
        self._check("wire", isinstance(self.wire, str) and self.wire in WIRES, f"one of {', '.join(WIRES)}")
        self._check("momentum", _is_real(self.momentum) and 0 <= self.momentum < 1, "a number from 0 to below 1")
        fits = _is_real(self.capacity_factor) and 1 <= self.capacity_factor <= MAX_CAPACITY_FACTOR
        self._check("capacity_factor", fits, f"a number from 1 to {MAX_CAPACITY_FACTOR:g}")
        for name in ("deterministic", "exact"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")

    def _check(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"OkTopk {name} is {getattr(self, name)!r}: expected {expected}")

    def density_at(self, step: int, density: float) -> float:
        """The density of sparse step ``step``, counted after warm-up: falls from ``start_density`` to ``density``."""
        if self.start_density is None or self.start_density <= density:
            return density
        progress = min(1.0, step / self.decay_steps)
        return float(self.start_density ** (1 - progress) * density**progress)


@dataclass(frozen=True)
class Auto:
    """Per bucket, the most faithful kind of exchange that costs no time (``planning.ladder``).

    at_least   the least faithful kind that may be chosen, such as "int8", or "oktopk:0.01" for the whole ladder; "int4"
               if neither this nor ``kinds`` is given, since sparse kinds cost learning, and nobody gets them unasked
    kinds      choose from these alone, such as ["bf16", "oktopk:0.05"]; "dense" is always among them
    oktopk     options of its sparse buckets; ``density`` has no meaning here
    """

    at_least: str | None = None
    kinds: Sequence[str] | None = None
    oktopk: OkTopk = field(default_factory=OkTopk)

    def __post_init__(self) -> None:
        kinds = ladder(self.at_least or LEAST) if self.kinds is None else self.kinds
        if isinstance(kinds, str) or not isinstance(kinds, Iterable) or not all(isinstance(k, str) for k in kinds):
            raise ValueError(f"Auto kinds is {kinds!r}: expected a list of kinds, such as ['bf16', 'int8']")
        for kind in (*kinds, *([self.at_least] if self.at_least is not None else [])):
            error_of(kind)  # refuses what is no kind
        if not isinstance(self.oktopk, OkTopk):
            raise ValueError(f"Auto oktopk is {self.oktopk!r}: expected OkTopk(...)")
        if self.oktopk.momentum:
            raise ValueError(
                f"Auto oktopk has momentum {self.oktopk.momentum}: expected 0, since buckets of other kinds have none; "
                "use the momentum of the optimizer, or OkTopk(momentum=...) by itself"
            )
        allowed = [kind for kind in by_fidelity(list(dict.fromkeys(kinds))) if kind != DENSE]
        if self.at_least is not None:
            allowed = [kind for kind in allowed if error_of(kind) <= error_of(self.at_least)]
        object.__setattr__(self, "kinds", tuple(allowed))


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
