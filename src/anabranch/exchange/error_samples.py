"""The measured error of compressed averages: a slice of a bucket is also averaged exactly, once in 200 exchanges."""

from collections import Counter
from math import ceil

import torch

from anabranch.exchange.contracts import Group, Steps, record_stream
from anabranch.exchange.dense import dense
from anabranch.exchange.residuals.store import Residuals
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket, Plan

FIRST = 50  # exchanges of a bucket before its first sample, so that no step of a trial has one
PERIOD = 200  # exchanges between two samples
SLICE_NUMEL = 1 << 18  # elements of a sample: a message of 1 MiB, so that sampling costs next to nothing
KEPT = 0.8  # share of the former samples that counts in addition to the newest


class ErrorSamples:
    """Relative errors of the averages of one plan's compressed buckets.

    The exact average is that of what ranks offer: their gradients, or velocities where these are sent, and their
    residuals where these are kept. It is the same whether gradients wait in the buffer, or were added to the residual
    as they came (Lean).

    Every rank samples the same buckets in the same steps, because all count the same exchanges. Buckets take turns.
    """

    def __init__(self, plan: Plan, residuals: Residuals) -> None:
        self._plan = plan
        self._residuals = residuals
        self._exchanges: Counter[int] = Counter()  # by bucket
        self._squares: dict[int, torch.Tensor] = {}  # by bucket: sums of the squared errors, and of exact averages

    def sampled(self, exchange: Steps, index: int, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """The exchange of bucket ``index``; if a sample is due, one that measures its error."""
        if self._plan.buckets[index].collective == DENSE:
            return exchange
        self._exchanges[index] += 1
        number, wait = divmod(self._exchanges[index] - FIRST - index, PERIOD)
        if wait or number < 0:
            return exchange
        slices = max(1, ceil(buffer.numel() / SLICE_NUMEL))
        return self._measured(exchange, index, number % slices * SLICE_NUMEL, buffer, group, divisor)

    def relative_errors(self) -> dict[Bucket, float]:
        """The size of the error relative to the exact average, of each bucket with samples; waits for the device."""
        found = {}
        for index, squares in self._squares.copy().items():  # a lane may add a bucket meanwhile
            error, exact = squares.tolist()
            if exact > 0:
                found[self._plan.buckets[index]] = (error / exact) ** 0.5
        return found

    def postpone(self) -> None:
        """Sample no errors in the next steps, since they are timed: count exchanges from 0 again; samples stay."""
        self._exchanges.clear()

    def _measured(
        self, exchange: Steps, index: int, start: int, buffer: torch.Tensor, group: Group, divisor: float
    ) -> Steps:
        """Average a slice of what ranks offer exactly, run ``exchange``, and compare."""
        bucket, where = self._plan.buckets[index], slice(start, start + SLICE_NUMEL)
        state, velocity = self._residuals.of(bucket), self._residuals.velocity(bucket)
        part = buffer.view(-1)[where]
        exact = part.to(torch.float32, copy=True)
        if velocity is not None:
            exact.mul_(1 - velocity.decay).add_(velocity.values[where], alpha=velocity.decay)
        if state is not None:
            exact += state.residual[where]
        yield from dense(exact, group, divisor)
        record_stream(exact)
        yield from exchange
        squares = torch.stack([(part - exact).square().sum(), exact.square().sum()]).double()
        finite = squares.isfinite().all()  # a step with NaN, which a loss scaler skips, is no sample
        before = self._squares[index] * KEPT if index in self._squares else torch.zeros_like(squares)
        self._squares[index] = torch.where(finite, before + squares, before)
