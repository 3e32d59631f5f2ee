"""The file of a window of steps: what all ranks recorded, gathered and written by rank 0 in its own time."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabranch.exchange.agree import check_same, from_rank_0
from anabranch.exchange.contracts import Group
from anabranch.observe.clock import Clock
from anabranch.observe.clock_sync import ClockAlignment, HostAnchor, Offset, clock_offsets
from anabranch.observe.perfetto import perfetto_document
from anabranch.values.errors import FileError
from anabranch.values.files import write_text

log = logging.getLogger("anabranch")

MAX_STEPS = 100  # marks are kept in memory until the window ends


class WindowFile:
    """The steps ``first`` … ``last`` of all ranks of ``control``, which sends host memory.

    The constructor, ``begin`` and ``write`` are collective. A wrong window, or a file that is there already and may not
    be replaced, is refused on all ranks before any step; ``next_step`` is the number of the one that comes next.
    """

    def __init__(
        self, first: int, last: int, path: str | os.PathLike[str], force: bool, *, next_step: int, control: Group
    ) -> None:
        given = f"steps {first!r} to {last!r}, and {next_step} comes next"
        check_same("the window given to trace_steps()", [given], control)
        _check_range(first, last, next_step)  # after check_same(), so that all ranks raise or none does
        exists = Path(path).exists() and not force
        problem = f"{path}: is already there; choose another name, or replace it with force=True" if exists else ""
        if problem_of_rank_0 := from_rank_0(problem.encode(), control).decode():
            raise FileError(problem_of_rank_0)  # on every rank
        self.first, self.last, self.path = first, last, Path(path)
        self._force = force
        self._control = control
        self._offsets_before: list[Offset] = []
        self._clock: Clock | None = None
        self._anchor: HostAnchor | None = None

    def begin(self, clock: Clock) -> None:
        """Compare the clocks of all ranks, and tie ``clock`` to the host's; waits for the device."""
        self._offsets_before = clock_offsets(self._control)
        self._clock, self._anchor = clock, HostAnchor.measure(clock)

    @property
    def anchor(self) -> HostAnchor:
        """The mark at the begin of the window."""
        assert self._anchor is not None
        return self._anchor

    def at(self, mark: object) -> float:
        """When a mark of the clock was taken, in seconds of this rank's host."""
        assert self._clock is not None
        return self.anchor.host_s + self._clock.elapsed_s(self.anchor.mark, mark)

    def write(self, recording: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Gather what the ranks recorded, JSON values with a list ``steps``, and write it on rank 0."""
        offsets_after = clock_offsets(self._control)
        own = {"anchor_error_s": self.anchor.error_s, **recording}
        payloads = to_rank_0(json.dumps(own).encode(), self._control)
        if dist.get_rank(self._control) != 0:
            return
        recordings = [json.loads(payload) for payload in payloads]
        alignments = [
            ClockAlignment(before, after) for before, after in zip(self._offsets_before, offsets_after, strict=True)
        ]
        window = {**facts, "first_step": self.first, "last_step": self.last}
        try:
            text = json.dumps(perfetto_document(recordings, alignments, window), allow_nan=False) + "\n"
            write_text(text, self.path, self._force)
        except Exception as error:  # training continues, on this rank as on the others
            log.error("anabranch: the trace of steps %d to %d is lost: %s", self.first, self.last, error)

    def drop(self) -> None:
        """Say that there will be no file: the other ranks may not close now, so nothing can be gathered."""
        log.warning("anabranch: closed before step %d: no trace was written to %s", self.last, self.path)


def to_rank_0(payload: bytes, group: Group) -> Sequence[bytes]:
    """Every rank's payload, in rank order, on rank 0; an empty list on the others. Rank 0 receives one at a time."""
    if dist.get_rank(group) != 0:
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.send(torch.tensor([len(payload)], dtype=torch.int64), group_dst=0, group=group)
        dist.send(content, group_dst=0, group=group)
        return []
    parts = [payload]
    for other in range(1, dist.get_world_size(group)):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group_src=other, group=group)
        content = torch.zeros(int(size.item()), dtype=torch.uint8)
        dist.recv(content, group_src=other, group=group)
        parts.append(content.numpy().tobytes())
    return parts


def _check_range(first: int, last: int, next_step: int) -> None:
    if not isinstance(first, int) or not isinstance(last, int) or first < next_step:
        raise ValueError(f"trace_steps from {first!r} to {last!r}: expected numbers from {next_step} on, the next step")
    if not first <= last < first + MAX_STEPS:
        raise ValueError(
            f"trace_steps from {first} to {last}: expected a last step from {first} to {first + MAX_STEPS - 1}, since "
            f"steps are kept in memory until the window ends; ask for several windows of at most {MAX_STEPS} steps"
        )
