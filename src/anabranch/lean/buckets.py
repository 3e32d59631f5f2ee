"""The buckets of the plan in force under Lean: how far each has come, and its exchange with the update behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from anabranch.comm.collectives import ResidualState
from anabranch.comm.dense import all_finite
from anabranch.comm.exchange import BucketExchange, Group, Steps, issued, record_stream
from anabranch.comm.flat import shaped
from anabranch.lean.optimizers import BucketOptimizer
from anabranch.lean.residuals import ResidualStore
from anabranch.lean.update import BucketUpdater
from anabranch.plan import Bucket

# Of the largest number there is: what is larger would stay for ever, since no sum over ranks that it is in is finite.
HUGE = 1 << 20
CHUNK_NUMEL = 4 << 20  # added to what waits at a time: as much memory it takes


@dataclass
class LiveBucket:
    """One bucket of the plan in force, and how far it has come in this backward pass.

    ``state`` is what its exchange remembers, None if it travels dense; ``waiting`` what gradients are added to as they
    come, None if they stay where they are until the bucket is complete. ``finite``: whether each that was added so far
    was, on this rank; those that were not are left out. ``expected``: how many gradients may come, the others being of
    parameters that were frozen since. ``missing``: parameters that got no gradient on this rank.
    """

    planned: Bucket
    parameters: Sequence[nn.Parameter]
    optimizer: BucketOptimizer
    sparse: bool
    state: ResidualState | None = None
    waiting: Mapping[str, torch.Tensor] | None = None
    finite: list[torch.Tensor] = field(default_factory=list)
    come: set[str] = field(default_factory=set)
    expected: int = 0
    missing: Sequence[str] = ()

    @property
    def numel(self) -> int:
        """Elements of all its gradients."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of all its gradients."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """Of all its gradients."""
        return self.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Whether all its gradients have come."""
        return len(self.come) >= self.expected

    def expect(self) -> None:
        """A backward pass begins: all that is not frozen."""
        self.expected = sum(parameter.requires_grad for parameter in self.parameters)

    def look_for_missing(self) -> None:
        """Note which parameters have no gradient when it is launched; what was frozen needs none."""
        named = () if self.complete else zip(self.planned.names, self.parameters, strict=True)
        self.missing = [n for n, p in named if n not in self.come and p.grad is None and p.requires_grad]

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to what waits, and take it away; one that is not finite, or huge, is left out.

        It is never written to: it may be a view of one that autograd has yet to hand to others.
        """
        if self.state is None or self.waiting is None or parameter.grad is None:
            return
        gradient, parameter.grad = torch.atleast_1d(parameter.grad.detach()), None
        waiting = torch.atleast_1d(shaped(self.waiting[name], parameter))
        finite = all_finite(gradient, below=torch.finfo(gradient.dtype).max / HUGE)
        self.finite.append(finite)
        self.state.record_norms(gradient)
        rows = max(1, CHUNK_NUMEL * len(gradient) // max(1, gradient.numel()))
        for part, onto in zip(gradient.split(rows), waiting.split(rows), strict=True):
            torch.where(finite, part + onto, onto, out=onto)

    def all_finite(self) -> torch.Tensor | None:
        """Whether all that were added were finite, on the stream that added them; the next step begins anew."""
        finite, self.finite = self.finite, []
        return torch.stack(finite).all() if finite else None

    def move_to(self, slot: torch.Tensor) -> None:
        """Move all gradients to a slot, one after another; those that did not come are zeros."""
        for parameter, piece in zip(self.parameters, slot.split([p.numel() for p in self.parameters]), strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                shaped(piece, parameter).copy_(parameter.grad)
                parameter.grad = None


class UpdatingExchange:
    """An exchange with the update of the bucket's parameters behind it.

    ``find_unused``: after each exchange ranks tell each other which parameters they have used. ``buckets`` are those of
    the plan in force, by the names of their parameters; the engine sets them.
    """

    def __init__(
        self, exchange: BucketExchange, updates: BucketUpdater, residuals: ResidualStore, find_unused: bool = False
    ) -> None:
        self._exchange = exchange
        self._updates = updates
        self._residuals = residuals
        self._find_unused = find_unused
        self.buckets: Mapping[tuple[str, ...], LiveBucket] = {}

    def on_side_stream(self, kind: str) -> bool:
        return self._exchange.on_side_stream(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        live = self.buckets[bucket.names]
        exchange = self._exchange.steps(bucket, buffer, group, divisor)
        if live.state is not None:
            exchange = self._around(exchange, live.state, buffer, live.all_finite())
        used = None
        if self._find_unused and (live.missing or dist.get_world_size(group) > 1):  # one rank need not be told
            # Made on the device: a copy from the host would have to be waited for.
            used = torch.ones(len(bucket.names), device=buffer.device)
            for name in live.missing:
                used[bucket.names.index(name)] = 0.0
            exchange = _most(exchange, used, group)
        # Where none is missing, this rank knows that every one was used, and need not read what the others say.
        return self._updates.exchange_and_step(exchange, buffer, live.optimizer, used if live.missing else None)

    def _around(
        self, exchange: Steps, state: ResidualState, buffer: torch.Tensor, finite: torch.Tensor | None
    ) -> Steps:
        """Gradients have been added to what waits, so there are none in the slot; it tells whether they were finite."""
        buffer.zero_()
        state.accumulates_in_place = True
        if finite is not None and len(buffer):
            record_stream(finite)
            buffer[0] = torch.where(finite, 0.0, float("inf"))
        yield from exchange
        self._residuals.store(state)


def _most(exchange: Steps, numbers: torch.Tensor, group: Group) -> Steps:
    """An exchange, and behind it the largest of each number on any rank."""
    yield from exchange
    record_stream(numbers)
    yield issued(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True))
