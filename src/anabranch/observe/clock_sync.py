"""Clock synchronisation: how far the host clocks of ranks are apart, with a bound on the error.

Rank 0 sends a ping to each other rank in turn, which answers with its own time. That time was read between the ping and
the arrival of the answer, so half the round trip bounds the error, however long each way took. The shortest of several
round trips is used. Two measurements, before and after a window of steps, also show how clocks drift.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.exchange.contracts import Group
from anabranch.observe.clock import Clock

PING_ROUNDS = 25
ANCHOR_TRIES = 5


class Offset(NamedTuple):
    """A rank's host clock is ahead of rank 0's by ``ahead_s``, give or take ``error_s``, when its own says ``at_s``."""

    at_s: float
    ahead_s: float
    error_s: float


def clock_offsets(group: Group, rounds: int = PING_ROUNDS) -> list[Offset]:
    """The offset of every rank, on rank 0; an empty list on others. Collective; the group must send host memory."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ping, answer = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        for _ in range(rounds):
            dist.recv(ping, group_src=0, group=group)
            answer[0] = perf_counter()
            dist.send(answer, group_dst=0, group=group)
        return []
    found = [Offset(perf_counter(), 0.0, 0.0)]
    for other in range(1, ranks):
        tries = []
        for _ in range(rounds):
            sent_s = perf_counter()
            dist.send(ping, group_dst=other, group=group)
            dist.recv(answer, group_src=other, group=group)
            back_s = perf_counter()
            theirs_s = float(answer.item())
            tries.append(Offset(theirs_s, theirs_s - (sent_s + back_s) / 2, (back_s - sent_s) / 2))
        found.append(min(tries, key=lambda one: one.error_s))
    return found


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """One rank's clock against rank 0's, from a measurement before a window and one after it."""

    before: Offset
    after: Offset

    @property
    def error_s(self) -> float:
        """Bound on the error of any time between the two measurements, if clocks drift evenly."""
        return max(self.before.error_s, self.after.error_s)

    def to_rank_0_time(self, at_s: float) -> float:
        """Rank 0's time when this rank's clock says ``at_s``."""
        span_s = self.after.at_s - self.before.at_s
        share = min(1.0, max(0.0, (at_s - self.before.at_s) / span_s)) if span_s > 0 else 0.0
        return at_s - self.before.ahead_s - share * (self.after.ahead_s - self.before.ahead_s)


class HostAnchor(NamedTuple):
    """A mark of a clock and the host's time at it, within ``error_s``: a device has a clock of its own."""

    mark: object
    host_s: float
    error_s: float

    @classmethod
    def measure(cls, clock: Clock) -> "HostAnchor":
        """Take a mark now and bound the host's time at it; waits for the device."""
        tries = []
        for _ in range(ANCHOR_TRIES):
            clock.settle()
            before_s = perf_counter()
            mark = clock.mark()
            clock.settle()
            after_s = perf_counter()
            tries.append(cls(mark, (before_s + after_s) / 2, (after_s - before_s) / 2))
        return min(tries, key=lambda anchor: anchor.error_s)
