"""How far the clocks of ranks are apart, and how well that is known.

Rank 0 sends a ping and each other rank, one after another, answers with its own time, which lies somewhere between the
ping and the answer's arrival: half that round trip bounds the error, whatever the two ways took. The best of some
rounds counts. Two such looks, before and after a window, also see how clocks drift.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.comm.agree import Group
from anabranch.observe.clock import Clock

ROUNDS = 25
ANCHORS = 5


class Offset(NamedTuple):
    """A rank's host clock is ahead of rank 0's by ``ahead_s``, give or take ``error_s``, when its own says ``at_s``."""

    at_s: float
    ahead_s: float
    error_s: float


def offsets(group: Group, rounds: int = ROUNDS) -> list[Offset]:
    """Of every rank, on rank 0; nothing on others. Collective; the group carries host memory."""
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
class Alignment:
    """One rank's clock against rank 0's, by a look before a window and one after it."""

    before: Offset
    after: Offset

    @property
    def error_s(self) -> float:
        """Of any instant between the looks, if clocks drift evenly."""
        return max(self.before.error_s, self.after.error_s)

    def as_rank_0(self, at_s: float) -> float:
        """Rank 0's time when this rank's clock says ``at_s``."""
        span_s = self.after.at_s - self.before.at_s
        share = min(1.0, max(0.0, (at_s - self.before.at_s) / span_s)) if span_s > 0 else 0.0
        return at_s - self.before.ahead_s - share * (self.after.ahead_s - self.before.ahead_s)


class Anchor(NamedTuple):
    """A mark of a clock, the host's time at it, and how well that is known: a device has a clock of its own."""

    mark: object
    host_s: float
    error_s: float

    @classmethod
    def drop(cls, clock: Clock) -> "Anchor":
        """Here and now; waits for the device."""
        found = []
        for _ in range(ANCHORS):
            clock.settle()
            before_s = perf_counter()
            mark = clock.mark()
            clock.settle()
            after_s = perf_counter()
            found.append(cls(mark, (before_s + after_s) / 2, (after_s - before_s) / 2))
        return min(found, key=lambda anchor: anchor.error_s)
