"""Copies that are done only when somebody waits for them, and until then leave garbage: a link of the slowest kind."""

from dataclasses import dataclass
from typing import Any

import torch

from anabranch.activations.host_pool import Buffer


@dataclass(eq=False)
class Promise:
    """A copy that somebody has asked for."""

    source: torch.Tensor
    target: torch.Tensor
    after: list["Promise"]
    done: bool = False


class LazyCopies:
    """In place of ``CudaCopies``: whoever forgets to wait reads 0x7f bytes, whoever frees too early loses the data."""

    def __init__(self) -> None:
        self.outward: list[Promise] = []
        self.log: list[str] = []
        self.allocated: list[torch.Tensor] = []

    def out(self, source: torch.Tensor, buffer: Buffer) -> Any:
        reading: Any = buffer.read
        buffer.read = None
        waits = [reading] if reading is not None else []
        promise = Promise(source, buffer.space[: source.numel()], [*self.outward[-1:], *waits])
        self.outward.append(promise)
        self.log.append("out")
        return promise

    def back(self, buffer: Buffer, nbytes: int, written: Any) -> tuple[torch.Tensor, Any]:
        space = torch.full((nbytes,), 0x7F, dtype=torch.uint8)
        reads: Any = Promise(buffer.space[:nbytes], space, [written])
        buffer.read = reads
        self.log.append("back")
        return space, reads

    def wait(self, done: Any) -> None:
        if done is None or done.done:
            return
        for before in done.after:
            self.wait(before)
        done.target.copy_(done.source)
        done.done = True
        done.source = done.target  # holds on to nothing
        self.log.append("wait")

    def is_done(self, done: Any) -> bool:
        return done is None or bool(done.done)
