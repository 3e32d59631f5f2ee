"""Names of sparse collectives as a bucket gives them: the exchange and its density, such as "oktopk:0.01".

Prices and arguments of commands may add how entries are sent (``OkTopk(wire=...)``): "oktopk:0.01:bf16". Buckets of a
live model do not, since all of them are sent in the same way.
"""

from typing import get_args

from anabranch.values.kinds.sparse_sizes import Precision

KIND = "oktopk"
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # the densities that OkTopk(density="auto") chooses from


def kind_of(density: float, wire: Precision = "fp32") -> str:
    """The name of a sparse collective of this density."""
    return with_wire(f"{KIND}:{density:g}", wire)


def with_wire(name: str, wire: Precision) -> str:
    """The name of a kind with how it sends values; "fp32", the default of wires, is not named."""
    return name if wire == "fp32" else f"{name}:{wire}"


def split_wire(name: str, unnamed: Precision = "fp32") -> tuple[str, Precision]:
    """What stands before the wire in a name such as "oktopk:0.01:bf16", and the wire; ``unnamed`` if it has none."""
    for wire in get_args(Precision):
        if name.endswith(f":{wire}"):
            return name.removesuffix(f":{wire}"), wire
    return name, unnamed


def density_of(kind: str) -> float | None:
    """The density in the name of a sparse collective; None for any other name."""
    name, _, text = kind.partition(":")
    if name != KIND:
        return None
    try:
        density = float(text)
    except ValueError:
        return None
    return density if 0 < density <= 1 else None


def given_density(text: str, wires: bool = False) -> float:
    """The density in a --compress argument, such as oktopk:0.01; ValueError if there is none.

    wires   whether a wire may follow it, as in oktopk:0.01:bf16
    """
    name, _, share = (split_wire(text)[0] if wires else text).partition(":")
    try:
        density = float(share)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        known = ", ".join(get_args(Precision))
        wire = f", and behind it nothing or how values are sent ({known}), such as {name}:0.01:bf16" if wires else ""
        raise ValueError(f"--compress is {text!r}: expected a density in (0, 1], such as {name}:0.01{wire}")
    return density
