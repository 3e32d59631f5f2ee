"""Which network is emulated: as a value, as the environment variables of a rank, and in words."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Self

from anabranch.alpha_beta import AlphaBeta

VARIABLE = "ANABRANCH_EMULATED"
STARTUP = Path(__file__).parent / "startup"  # a folder with a sitecustomize.py, which Python runs as it starts


@dataclass(frozen=True, slots=True)
class Settings:
    """Hosts of one process each, with one full-duplex card each: ``rate_bit_s`` of the slowest, latency per hop."""

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
        """From the text of the environment variable; ValueError if it is not one that ``__str__`` writes."""
        try:
            values = dict(pair.split("=") for pair in text.split(","))
            if values.keys() != {"hosts", "rate_bit_s", "alpha_s"}:
                raise ValueError(f"it names {', '.join(values) or 'nothing'}")
            return cls(int(values["hosts"]), float(values["rate_bit_s"]), float(values["alpha_s"]))
        except ValueError as error:
            example = cls(4, 10e9, 50e-6)
            raise ValueError(
                f"{VARIABLE} is {text!r}: {error}. Expected a text such as {str(example)!r}: start the program with "
                f"anabranch lab --emulate, which writes it, or unset {VARIABLE} to run without emulation"
            ) from None

    def __str__(self) -> str:
        return ",".join(f"{name}={value!r}" for name, value in asdict(self).items())

    @property
    def link(self) -> AlphaBeta:
        """The link between two hosts."""
        return AlphaBeta("ring", self.alpha_s, 8 / self.rate_bit_s)

    @property
    def words(self) -> str:
        """For people, in a report."""
        scale, unit = next(
            (pair for pair in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if self.rate_bit_s >= pair[0]), (1e3, "kbit/s")
        )
        rate, alpha = f"{self.rate_bit_s / scale:.4g} {unit}", f"{self.alpha_s * 1e6:.4g} µs"
        hosts = f"{self.hosts} host{'s' * (self.hosts != 1)}"
        return f"emulated: {hosts}, {rate}, {alpha} (delays, not a real network)"


def environment(rate_bit_s: Sequence[float], alpha_s: float) -> dict[str, str]:
    """Environment variables for ranks whose Gloo groups are to be emulated; one rate per host, the slowest counts.

    The ranks' interpreter must have anabranch. PYTHONPATH keeps what the caller's holds.
    """
    if not rate_bit_s:
        raise ValueError("rate_bit_s is empty: expected the rate of each host, in bits per second")
    for rate in rate_bit_s:
        Settings(1, rate, alpha_s)  # names the wrong one
    settings = Settings(len(rate_bit_s), float(min(rate_bit_s)), float(alpha_s))
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    return {VARIABLE: str(settings), "PYTHONPATH": path}


def current(variables: Mapping[str, str] = os.environ) -> Settings | None:
    """What this process was told to emulate, if anything; ValueError if it was told nonsense."""
    text = variables.get(VARIABLE)
    return None if text is None else Settings.parse(text)


def describe() -> str | None:
    """The emulated network of this process in words, to stand beside every result; None on a real network."""
    settings = current()
    return None if settings is None else settings.words
