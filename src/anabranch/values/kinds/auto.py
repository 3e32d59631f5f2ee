"""Auto: the choice that ``compress="auto"`` leaves to the planner, and how it is bounded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.values.kinds.fidelity import LEAST, by_fidelity, error_of, ladder
from anabranch.values.kinds.names import DENSE
from anabranch.values.kinds.oktopk import OkTopk


@dataclass(frozen=True)
class Auto:
    """Per bucket, the most faithful kind of exchange that costs no time (``planners.ladder``).

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
