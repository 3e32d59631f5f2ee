"""Signals to the lab's process, turned into something that can be waited for together with its children."""

import os
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While this context lasts, a signal that asks the lab to stop is kept and makes ``descriptor`` readable.

    One that is ignored already, as under nohup, stays ignored.
    """

    def __enter__(self) -> "Signals":
        self.descriptor, self._wakes = os.pipe()
        for end in (self.descriptor, self._wakes):
            os.set_blocking(end, False)
        self._woke_before = signal.set_wakeup_fd(self._wakes)
        self._handlers = {number: signal.getsignal(number) for number in STOPPING}
        for number, handler in self._handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _keep)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woke_before)
        os.close(self.descriptor)
        os.close(self._wakes)

    def take(self) -> list[int]:
        """The signals that came since the last call."""
        try:
            return [number for number in os.read(self.descriptor, 64) if number in STOPPING]
        except BlockingIOError:
            return []


def _keep(number: int, frame: FrameType | None) -> None:
    """Its number is in the pipe by now."""
