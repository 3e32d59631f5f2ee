"""The buckets of the plan in force under Lean: the progress of each in a backward pass, its exchange and its update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.contracts import Group, Steps, issued, record_stream
from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.exchange.flat import shaped
from anabranch.exchange.residuals.state import BucketState
from anabranch.lean.optimizers import BucketOptimizer
from anabranch.lean.residuals import ResidualStore
from anabranch.lean.update import BucketUpdater
from anabranch.values.plan import Bucket

CHUNK_NUMEL = 4 << 20  # elements added to a residual at a time; a temporary tensor of this size is needed


@dataclass
class LiveBucket:
    """One bucket of the plan in force, and its progress in this backward pass.

    state            the residual of its exchange; None for a dense bucket
    residual_views   views of the residual by parameter name, to which gradients are added as they arrive; None if
                     gradients stay in ``parameter.grad`` until the bucket is complete
    finite_flags     for each gradient added so far whether it was finite on this rank; others were left out
    arrived          names of the parameters whose gradients have arrived
    frozen           names of the parameters that were frozen after wrapping
    expected         number of gradients that may arrive: frozen parameters have none
    missing          names of the parameters that got no gradient on this rank
    """

    planned: Bucket
    parameters: Sequence[nn.Parameter]
    optimizer: BucketOptimizer
    state: BucketState | None = None
    residual_views: Mapping[str, torch.Tensor] | None = None
    finite_flags: list[torch.Tensor] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    expected: int = 0
    missing: Sequence[str] = ()

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all gradients."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return self.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Whether all expected gradients have arrived."""
        return len(self.arrived) >= self.expected

    def begin_backward(self) -> None:
        """Expect a gradient for every parameter that is not frozen now."""
        named = zip(self.planned.names, self.parameters, strict=True)
        self.frozen = {name for name, parameter in named if not parameter.requires_grad}
        self.expected = len(self.parameters) - len(self.frozen)

    def find_missing(self) -> None:
        """Set ``missing`` to the parameters without a gradient; frozen ones need none. Called at launch."""
        named = () if self.complete else zip(self.planned.names, self.parameters, strict=True)
        self.missing = [n for n, p in named if n not in self.arrived and p.grad is None and p.requires_grad]

    def add_to_residual(self, name: str, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to the residual and free it; one that is not below SUMMABLE_BELOW is left out.

        The gradient is never written to: it may be a view of a tensor that autograd still needs. A frozen parameter
        keeps a gradient that it got before, under no_sync().
        """
        if self.state is None or self.residual_views is None or parameter.grad is None or name in self.frozen:
            return
        gradient = torch.atleast_1d(parameter.grad.detach())
        parameter.grad = None
        residual = torch.atleast_1d(shaped(self.residual_views[name], parameter))
        finite = all_finite(gradient, below=SUMMABLE_BELOW)
        self.finite_flags.append(finite)
        self.state.record_norms(gradient)
        rows = max(1, CHUNK_NUMEL * len(gradient) // max(1, gradient.numel()))
        for added, target in zip(gradient.split(rows), residual.split(rows), strict=True):
            torch.where(finite, added + target, target, out=target)

    def take_finite_flag(self) -> torch.Tensor | None:
        """Whether all gradients added in this step were finite, on the device; forgets them for the next step.

        None if no gradient was added.
        """
        flags = self.finite_flags
        self.finite_flags = []
        return torch.stack(flags).all() if flags else None

    def flatten_into(self, slot: torch.Tensor) -> None:
        """Move all gradients to a slot, one after another; zeros for missing gradients and frozen parameters."""
        pieces = slot.split([parameter.numel() for parameter in self.parameters])
        for name, parameter, piece in zip(self.planned.names, self.parameters, pieces, strict=True):
            if parameter.grad is None or name in self.frozen:
                piece.zero_()
            else:
                shaped(piece, parameter).copy_(parameter.grad)
                parameter.grad = None


class UpdatingExchange:
    """An exchange followed by the update of the bucket's parameters.

    residuals     where residuals are stored between exchanges
    find_unused   after each exchange ranks tell each other which parameters they have used
    """

    def __init__(self, updates: BucketUpdater, residuals: ResidualStore, find_unused: bool = False) -> None:
        self._updates = updates
        self.residuals = residuals
        self._find_unused = find_unused

    def around(self, live: LiveBucket, buffer: torch.Tensor, exchange: Steps, group: Group) -> Steps:
        """The exchange of a bucket, and its update."""
        bucket = live.planned
        if live.state is not None:
            exchange = self._exchange_residual(exchange, live.state, buffer, live.take_finite_flag())
        used = None
        if self._find_unused and (live.missing or dist.get_world_size(group) > 1):  # a single rank knows already
            # Filled on the device: a copy from the host would make the host wait.
            used = torch.ones(len(bucket.names), device=buffer.device)
            for name in live.missing:
                used[bucket.names.index(name)] = 0.0
            exchange = _then_max_reduce(exchange, used, group)
        # If nothing is missing here, every parameter was used, and this rank need not read the result.
        used = used if live.missing else None
        put_back = None if live.state is None else partial(self._put_back, live.state)
        return self._updates.exchange_and_step(exchange, buffer, live.optimizer, used, put_back)

    def _exchange_residual(
        self, exchange: Steps, state: BucketState, buffer: torch.Tensor, finite: torch.Tensor | None
    ) -> Steps:
        """Run the exchange of a bucket whose gradients are in its residual, and store the residual afterwards.

        The buffer holds no gradients. It is zero, with one infinity if a gradient was not finite on this rank, so that
        every rank learns of it and skips the update.
        """
        buffer.zero_()
        state.accumulates_in_place = True
        if finite is not None and len(buffer):
            record_stream(finite)
            buffer[0] = torch.where(finite, 0.0, float("inf"))
        yield from exchange
        self.residuals.store(state)

    def _put_back(self, state: BucketState, average: torch.Tensor) -> None:
        """Add an average that nobody applies to this rank's residual: over all ranks, what had been sent is back."""
        self.residuals.synchronize()
        with state.whole() as residual:
            residual.add_(average.to(residual.device))


def _then_max_reduce(exchange: Steps, numbers: torch.Tensor, group: Group) -> Steps:
    """Run an exchange, then replace each of ``numbers`` by its maximum over all ranks."""
    yield from exchange
    record_stream(numbers)
    yield issued(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True))
