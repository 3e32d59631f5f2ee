"""Virtual ranks in one process: the same exchanges at 256 and 2048 ranks, with every byte counted.

    world = VirtualWorld(64)
    world.run([exchange(gradients[c.rank], states[c.rank], c, 64.0, 0.01) for c in world.comms])
    world.byte_counts.volume()

An operation completes when all ranks have issued it; it is then done for all ranks at once, in a few tensor operations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from anabranch.exchange.communicator import MAX, SUM, Communicator, ZeroBuffer
from anabranch.exchange.interface import Steps
from anabranch.values.errors import DisagreementError

FloatArray = npt.NDArray[np.float64]


class ByteCounts:
    """Bytes and messages, per rank and phase. What a rank keeps for itself is not counted.

    Collectives count as their usual algorithms send them: an all-to-all directly, an all-gather around the ring (a rank
    passes on everything except its successor's own part), an all-reduce twice around the ring.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))
        self._received: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))
        self._messages: dict[str, FloatArray] = defaultdict(lambda: np.zeros(size))

    @property
    def phases(self) -> list[str]:
        """The phases seen so far, in order of their first message."""
        return list(self._sent)

    def sent(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Bytes sent by each rank, in these phases or in all."""
        return self._total(self._sent, phases)

    def received(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Bytes received by each rank."""
        return self._total(self._received, phases)

    def messages(self, phases: Iterable[str] | None = None) -> FloatArray:
        """Messages sent by each rank. Each costs the latency of the network once."""
        return self._total(self._messages, phases)

    def volume(self, phases: Iterable[str] | None = None) -> float:
        """The most bytes that any rank sent, or received: links are full duplex, so the larger of the two counts."""
        wanted = None if phases is None else list(phases)
        return float(np.maximum(self.sent(wanted), self.received(wanted)).max(initial=0.0))

    def clear(self) -> None:
        """Reset all counts."""
        for table in (self._sent, self._received, self._messages):
            table.clear()

    def add_pairs(self, phase: str, nbytes: FloatArray) -> None:
        """Messages of ``nbytes[i, j]`` from rank i to rank j, sent directly."""
        between = nbytes.copy()
        np.fill_diagonal(between, 0.0)
        self._sent[phase] += between.sum(axis=1)
        self._received[phase] += between.sum(axis=0)
        self._messages[phase] += (between > 0).sum(axis=1)

    def add_ring_gather(self, phase: str, nbytes: FloatArray) -> None:
        """An all-gather around a ring; the part of rank i has ``nbytes[i]``."""
        self._sent[phase] += nbytes.sum() - np.roll(nbytes, -1)
        self._received[phase] += nbytes.sum() - nbytes
        self._messages[phase] += self.size - 1

    def add_ring_reduce(self, phase: str, nbytes: float) -> None:
        """An all-reduce of ``nbytes`` around a ring."""
        passed_on = 2 * nbytes * (self.size - 1) / self.size
        self._sent[phase] += passed_on
        self._received[phase] += passed_on
        self._messages[phase] += 2 * (self.size - 1)

    @staticmethod
    def _total(table: dict[str, FloatArray], phases: Iterable[str] | None) -> FloatArray:
        chosen = [table[phase] for phase in (list(table) if phases is None else phases)]
        return np.sum(chosen, axis=0) if chosen else np.zeros(0)


class VirtualWork(dist.Work):
    """Done once all ranks have issued their part; ``VirtualWorld.run`` completes it."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        """True if it is done. Raises RuntimeError if not, because a virtual rank would wait for ever."""
        if not self.done:
            raise RuntimeError(
                "a virtual rank waited for its own operation: yield it, and VirtualWorld.run completes it"
            )
        return True


@dataclass
class _Request:
    """One rank's part of an operation."""

    kind: str
    phase: str
    output: torch.Tensor
    given: torch.Tensor
    output_counts: Sequence[int] | None
    given_counts: Sequence[int] | None
    work: VirtualWork

    @property
    def like(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        even = self.given_counts is None and self.output_counts is None
        shape = tuple(self.given.shape[0 if even else 1 :])
        return self.kind, self.phase, self.given.dtype, shape, even


class VirtualCommunicator(Communicator):
    """One rank of a ``VirtualWorld``."""

    def __init__(self, world: "VirtualWorld", rank: int) -> None:
        ZeroBuffer.__init__(self)  # and no process group
        self._world, self.rank, self.size = world, rank, world.size

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        phase: str,
        output_counts: Sequence[int] | None = None,
        given_counts: Sequence[int] | None = None,
    ) -> dist.Work:
        return self._request("all_to_all", phase, output, given, output_counts, given_counts)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor, phase: str) -> dist.Work:
        return self._request("all_gather", phase, output, part)

    def all_gather_uneven(
        self, output: torch.Tensor, part: torch.Tensor, counts: Sequence[int], phase: str
    ) -> dist.Work:
        if counts[self.rank] != len(part):
            raise ValueError(f"rank {self.rank} gathers {len(part)} rows and announced {counts[self.rank]} ({phase})")
        return self._request("all_gather", phase, output, part, counts, (len(part),))

    def all_reduce(self, tensor: torch.Tensor, phase: str, op: dist.ReduceOp.RedOpType = SUM) -> dist.Work:
        return self._request("maximum" if op == MAX else "sum", phase, tensor, tensor)

    def _request(
        self,
        kind: str,
        phase: str,
        output: torch.Tensor,
        given: torch.Tensor,
        output_counts: Sequence[int] | None = None,
        given_counts: Sequence[int] | None = None,
    ) -> VirtualWork:
        request = _Request(kind, phase, output, given, output_counts, given_counts, VirtualWork())
        self._world.issue(self.rank, request)
        return request.work


