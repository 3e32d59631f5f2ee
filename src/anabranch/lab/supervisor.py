"""Supervisor: waits for all members at once, and knows when waiting has lost its sense."""

import math
import os
import selectors
import signal
import time
from dataclasses import dataclass

from anabranch.lab.rank_process import RankProcess
from anabranch.lab.signals import Signals

GRACE_S = 5.0  # for the others once one has failed, and for all once the lab was asked to stop
TIMED_OUT = 124  # as timeout(1) says it


@dataclass
class Ending:
    """Why the lab ended: its first failure, the signal that stopped it, or the clock; none of them after success."""

    first: RankProcess | None = None
    stopped_by: int | None = None
    timed_out: bool = False

    @property
    def code(self) -> int:
        """The exit code that tells of it."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first is not None:
            return self.first.code or 1
        return TIMED_OUT if self.timed_out else 0


class Supervisor:
    """The members by order of their ends: of several that fail, the first is the one to look at."""

    def __init__(self, signals: Signals) -> None:
        self.members: list[RankProcess] = []
        self._signals = signals
        # epoll, because it tells of ends in the order in which they came.
        self._selector = selectors.EpollSelector()
        self._selector.register(signals.descriptor, selectors.EVENT_READ)

    def add(self, member: RankProcess) -> None:
        """Supervisor this one, too."""
        self.members.append(member)
        self._selector.register(os.pidfd_open(member.process.pid), selectors.EVENT_READ, member)

    def wait(self, timeout_s: float | None) -> Ending:
        """Until every member has ended, or has had its time after a failure or a signal; some may be left running.

        A signal is passed on to all members, once; a second one ends the waiting at once.
        """
        ending = Ending()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while any(member.code is None for member in self.members):
            if (left_s := deadline - time.monotonic()) <= 0:
                ending.timed_out = ending.first is None and ending.stopped_by is None
                break
            before = (ending.first, ending.stopped_by)
            for key, _ in self._selector.select(None if math.isinf(left_s) else left_s):
                if key.data is not None:
                    self._ended(key, ending)
                elif self._stopped(ending):
                    deadline = 0.0
            if before != (ending.first, ending.stopped_by):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for member in self.members:
            member.swept = member.code is None
        return ending

    def close(self) -> None:
        """Let go of the members, running or not."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _ended(self, key: selectors.SelectorKey, ending: Ending) -> None:
        member: RankProcess = key.data
        self._selector.unregister(key.fd)
        os.close(key.fd)
        member.process.wait()
        if member.code != 0 and ending.first is None and ending.stopped_by is None:
            ending.first = member

    def _stopped(self, ending: Ending) -> bool:
        """Pass signals on; whether somebody has lost patience."""
        for number in self._signals.take():
            if ending.stopped_by is not None:
                return True
            ending.stopped_by = number
            for member in self.members:
                # torchrun ends its ranks on SIGTERM, but knows no SIGHUP in some versions.
                member.send(number if number == signal.SIGINT else signal.SIGTERM)
        return False
