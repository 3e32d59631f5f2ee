"""Names of the kinds of exchange, with the density and the wire that a name may have.

Exchanges of every element have a plain name, such as "int8". Sparse ones have their density in it ("oktopk:0.01").
Prices and arguments of commands may add how entries are sent (``OkTopk(wire=...)``): "oktopk:0.01:bf16". Buckets of a
live model do not, since all of them are sent in the same format.

A two-level exchange ends in "@nodes": "int8@nodes" sums inside each node in full precision, and int8 is what nodes
exchange. Its name without the end is that of the exchange between nodes.
"""

from typing import Literal, get_args

DENSE, BF16, INT8, INT4 = EVERY_ELEMENT = ("dense", "bf16", "int8", "int4")  # the most faithful first
COMPRESSED = EVERY_ELEMENT[1:]
OKTOPK = "oktopk"
AUTO = "auto"  # chooses a kind for each bucket
Wire = Literal["fp32", "bf16", "int8"]
WIRES: tuple[Wire, ...] = get_args(Wire)
NODES = "@nodes"
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


def two_level(kind: str) -> str:
    """The name of the two-level exchange with this kind between nodes."""
    return between_nodes(kind) + NODES


def between_nodes(kind: str) -> str:
    """The kind that a two-level exchange has between nodes; any other kind itself."""
    return kind.removesuffix(NODES)


def is_two_level(kind: str) -> bool:
    """Whether this is the name of a two-level exchange."""
    return kind.endswith(NODES)


def is_dense(kind: str) -> bool:
    """Whether every element is sent in full precision, on two levels or flat."""
    return between_nodes(kind) == DENSE


def density_of(kind: str) -> float | None:
    """The density in the name of a sparse collective, flat or on two levels; None for any other name."""
    name, _, text = between_nodes(kind).partition(":")
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
