"""The measured error of compressed averages: a slice of a bucket is also averaged exactly, once in 200 exchanges."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from anabranch.exchange.contracts import Group, Steps, record_stream
from anabranch.exchange.dense import dense
from anabranch.exchange.residuals.store import Residuals
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket

FIRST = 50  # exchanges of a bucket before its first sample, so that no step of a trial has one
PERIOD = 200  # exchanges between two samples
SLICE_NUMEL = 1 << 18  # elements of a sample: a message of 1 MiB, so that sampling costs next to nothing
KEPT = 0.8  # share of the former samples that counts in addition to the newest


@dataclass
class _Samples:
    """The samples of one bucket: its place among the buckets, its exchanges so far, and the sums of its samples."""

    place: int
    exchanges: int = 0
    squares: torch.Tensor | None = None  # sums for the errors, and for the exact averages


class ErrorSamples:
    """Relative errors of averages, by the names in a bucket.

    The exact average is that of what ranks offer: their gradients, or velocities where these are sent, and their
    residuals where these are kept. It is the same whether gradients wait in the buffer, or were added to the residual
    as they came (Lean).

    Every rank samples the same buckets in the same steps, because all count the same exchanges. Buckets take turns.
    """

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._samples: dict[tuple[str, ...], _Samples] = {}

    def sampled(self, exchange: Steps, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        """The exchange of a bucket; if a sample is due, one that measures its error."""
        if bucket.collective == DENSE:
            return exchange
        samples = self._samples.setdefault(bucket.names, _Samples(len(self._samples)))
        samples.exchanges += 1
        number, wait = divmod(samples.exchanges - FIRST - samples.place, PERIOD)
        if wait or number < 0:
            return exchange
        start = number % -(-buffer.numel() // SLICE_NUMEL) * SLICE_NUMEL
        return self._measured(exchange, samples, slice(start, start + SLICE_NUMEL), bucket, buffer, group, divisor)

    def relative_errors(self) -> Mapping[tuple[str, ...], float]:
        """The size of the error relative to the exact average, by bucket; waits for the device."""
        found = {}
        for names, samples in self._samples.items():
            if samples.squares is not None:
                error, exact = samples.squares.tolist()
                if exact > 0:
                    found[names] = (error / exact) ** 0.5
        return found

    def postpone(self) -> None:
        """Sample no errors in the next steps, since they are timed: count exchanges from 0 again; samples stay."""
        for samples in self._samples.values():
            samples.exchanges = 0

    def clear(self) -> None:
        """Forget all samples, since the plan has changed."""
        self._samples = {}

    def _measured(
        self,
        exchange: Steps,
        samples: _Samples,
        where: slice,
        bucket: Bucket,
        buffer: torch.Tensor,
        group: Group,
        divisor: float,
    ) -> Steps:
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
        before = torch.zeros_like(squares) if samples.squares is None else samples.squares * KEPT
        samples.squares = torch.where(finite, before + squares, before)
