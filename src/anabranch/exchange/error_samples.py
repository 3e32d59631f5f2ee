"""The measured error of compressed averages: a slice of a bucket is also averaged exactly, once in 200 exchanges."""

from collections import Counter
from itertools import chain
from math import ceil

import torch

from anabranch.exchange.dense import dense
from anabranch.exchange.interface import Group, Steps, record_stream
from anabranch.exchange.residuals.store import Residuals
from anabranch.values.kinds.names import is_dense
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

    def due(self, index: int) -> bool:
        """Count an exchange of bucket ``index`` that begins now; whether its error is to be sampled."""
        if is_dense(self._plan.buckets[index].collective):
            return False
        self._exchanges[index] += 1
        number, wait = self._turn(index)
        return number >= 0 and wait == 0

    def sampled(self, exchange: Steps, index: int, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """``exchange`` of bucket ``index``; before it a slice is averaged exactly, and compared behind it."""
        slices = max(1, ceil(buffer.numel() / SLICE_NUMEL))
        start = self._turn(index)[0] % slices * SLICE_NUMEL
        where = slice(start, start + SLICE_NUMEL)
        part = buffer.view(-1)[where]
        exact = torch.empty_like(part, dtype=torch.float32)
        averaging = self._average(self._plan.buckets[index], where, part, exact, group, divisor)
        return chain(averaging, exchange, self._compare(index, part, exact))

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

    def _turn(self, index: int) -> tuple[int, int]:
        """The number of the bucket's sample, and how many exchanges it was ago; below zero before the first."""
        return divmod(self._exchanges[index] - FIRST - index, PERIOD)

    def _average(
        self, bucket: Bucket, where: slice, part: torch.Tensor, exact: torch.Tensor, group: Group, divisor: float
    ) -> Steps:
        """``exact`` ← the exact average of what ranks offer in this part of their buffers."""
        state, velocity = self._residuals.of(bucket), self._residuals.velocity(bucket)
        exact.copy_(part)
        if velocity is not None:
            exact.mul_(1 - velocity.decay).add_(velocity.values[where], alpha=velocity.decay)
        if state is not None:
            exact += state.residual[where]
        yield from dense(exact, group, divisor)

    def _compare(self, index: int, part: torch.Tensor, exact: torch.Tensor) -> Steps:
        """Compare an average with the exact one; it sends nothing, and is a generator to run behind the exchange."""
        record_stream(exact)
        squares = torch.stack([(part - exact).square().sum(), exact.square().sum()]).double()
        finite = squares.isfinite().all()  # a step with NaN, which a loss scaler skips, is no sample
        before = self._squares[index] * KEPT if index in self._squares else torch.zeros_like(squares)
        self._squares[index] = torch.where(finite, before + squares, before)
        yield from ()
