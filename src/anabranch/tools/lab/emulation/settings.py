"""Which network is emulated: as a value, as the environment variables of a rank, and as a note for reports.

No root is needed and any torch.distributed program runs unchanged: ``environment`` gives the variables for its ranks.
Only time is emulated, and every report of a rank repeats the note that says so.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Self

from anabranch.tools.lab.cluster import rate_text
from anabranch.tools.lab.inside.install import startup_path
from anabranch.values.links import AlphaBeta

NETWORK_VARIABLE = "ANABRANCH_EMULATED"
NOTE_VARIABLE = "ANABRANCH_NETWORK_NOTE"  # which anabranch.observe.environment reads; the library never imports the lab


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """Hosts of one rank each on one switch, with the rate of the slowest link and the latency of one hop."""

    hosts: int
    rate_bit_s: float
    alpha_s: float

    def __post_init__(self) -> None:
        if not (self.hosts >= 1 and 0 < self.rate_bit_s < inf and 0 <= self.alpha_s < inf):
            raise ValueError(f"{self}: expected hosts from 1 on, a rate_bit_s above 0, and an alpha_s of 0 or more")

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """The network that this process is to emulate, if any; ValueError if the variable cannot be read."""
        text = variables.get(NETWORK_VARIABLE)
        if text is None:
            return None
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{NETWORK_VARIABLE} is {text!r}: {error}. Expected a text such as {cls(4, 10e9, 50e-6)}: start the "
                f"program with anabranch lab --emulate, which writes it, or unset {NETWORK_VARIABLE} to run without "
                "emulation"
            ) from None

    def __str__(self) -> str:
        """The text that ``from_environment`` reads."""
        return json.dumps(asdict(self))

    @property
    def link(self) -> AlphaBeta:
        """The link between two hosts."""
        return AlphaBeta("ring", self.alpha_s, 8 / self.rate_bit_s)

    @property
    def note(self) -> str:
        """One sentence for people, to be printed with every result."""
        hosts = f"{self.hosts} host{'s' * (self.hosts != 1)}"
        alpha = f"{self.alpha_s * 1e6:.4g} µs"
        return f"emulated: {hosts}, {rate_text(self.rate_bit_s)}, {alpha} (delays, not a real network)"


def environment(rate_bit_s: Sequence[float], alpha_s: float) -> dict[str, str]:
    """Environment variables for ranks whose Gloo groups are to be emulated; one rate per host, the slowest counts."""
    network = EmulatedNetwork(len(rate_bit_s), float(min(rate_bit_s)), float(alpha_s))
    return {NETWORK_VARIABLE: str(network), NOTE_VARIABLE: network.note, **startup_path()}
