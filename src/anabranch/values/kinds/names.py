"""Names of the kinds of exchange, with the density and the wire that a name may have.

Exchanges of every element have a plain name, such as "int8". Sparse ones have their density in it ("oktopk:0.01").
Prices and arguments of commands may add how entries are sent (``OkTopk(wire=...)``): "oktopk:0.01:bf16". Buckets of a
live model do not, since all of them are sent in the same format.
"""

from typing import Literal, get_args

DENSE, BF16, INT8, INT4 = EVERY_ELEMENT = ("dense", "bf16", "int8", "int4")  # the most faithful first
COMPRESSED = EVERY_ELEMENT[1:]
OKTOPK = "oktopk"
AUTO = "auto"  # chooses a kind for each bucket
Wire = Literal["fp32", "bf16", "int8"]
WIRES: tuple[Wire, ...] = get_args(Wire)
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # the densities that OkTopk(density="auto") chooses from


def kind_of(density: float, wire: Wire = "fp32") -> str:
    """The name of a sparse collective of this density."""
    return with_wire(f"{OKTOPK}:{density:g}", wire)


def with_wire(name: str, wire: Wire) -> str:
    """The name of a kind with how it sends values; "fp32", the default of wires, is not named."""
    return name if wire == "fp32" else f"{name}:{wire}"


def split_wire(name: str, unnamed: Wire = "fp32") -> tuple[str, Wire]:
    """A name such as "oktopk:0.01:bf16" without its wire, and the wire; ``unnamed`` if it has none."""
    for wire in WIRES:
        if name.endswith(f":{wire}"):
            return name.removesuffix(f":{wire}"), wire
    return name, unnamed


def density_of(kind: str) -> float | None:
    """The density in the name of a sparse collective; None for any other name."""
    name, _, text = kind.partition(":")
    if name != OKTOPK:
        return None
    try:
        density = float(text)
    except ValueError:
        return None
    return density if 0 < density <= 1 else None


def given_density(text: str) -> float:
    """The density in a --compress argument, such as oktopk:0.01 or oktopk:0.01:bf16; ValueError if there is none."""
    name, _, share = split_wire(text)[0].partition(":")
    if (density := density_of(f"{OKTOPK}:{share}")) is None:  # other names, such as Lean's, have a density, too
        raise ValueError(
            f"--compress is {text!r}: expected a density in (0, 1], such as {name}:0.01, then nothing or how values "
            f"are sent ({', '.join(WIRES)}), such as {name}:0.01:bf16"
        )
    return density
