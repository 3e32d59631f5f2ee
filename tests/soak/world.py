"""World: the ranks of one case, started by the server and watched until the last one has ended or hangs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ranks import patience
from soak.case import Case
from soak.faults import TIMEOUT_S
from soak.journal import Event, read
from soak.rank import Order

START_S = 30.0  # from the fork to the first step
GRACE_S = 5.0  # from the group's timeout to the end of the last survivor
SIGNAL_S = 5.0  # from Ctrl-C to the end of whoever received it
POLL_S = 0.02
NOT_OURS = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")  # triton's, since modules are frozen
STACKS_S = 0.3  # for faulthandler to write


@dataclass(frozen=True)
class RankRecord:
    """What is known of one rank: its events, how it ended (None: it hung), and what it printed.

    hung_s   seconds without progress when it was given up; 0 if it ended by itself
    ended    when its end was seen, on the clock of its events
    """

    events: Sequence[Event]
    code: int | None
    hung_s: float = 0.0
    ended: float = 0.0
    stderr: str = ""
    stacks: str = ""

    def last(self, what: str) -> Event | None:
        """The last event of this name."""
        return next((event for event in reversed(self.events) if event["what"] == what), None)


@dataclass
class Server:
    """The server of ranks, as seen from the campaign; several threads may use it."""

    _process: "subprocess.Popen[bytes]" = field(init=False)
    _listener: threading.Thread = field(init=False)
    _pids: dict[int, int] = field(default_factory=dict)
    _codes: dict[int, int] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Server":
        path = os.pathsep.join(part for part in sys.path if part)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "soak.server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._listener.join(10)

    def start(self, order: Order) -> int:
        """Have a rank forked; its number."""
        assert self._process.stdin is not None
        with self._lock:
            self._next += 1
            line = json.dumps({"id": self._next, **asdict(order)}).encode() + b"\n"
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return self._next

    def code(self, number: int) -> int | None:
        """The exit code of a rank; None while it runs."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server of ranks has ended with {self._process.returncode}")
        return self._codes.get(number)

    def ended(self, number: int) -> float:
        """When a rank ended."""
        return self._ended.get(number, time.monotonic())

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a rank a signal, if it still runs."""
        pid = self._pids.get(number)
        if pid is not None and number not in self._codes:
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                facts: dict[str, int] = json.loads(line)
                if "pid" in facts:
                    self._pids[facts["id"]] = facts["pid"]
                else:
                    self._ended[facts["id"]] = time.monotonic()
                    self._codes[facts["id"]] = facts["code"]


def run_world(
    server: Server, case: Case, folder: Path, meanwhile: Callable[[list[list[Event]]], None] | None = None, **order: Any
) -> list[RankRecord]:
    """Run the ranks of a case to their end. ``meanwhile`` is called with all ranks' events, again and again."""
    folder.mkdir(parents=True, exist_ok=True)
    timeout_s = TIMEOUT_S * patience()
    place = order.pop("place", lambda rank: {})
    orders = [Order(str(case), rank, str(folder), timeout_s, **order, **place(rank)) for rank in range(case.ranks)]
    numbers = [server.start(one) for one in orders]
    began = time.monotonic()
    journals = [folder / f"rank-{rank}.jsonl" for rank in range(case.ranks)]
    hung: dict[int, float] = {}
    while True:
        time.sleep(POLL_S)
        now = time.monotonic()
        alive = [rank for rank, number in enumerate(numbers) if server.code(number) is None and rank not in hung]
        events = [read(path) for path in journals]
        if meanwhile is not None:
            meanwhile(events)
        hung.update({rank: late for rank in alive if (late := _late_s(case, timeout_s, rank, events, began, now)) > 0})
        if all(rank in hung or _gone(case, rank, events) for rank in alive):
            break
    return [
        replace(_ended(server, number, rank, folder), hung_s=hung.get(rank, 0.0)) for rank, number in enumerate(numbers)
    ]


def obligation(rank: int, events: Sequence[Sequence[Event]]) -> float | None:
    """Since when a rank should only come to its end: the fault, or its own last step; None before the fault."""
    ending = [event["at"] for event in events[rank] if event["what"] == "fault" and event.get("ends")]
    if ending:  # by a signal, after which it may not go on
        return float(ending[0])
    struck: list[float] = [event["at"] for journal in events for event in journal if event["what"] == "fault"]
    if not struck:
        return None
    own: list[float] = [
        event["at"] for event in events[rank] if event["what"] in ("step", "wrapped", "round", "loaded")
    ]
    return max(min(struck), *own) if own else min(struck)


def _late_s(
    case: Case, timeout_s: float, rank: int, events: Sequence[Sequence[Event]], began: float, now: float
) -> float:
    """Seconds without progress, once they are more than a rank may take; else 0."""
    since = obligation(rank, events)
    grace_s = GRACE_S * patience()
    if since is None:
        own = [event["at"] for event in events[rank]]
        idle_s = now - (own[-1] if own else began)
        return idle_s if idle_s > START_S * patience() else 0.0
    signalled = any(event["what"] == "fault" and event.get("ends") for event in events[rank])
    allowed_s = SIGNAL_S * patience() if signalled else timeout_s + grace_s + case.kind.pause_s(timeout_s)
    return now - since if now - since > allowed_s else 0.0


def _gone(case: Case, rank: int, events: Sequence[Sequence[Event]]) -> bool:
    """Whether this rank was stopped for good, so that nobody waits for it."""
    stopped = case.kind.action == "stop" and not case.kind.amount and rank == case.victim
    return stopped and any(event["what"] == "fault" for event in events[rank])


def _ended(server: Server, number: int, rank: int, folder: Path) -> RankRecord:
    """A rank's record; a rank that still runs writes its stacks and is killed."""
    code = server.code(number)
    ended = server.ended(number)
    if code is None:
        server.signal(number, signal.SIGUSR1)
        time.sleep(STACKS_S)
        server.signal(number, signal.SIGKILL)
        server.signal(number, signal.SIGCONT)
    return RankRecord(
        events=read(folder / f"rank-{rank}.jsonl"),
        code=code,
        ended=ended,
        stderr=_tail(folder / f"stderr-{rank}"),
        stacks=_tail(folder / f"stacks-{rank}"),
    )


def _tail(path: Path, nbytes: int = 20_000) -> str:
    text = path.read_bytes()[-nbytes:].decode(errors="replace") if path.exists() else ""
    return "\n".join(line for line in text.splitlines() if not line.startswith(NOT_OURS))
