"""Cluster: the description of a lab's hosts and links, checked before anything is created."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl"]
Inside = Literal["loopback", "memory"]

MAX_HOSTS = 250  # the addresses of one subnet
MBIT, GBIT = 1e6, 1e9
# tbf's field of bytes per second has 32 bits, and under 1 Mbit/s its bucket holds seconds of traffic.
SLOWEST_BIT_S, FASTEST_BIT_S = 1 * MBIT, 34 * GBIT


@dataclass(frozen=True)
class Cluster:
    """Hosts, each with one full-duplex link to one switch.

    ``rates_bit_s`` has one rate per host; None leaves that host's link unshaped. ``alpha_s`` is the latency of emulated
    links; None means real links, between network namespaces. ``inside`` is what links among ranks of one host are.
    """

    rates_bit_s: Sequence[float | None]
    ranks_per_host: int = 1
    backend: Backend = "gloo"
    alpha_s: float | None = None
    inside: Inside = "loopback"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_bit_s", tuple(self.rates_bit_s))
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"the lab has {self.hosts} hosts: expected 1 to {MAX_HOSTS}")
        for rate in self.rates_bit_s:
            if rate is not None and not self.emulated and not SLOWEST_BIT_S <= rate <= FASTEST_BIT_S:
                expected = f"{rate_text(SLOWEST_BIT_S)} to {rate_text(FASTEST_BIT_S)}, the range of the kernel's shaper"
                raise ValueError(
                    f"a link's rate is {rate_text(rate)}: expected {expected} (tbf); leave a faster link unshaped"
                )
        if self.emulated and self.backend != "gloo":
            raise ValueError("emulated links support gloo only: drop --emulate or --backend nccl")
        if self.emulated and self.ranks_per_host > 1:
            raise ValueError(f"an emulated host has one rank, not {self.ranks_per_host}: use more --hosts instead")
        if self.inside == "memory" and self.backend != "nccl":
            raise ValueError(
                "links inside a host that are its memory are for --backend nccl, where ranks of one host share a GPU: "
                "Gloo's are its loopback, unshaped and as fast as its memory, so drop --inside memory"
            )
        if self.inside == "memory" and self.ranks_per_host == 1:
            raise ValueError("--inside memory means nothing where a host has one rank: give --ranks-per-host 2")
        if self.emulated and None in self.rates_bit_s:
            raise ValueError("an emulated link needs a rate: only links between network namespaces can be unshaped")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.rates_bit_s)

    @property
    def emulated(self) -> bool:
        """Whether links are emulated inside the ranks instead of shaped by the kernel."""
        return self.alpha_s is not None

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        """Such as "4 hosts, 10 Gbit/s links, network namespaces"."""
        hosts = f"{self.hosts} host" + "s" * (self.hosts > 1)
        if self.ranks_per_host > 1:
            hosts += f" of {self.ranks_per_host} ranks"
        rates = [rate_text(rate) for rate in self.rates_bit_s]
        links = f"{rates[0]} links" if len(set(rates)) == 1 else f"links of {', '.join(rates)}"
        if self.alpha_s is not None:
            return f"{hosts}, {links}, {self.alpha_s * 1e6:g} us latency, emulated"
        memory = ", memory inside hosts" if self.inside == "memory" else ""
        return f"{hosts}, {links}, network namespaces{memory}"


def rate_text(rate_bit_s: float | None) -> str:
    """Such as "10 Gbit/s"; "unshaped" for None."""
    if rate_bit_s is None:
        return "unshaped"
    return f"{rate_bit_s / GBIT:g} Gbit/s" if rate_bit_s >= GBIT else f"{rate_bit_s / MBIT:g} Mbit/s"
