"""Which network is emulated: as a value, as the environment variables of a rank, and as a note for reports."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Self

from anabranch.values.links import AlphaBeta

NETWORK_VARIABLE = "ANABRANCH_EMULATED"
NOTE_VARIABLE = "ANABRANCH_NETWORK_NOTE"  # which anabranch.observe.environment reads; the library never imports the lab
STARTUP_FOLDER = Path(__file__).parent / "startup"  # with a sitecustomize.py, which Python runs as it starts


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """Hosts of one rank each on one switch, with the rate of the slowest link and the latency of one hop."""

    hosts: int
    rate_bit_s: float
    alpha_s: float

    def __post_init__(self) -> None:
        if not self.hosts >= 1:
            raise ValueError(f"hosts is {self.hosts}: expected at least 1")
        if not (self.rate_bit_s > 0 and isfinite(self.rate_bit_s)):
            raise ValueError(f"rate_bit_s is {self.rate_bit_s}: expected bits per second, more than zero and finite")
        if not (self.alpha_s >= 0 and isfinite(self.alpha_s)):
            raise ValueError(f"alpha_s is {self.alpha_s}: expected seconds per hop, zero or more and finite")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that ``__str__`` writes; ValueError for any other text."""
        try:
            values = dict(pair.split("=") for pair in text.split(","))
            if values.keys() != {"hosts", "rate_bit_s", "alpha_s"}:
                raise ValueError(f"it names {', '.join(values) or 'nothing'}")
            return cls(int(values["hosts"]), float(values["rate_bit_s"]), float(values["alpha_s"]))
        except ValueError as error:
            example = cls(4, 10e9, 50e-6)
            raise ValueError(
                f"{NETWORK_VARIABLE} is {text!r}: {error}. Expected a text such as {str(example)!r}: start the program "
                f"with anabranch lab --emulate, which writes it, or unset {NETWORK_VARIABLE} to run without emulation"
            ) from None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """The network that this process is to emulate, if any; ValueError if the variable cannot be read."""
        text = variables.get(NETWORK_VARIABLE)
        return None if text is None else cls.parse(text)

    def __str__(self) -> str:
        return ",".join(f"{name}={value!r}" for name, value in asdict(self).items())

    @property
    def link(self) -> AlphaBeta:
        """The link between two hosts."""
        return AlphaBeta("ring", self.alpha_s, 8 / self.rate_bit_s)

    @property
    def note(self) -> str:
        """One sentence for people, to be printed with every result."""
        scale, unit = next(
            (pair for pair in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if self.rate_bit_s >= pair[0]), (1e3, "kbit/s")
        )
        rate = f"{self.rate_bit_s / scale:.4g} {unit}"
        alpha = f"{self.alpha_s * 1e6:.4g} µs"
        hosts = f"{self.hosts} host{'s' * (self.hosts != 1)}"
        return f"emulated: {hosts}, {rate}, {alpha} (delays, not a real network)"


def environment(rate_bit_s: Sequence[float], alpha_s: float) -> dict[str, str]:
    """Environment variables for ranks whose Gloo groups are to be emulated; one rate per host, the slowest counts.

    The ranks' interpreter must have anabranch installed. PYTHONPATH keeps the entries that this process has.
    """
    if not rate_bit_s:
        raise ValueError("rate_bit_s is empty: expected the rate of each host, in bits per second")
    for rate in rate_bit_s:
        EmulatedNetwork(1, rate, alpha_s)  # its error shows the wrong rate
    network = EmulatedNetwork(len(rate_bit_s), float(min(rate_bit_s)), float(alpha_s))
    path = os.pathsep.join(filter(None, [str(STARTUP_FOLDER), os.environ.get("PYTHONPATH")]))
    return {NETWORK_VARIABLE: str(network), NOTE_VARIABLE: network.note, "PYTHONPATH": path}