class VirtualWorld:
    """``size`` virtual ranks: their communicators (``comms``), and the bytes sent between them (``byte_counts``)."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a virtual world of {size} ranks: expected at least one rank")
        self.size = size
        self.comms = [VirtualCommunicator(self, rank) for rank in range(size)]
        self.byte_counts = ByteCounts(size)
        self._pending: dict[int, _Request] = {}

    def run(self, ranks: Sequence[Steps]) -> None:
        """Drive one generator per rank, in rank order, until all have ended.

        Raises ``DisagreementError`` if ranks issue different operations, or some end before the others.
        """
        if len(ranks) != self.size:
            raise ValueError(f"{len(ranks)} generators for {self.size} virtual ranks: give one per rank")
        while True:
            works = [next(steps, None) for steps in ranks]
            ended = [rank for rank, work in enumerate(works) if work is None]
            if len(ended) == self.size:
                return
            if ended:
                other = next(iter(self._pending.values()))
                raise DisagreementError(
                    f"virtual rank {ended[0]} has ended while others are in {other.kind} ({other.phase}): "
                    "every rank must issue the same operations"
                )
            self._complete()

    def issue(self, rank: int, request: _Request) -> None:
        """Register a rank's part of the next operation."""
        if rank in self._pending:
            raise DisagreementError(
                f"virtual rank {rank} issued {request.kind} ({request.phase}) before its {self._pending[rank].kind} "
                f"({self._pending[rank].phase}) was done: yield each work before the next"
            )
        self._pending[rank] = request

    def _complete(self) -> None:
        if missing := [rank for rank in range(self.size) if rank not in self._pending]:
            raise DisagreementError(f"virtual rank {missing[0]} yielded a work that it had not just issued")
        requests = [self._pending[rank] for rank in range(self.size)]
        for rank, request in enumerate(requests):
            if request.like != requests[0].like:
                raise DisagreementError(
                    f"virtual rank 0 issued {requests[0].like} and rank {rank} issued {request.like}: "
                    "every rank must issue the same operations"
                )
        self._pending.clear()
        _OPERATIONS[requests[0].kind](requests, self.byte_counts)
        for request in requests:
            request.work.done = True


def _all_to_all(requests: Sequence[_Request], counted: ByteCounts) -> None:
    size = len(requests)
    row_nbytes = _row_nbytes(requests[0].given)
    if requests[0].like[-1]:
        rows = _even_rows(requests[0], size)
        sent = torch.stack([r.given.reshape(size, rows, *r.given.shape[1:]) for r in requests])
        for rank, request in enumerate(requests):
            request.output.view(size, rows, *request.output.shape[1:]).copy_(sent[:, rank])
        counted.add_pairs(requests[0].phase, np.full((size, size), float(rows * row_nbytes)))
        return
    counts = np.array([r.given_counts for r in requests], dtype=np.int64)
    expected = np.array([r.output_counts for r in requests], dtype=np.int64)
    if wrong := np.argwhere(expected != counts.T).tolist():
        receiver, sender = wrong[0]
        raise DisagreementError(
            f"virtual rank {sender} sends {counts[sender, receiver]} rows to rank {receiver}, which expects "
            f"{expected[receiver, sender]} ({requests[0].phase})"
        )
    unit = max(1, int(np.gcd.reduce(counts, axis=None)))  # rows that always travel together: fewer, and wider, to sort
    everything = torch.cat([r.given for r in requests]).unflatten(0, (-1, unit))
    parts = counts // unit
    starts = (np.cumsum(parts.ravel()) - parts.ravel()).reshape(size, size)  # of the part from i to j
    lengths = parts.T.ravel()
    shifts = starts.T.ravel() - (np.cumsum(lengths) - lengths)
    order = torch.from_numpy(np.repeat(shifts, lengths) + np.arange(lengths.sum()))
    outputs = everything[order.to(everything.device)].flatten(0, 1).split(counts.sum(axis=0).tolist())
    for request, output in zip(requests, outputs, strict=True):
        request.output.copy_(output)
    counted.add_pairs(requests[0].phase, counts.astype(np.float64) * row_nbytes)


def _all_gather(requests: Sequence[_Request], counted: ByteCounts) -> None:
    if any(r.output_counts != requests[0].output_counts for r in requests):
        raise DisagreementError(f"virtual ranks expect different parts of an all-gather ({requests[0].phase})")
    everything = torch.cat([r.given for r in requests])
    for request in requests:
        request.output.copy_(everything.view_as(request.output))
    counted.add_ring_gather(requests[0].phase, np.array([float(r.given.nbytes) for r in requests]))


def _sum(requests: Sequence[_Request], counted: ByteCounts) -> None:
    total = requests[0].given.clone()
    for request in requests[1:]:
        total += request.given
    _share(total, requests, counted)


def _maximum(requests: Sequence[_Request], counted: ByteCounts) -> None:
    _share(torch.stack([r.given for r in requests]).amax(dim=0), requests, counted)


def _share(result: torch.Tensor, requests: Sequence[_Request], counted: ByteCounts) -> None:
    for request in requests:
        request.output.copy_(result)
    counted.add_ring_reduce(requests[0].phase, float(result.nbytes))


_OPERATIONS: dict[str, Callable[[Sequence[_Request], ByteCounts], None]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "sum": _sum,
    "maximum": _maximum,
}


def _row_nbytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * int(np.prod(tensor.shape[1:], dtype=np.int64))


def _even_rows(request: _Request, size: int) -> int:
    rows, rest = divmod(len(request.given), size)
    if rest:
        raise ValueError(f"{len(request.given)} rows cannot be divided evenly among {size} ranks ({request.phase})")
    return rows
