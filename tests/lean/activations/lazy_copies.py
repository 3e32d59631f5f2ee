"""Copies that happen only when somebody waits for them, and until then leave garbage: the slowest possible link."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

GARBAGE = 0xFF  # in every byte: NaN, whatever the floating-point type


@dataclass(eq=False)
class Promise:
    """A copy that was asked for, and the copies that must come before it."""

    source: torch.Tensor
    target: torch.Tensor
    after: list["Promise"]
    done: bool = False

    def fulfil(self) -> None:
        if self.done:
            return
        for before in self.after:
            before.fulfil()
        self.target.copy_(self.source)
        self.done = True
        self.after = []
        self.source = self.target  # holds on to nothing


class LazyCopies:
    """In place of ``CudaCopies``: whoever forgets to wait reads NaN, whoever frees too early loses the data.

    As on a stream, copies to the host happen in the order in which they were asked for. ``log`` has every call that
    copies and every wait that had something to wait for.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._lock = RLock()  # under Lean, lanes are threads
        self._to_host: list[Promise] = []
        self._pending: weakref.WeakSet[Promise] = weakref.WeakSet()

    def to_host(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        with self._lock:
            promise = self._promised("to_host", source, target, [*self._to_host[-1:], *after])
            self._to_host.append(promise)
        return promise

    def to_device(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        with self._lock:
            return self._promised("to_device", source, target, after)

    def _promised(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Promise:
        self.log.append(way)
        if not self._is_needed(target):
            target.view(torch.uint8).fill_(GARBAGE)
        promise = Promise(source, target, [before for before in after if before is not None])
        self._pending.add(promise)
        return promise

    def _is_needed(self, memory: torch.Tensor) -> bool:
        """Whether a copy that has not happened yet reads or writes it."""
        address = memory.untyped_storage().data_ptr()
        return any(
            address in (promise.source.untyped_storage().data_ptr(), promise.target.untyped_storage().data_ptr())
            for promise in self._pending
            if not promise.done
        )

    def after_current_stream(self) -> None:
        """There is no stream: what computes has always finished."""

    def on_device_copy_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, done: Any) -> None:
        if done is not None and not done.done:
            with self._lock:
                self.log.append("wait")
                done.fulfil()

    def is_done(self, done: Any) -> bool:
        return done is None or bool(done.done)

    def synchronize(self) -> None:
        with self._lock:
            while self._to_host:
                self._to_host.pop(0).fulfil()
