"""Works that are done when the real operation and its emulated time are both over, and the thread that says so."""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from queue import SimpleQueue
from threading import Thread, current_thread
from time import sleep
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.distributed import Work
from torch.futures import Future

from anabranch.lab.emulation.cost import Cost
from anabranch.lab.emulation.wire import Transfer, Wire

NO_TIMEOUT = timedelta(0)  # as torch says "the group's own"
JOIN_S = 1.0
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Not for torch.compile to look into: the reducer of a compiled DDP calls us from the middle of such a frame.

    torch's own decorator imports the compiler at the first call. That takes a second, and then functions with
    ``group.WORLD`` for a default keep the group, and Gloo's threads, until the interpreter ends: it may abort.
    """
    hidden = _disable_dynamo(function)

    @wraps(function)
    def either(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        return hidden(*args, **options) if "torch._dynamo" in sys.modules else function(*args, **options)

    return either


class Delay:
    """The emulated time of one operation, from now on; it is over when it is over on every wire."""

    def __init__(self, cost: Cost, wires: Sequence[Wire]) -> None:
        self._transfers: list[tuple[Wire, Transfer]] = [(wire, wire.post(cost)) for wire in wires]

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return self._left_s() <= 0

    def sit_out(self) -> None:
        """Sleep until it has passed: longer than it looked at first if other messages have come in between."""
        while (left_s := self._left_s()) > 0:
            sleep(left_s)

    def _left_s(self) -> float:
        return max((wire.left_s(transfer) for wire, transfer in self._transfers), default=0.0)


class Ender:
    """A daemon thread that ends the futures of one group in the order in which they were asked for.

    One per group, since groups must not wait for each other; made when first needed, since most works are waited for
    and never asked for a future.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[EmulatedWork, Any, Future[Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def end(self, work: "EmulatedWork", value: Any, done: "Future[Any]") -> None:
        """Give ``done`` what the real future ``value`` holds, or the error, once the work is over."""
        if self._thread is None:
            self._thread = Thread(target=_end_all, args=(self._queue,), name="anabranch-emulation", daemon=True)
            self._thread.start()
        self._queue.put((work, value, done))

    def close(self) -> None:
        """Let the thread end behind what it has to do."""
        self._queue.put(None)
        # The program's end should not meet a thread in mid-work, nor wait for one that waits for a dead rank.
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(JOIN_S)


def _end_all(jobs: "SimpleQueue[tuple[EmulatedWork, Any, Future[Any]] | None]") -> None:
    while (job := jobs.get()) is not None:
        work, value, done = job
        try:
            work.wait()
            done.set_result(value.wait())
        except BaseException as error:
            done.set_exception(error)
        del job, work, value, done  # while get() blocks, nothing here may keep a buffer alive


class EmulatedWork(Work):
    """A real work and its delay. An error of the real one shows at once."""

    def __init__(self, real: Work, delay: Delay, ender: Ender, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._real, self._delay, self._ender, self._devices = real, delay, ender, devices
        self._future: Future[Any] | None = None

    @uncompiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See torch; the timeout is for the real operation."""
        answer = self._real.wait(timeout)
        self._delay.sit_out()
        return answer

    def synchronize(self) -> None:
        """See torch."""
        self.wait()

    def is_completed(self) -> bool:
        """See torch."""
        return self._real.is_completed() and self._delay.over

    def is_success(self) -> bool:
        """See torch."""
        return self._real.is_success()

    def exception(self) -> Any:
        """See torch."""
        return self._real.exception()

    def result(self) -> list[torch.Tensor]:
        """See torch."""
        return self._real.result()

    def source_rank(self) -> int:
        """See torch."""
        return self._real.source_rank()

    def _source_rank(self) -> int:
        return self._real._source_rank()

    @uncompiled
    def get_future(self) -> Any:
        """See torch."""
        if self._future is None:
            value = self._real.get_future()  # for a message torch refuses, and so do we
            done: Future[Any] = Future(devices=list(self._devices))
            # DDP's reducer cannot read an exception that was set on a future; one that is raised in then() it can.
            self._future = done.then(lambda future: future.wait())
            self._ender.end(self, value, done)
        return self._future
