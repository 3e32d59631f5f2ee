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
MAX_RANKS = 1 << 24


def is_description(text: str) -> bool:
    """Whether the text starts like a description, right or wrong; a file of such a name can be given as ./name."""
    return text.partition(":")[0] in EXAMPLES


def network(text: str) -> Network:
    """The network that ``text`` describes; ValueError naming the part that cannot be understood."""
    kind, _, rest = text.partition(":")
    if kind not in EXAMPLES:
        raise ValueError(f"network {text!r}: kind is {kind!r}, expected {', '.join(EXAMPLES)}")
    parts = _Parts(kind, rest)
    world_size = parts.whole("ranks")
    if kind == "linear":
        start_s, s_per_byte = parts.time("start"), parts.number("s_per_byte")
        return Network.linear(world_size, start_s, s_per_byte, **parts.contention())
    if kind == "two_level":
        per_node, across, inside = parts.whole("per_node"), parts.link("ring"), parts.link("ring", "inside_")
        return Network.two_level(world_size, per_node, inside, across, **parts.contention())
    link = parts.link(kind)
    return Network.modelled(world_size, link, Contention.law(**parts.contention()))


def ranks_of(name: str, text: str) -> int:
    """The number of ranks in what follows the name of a known network, such as 10gbe:ranks=16."""
    value = quantity(text.removeprefix("ranks="), NUMBER) if text.startswith("ranks=") else math.nan
    if not (1 <= value <= MAX_RANKS and value == int(value)):
        raise ValueError(f"network {name}: {text!r} follows its name, expected how many ranks, as in {name}:ranks=16")
    return int(value)


class _Parts:
    """The name=value parts of a description. Each is taken once; ``contention`` refuses parts that were not taken."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.left: dict[str, str] = {}
        self.taken: list[str] = []
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not (name and equals and value) or name in self.left:
                raise self.wrong(f"part {part!r}", "name=value, each name once")
            self.left[name] = value

    def wrong(self, found: str, expected: str) -> ValueError:
        return ValueError(f"network {self.kind}: {found}, expected {expected}, as in {EXAMPLES[self.kind]}")

    def number(self, name: str, units: Mapping[str, float] = NUMBER, expected: str = "a number") -> float:
        """The value of a part, in the base of its units."""
        self.taken.append(name)
        if name not in self.left:
            raise self.wrong(f"{name} is missing", expected)
        text = self.left.pop(name)
        value = quantity(text, units)
        if not math.isfinite(value):
            raise self.wrong(f"{name} is {text!r}", expected)
        return value

    def time(self, name: str) -> float:
        """A duration in seconds."""
        return self.number(name, TIME_S, "a time in s, ms, us or ns")

    def whole(self, name: str) -> int:
        """A count of ranks."""
        value = self.number(name)
        if value != int(value) or not 1 <= value <= MAX_RANKS:
            raise self.wrong(f"{name} is {value:g}", f"a whole number from 1 to {MAX_RANKS}")
        return int(value)

    def link(self, algorithm: str, prefix: str = "") -> AlphaBeta:
        """alpha and rate."""
        alpha_s, rate = self.time(f"{prefix}alpha"), f"{prefix}rate"
        bits_per_s = self.number(rate, RATE_BIT, "a rate in bit, kbit, mbit or gbit (per second)")
        if bits_per_s < 1:
            raise self.wrong(f"{rate} is {bits_per_s:g} bit/s", "at least one bit per second")
        return AlphaBeta(algorithm, alpha_s, 8 / bits_per_s, 0.0)  # type: ignore[arg-type]  # one of our own literals

    def contention(self) -> dict[str, Any]:
        """eta and link_cap, which every kind may have; ValueError if any other part is left."""
        found = {"eta": 1.0} | {name: self.number(name) for name in ("eta", "link_cap") if name in self.left}
        if self.left:
            known = dict.fromkeys([*self.taken, "eta", "link_cap"])
            raise self.wrong(f"unknown part {next(iter(self.left))!r}", f"only {', '.join(known)}")
        return found
