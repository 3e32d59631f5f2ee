"""How fast a device exchanges bytes with pinned host memory, and copies in its own, while other ranks do so."""

from math import ceil
from typing import NamedTuple

import torch

from anabranch.lean.activations.cost_model import HostLink
from anabranch.lean.activations.host_copies import copies_for
from anabranch.observe.clock import clock_for

COPIED_NBYTES = 64 << 20  # large enough that a copy's start-up cost does not count
MEASURED_S = 0.02  # long beside the moment by which one rank leaves a barrier after another
MAX_ROUNDS = 256


class Speeds(NamedTuple):
    """The link to the host, both ways at once, and bytes a second that the device reads and writes in its memory."""

    link: HostLink
    memory_nbytes_per_s: float


class SpeedMeter:
    """Measures speeds of one device.

    When it is made it has its memory and has warmed up. So where ranks wait for each other between that and
    ``measure()``, all of them copy at the same time: what they share, such as the bus of a machine, has the speed that
    it has for each of them in a step, and not that for one alone.
    """

    def __init__(self, device: torch.device, nbytes: int = COPIED_NBYTES) -> None:
        self._nbytes = nbytes
        self._copies, self._clock = copies_for(device), clock_for(device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(2):  # streams are made and memory is mapped in the first round
            over_link_s, inside_s = max(self._over_link_s(1)), self._inside_s(1)
        self._link_rounds, self._inside_rounds = _rounds(over_link_s), _rounds(inside_s)

    def measure(self) -> Speeds:
        """The speeds now. Call it once: the meter's memory can then be freed."""
        over_link_nbytes = self._link_rounds * self._nbytes
        out_s, back_s = self._over_link_s(self._link_rounds)
        inside_s = self._inside_s(self._inside_rounds)
        self._clock.close()
        link = HostLink(over_link_nbytes / out_s, over_link_nbytes / back_s)
        return Speeds(link, 2 * self._inside_rounds * self._nbytes / inside_s)

    def _over_link_s(self, rounds: int) -> tuple[float, float]:
        """Seconds of so many copies out, and of as many back at the same time."""
        copies, clock = self._copies, self._clock
        start = clock.mark()
        copies.after_current_stream()
        for _ in range(rounds):
            copied_out = copies.to_host(self._device[0], self._host[0])
            copied_back = copies.to_device(self._host[1], self._device[1])
        copies.wait(copied_out)
        out_at = clock.mark()
        copies.wait(copied_back)
        back_at = clock.mark()
        clock.settle()
        return max(clock.elapsed_s(start, out_at), 1e-9), max(clock.elapsed_s(start, back_at), 1e-9)

    def _inside_s(self, rounds: int) -> float:
        """Seconds of so many copies inside the device."""
        start = self._clock.mark()
        for _ in range(rounds):
            self._device[1].copy_(self._device[0])
        end = self._clock.mark()
        self._clock.settle()
        return max(self._clock.elapsed_s(start, end), 1e-9)


def measure_link(device: torch.device, nbytes: int = COPIED_NBYTES) -> HostLink:
    """Measure how fast ``device`` and pinned host memory exchange bytes, both ways at once; of this rank alone."""
    return SpeedMeter(device, nbytes).measure().link


def _rounds(once_s: float) -> int:
    """How often to do what takes so long once."""
    return min(MAX_ROUNDS, ceil(MEASURED_S / once_s))
