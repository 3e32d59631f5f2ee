"""A window of steps of a watched model on all ranks, written by rank 0 as one trace file in rank 0's time."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anabranch.exchange.groups import USE_A_TORCH_GROUP, clone_group, default_group, destroy_clone, no_clone_reason
from anabranch.observe.clock import Clock
from anabranch.observe.trace_window import WindowFile
from anabranch.values.timeline import Span

SpansOf = Callable[[Callable[[object], float]], Sequence[Span]]  # given the time of a mark


class ShardedWindow:
    """Records the steps ``first`` … ``last`` on every rank; rank 0 writes them to ``path``.

    inside   the ranks of this rank's node, itself among them: those that share one copy of the model
    over     the window has ended

    The constructor, the start and the end of the window are collective among all ranks, and wait for the device.
    """

    def __init__(
        self,
        first: int,
        last: int,
        path: str | os.PathLike[str],
        force: bool,
        *,
        next_step: int,
        clock: Clock,
        device: torch.device,
        inside: Sequence[int],
    ) -> None:
        if reason := no_clone_reason(default_group()):
            raise ValueError(f"trace_steps() cannot run here: {reason}. {USE_A_TORCH_GROUP}")
        self._control = clone_group(default_group(), "gloo", "anabranch control")
        try:
            self._file = WindowFile(first, last, path, force, next_step=next_step, control=self._control)
        except Exception:
            destroy_clone(self._control)
            raise
        self._clock, self._device, self._inside = clock, device, list(inside)
        self._begun = self.over = False
        self._steps: list[tuple[int, SpansOf]] = []

    def step_begins(self, number: int) -> None:
        """In front of the first forward of a step."""
        if number >= self._file.first and not self._begun:
            self._begun = True
            self._file.begin(self._clock)

    def step_ends(self, number: int, spans: SpansOf | None) -> None:
        """After the last backward of a step; None if it was not recorded as a whole."""
        if self._begun and spans is not None:
            self._steps.append((number, spans))
        if number == self._file.last:
            self._finish()

    def close(self) -> None:
        """Drop the window."""
        self.over = True
        self._steps.clear()
        self._file.drop()
        destroy_clone(self._control)

    def _finish(self) -> None:
        if not self._begun:  # asked for in the middle of a step
            self.close()
            return
        self._clock.settle()
        steps = [{"step": number, "spans": _rows(spans(self._file.at))} for number, spans in self._steps]
        self._file.write({"inside": self._inside, "steps": steps}, {"device": self._device.type})
        self.over = True
        self._steps.clear()
        dist.barrier(self._control)  # rank 0 has received everything
        destroy_clone(self._control)


def _rows(spans: Sequence[Span]) -> list[list[Any]]:
    """Spans as JSON values. What happens twice in a step, such as a gather, gets two names: pages compare by name."""
    rows, seen = [], set[str]()
    for span in sorted(spans, key=lambda span: span.start_s):
        name = f"{span.name} again" if span.name in seen else span.name
        seen.add(name)
        rows.append([span.track, name, span.start_s, span.end_s])
    return rows
