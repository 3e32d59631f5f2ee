"""A network described in one line, such as ring:ranks=16,alpha=50us,rate=10gbit.

kind:name=value,... where times carry s, ms, us or ns, rates bit, kbit, mbit or gbit (per second), and the rest are
plain numbers.
"""

import math
from collections.abc import Mapping
from typing import Any

from anabranch.values.links import AlphaBeta
from anabranch.values.network import Contention, Network
from anabranch.values.quantities import quantity

EXAMPLES: Mapping[str, str] = {
    "ring": "ring:ranks=16,alpha=50us,rate=10gbit",
    "tree": "tree:ranks=16,alpha=50us,rate=10gbit",
    "halving_doubling": "halving_doubling:ranks=16,alpha=50us,rate=10gbit",
    "linear": "linear:ranks=16,start=0.9ms,s_per_byte=7.4e-10",
    "two_level": "two_level:ranks=64,per_node=8,alpha=50us,rate=10gbit,inside_alpha=5us,inside_rate=200gbit",
}
NUMBER: Mapping[str, float] = {"": 1.0}
TIME_S: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
RATE_BIT: Mapping[str, float] = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNITS: Mapping[str, tuple[Mapping[str, float], str]] = {  # of parts that have one, also those with inside_ before them
    "alpha": (TIME_S, "a time in s, ms, us or ns"),
    "start": (TIME_S, "a time in s, ms, us or ns"),
    "rate": (RATE_BIT, "a rate in bit, kbit, mbit or gbit (per second)"),
}
COUNTS = ("ranks", "per_node")
OPTIONAL = ("eta", "link_cap")  # parts that every kind may have
MAX_RANKS = 1 << 24


def is_description(text: str) -> bool:
    """Whether the text starts like a description, right or wrong; a file of such a name can be given as ./name."""
    return text.partition(":")[0] in EXAMPLES


def network(text: str) -> Network:
    """The network that ``text`` describes; ValueError naming the part that cannot be understood."""
    kind, _, rest = text.partition(":")
    if kind not in EXAMPLES:
        raise ValueError(f"network {text!r}: kind is {kind!r}, expected {', '.join(EXAMPLES)}")
    part = _values(kind, rest)
    world_size, eta, link_cap = int(part["ranks"]), part.get("eta", 1.0), part.get("link_cap")
    if kind == "linear":
        return Network.linear(world_size, part["start"], part["s_per_byte"], eta=eta, link_cap=link_cap)
    algorithm: Any = "ring" if kind == "two_level" else kind
    across = AlphaBeta(algorithm, part["alpha"], 8 / part["rate"])
    if kind == "two_level":
        inside = AlphaBeta(algorithm, part["inside_alpha"], 8 / part["inside_rate"])
        return Network.two_level(world_size, int(part["per_node"]), inside, across, eta=eta, link_cap=link_cap)
    return Network.modelled(world_size, across, Contention.law(eta, link_cap))


def ranks_of(name: str, text: str) -> int:
    """The number of ranks in what follows the name of a known network, such as 10gbe:ranks=16."""
    value = quantity(text.removeprefix("ranks="), NUMBER) if text.startswith("ranks=") else math.nan
    if not _is_count(value):
        raise ValueError(f"network {name}: {text!r} follows its name, expected how many ranks, as in {name}:ranks=16")
    return int(value)


def _values(kind: str, text: str) -> dict[str, float]:
    """The parts of a description by name, in the base of their units: those of the kind's example, and ``OPTIONAL``."""

    def wrong(found: str, expected: str) -> ValueError:
        return ValueError(f"network {kind}: {found}, expected {expected}, as in {EXAMPLES[kind]}")

    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value) or name in given:
            raise wrong(f"part {part!r}", "name=value, each name once")
        given[name] = value
    required = [part.partition("=")[0] for part in EXAMPLES[kind].partition(":")[2].split(",")]
    found: dict[str, float] = {}
    for name in (*required, *(name for name in OPTIONAL if name in given)):
        units, expected = UNITS.get(name.removeprefix("inside_"), (NUMBER, "a number"))
        if name not in given:
            raise wrong(f"{name} is missing", expected)
        number = found[name] = quantity(given[name], units)
        if not math.isfinite(number):
            raise wrong(f"{name} is {given[name]!r}", expected)
        if units is RATE_BIT and number < 1:
            raise wrong(f"{name} is {number:g} bit/s", "at least one bit per second")
        if name in COUNTS and not _is_count(number):
            raise wrong(f"{name} is {number:g}", f"a whole number from 1 to {MAX_RANKS}")
    if unknown := [name for name in given if name not in found]:
        raise wrong(f"unknown part {unknown[0]!r}", f"only {', '.join([*required, *OPTIONAL])}")
    return found


def _is_count(value: float) -> bool:
    return 1 <= value <= MAX_RANKS and value == int(value)
