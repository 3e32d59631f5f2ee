"""The measured error of compressed averages: now and then a slice of a bucket is also averaged exactly."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from anabranch.exchange.contracts import Group, Steps, record_stream
from anabranch.exchange.dense import dense
from anabranch.values.plan import Bucket

FIRST = 50  # exchanges of a bucket before its first sample, so that no step of a trial has one
PERIOD = 200  # exchanges between two samples
SLICE_NUMEL = 1 << 18  # elements of a sample: a message of 1 MiB, so that sampling costs next to nothing
MEMORY = 0.8  # share of the former samples that counts beside the newest


class WithResidual(Protocol):
    """What is added to a rank's gradients before they are sent; float32, on their device while they are exchanged."""

    residual: torch.Tensor


class Velocity(NamedTuple):
    """A rank sends decay · values + (1 − decay) · gradients in place of gradients; float32, on their device."""

    values: torch.Tensor
    decay: float


@dataclass
class _Samples:
    """Of one bucket: its place among the buckets, its exchanges so far, and the sums of its samples."""

    place: int
    exchanges: int = 0
    squares: torch.Tensor | None = None  # of the errors, and of the exact averages


class ErrorSamples:
    """Relative errors of averages, by the names in a bucket.

    The exact average is that of what ranks offer: their gradients, or velocities where these are sent, and their
    residuals where these are kept. It is the same whether gradients wait in the buffer, or were added to the residual
    as they came (Lean).

    Every rank samples the same buckets in the same steps, because all count the same exchanges. Buckets take turns.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[str, ...], _Samples] = {}

    def watched(
        self,
        exchange: Steps,
        bucket: Bucket,
        buffer: torch.Tensor,
        group: Group,
        divisor: float,
        state: WithResidual | None = None,
        velocity: Velocity | None = None,
    ) -> Steps:
        """The exchange of a bucket, sampled if that is due. It averages the buffer and the residual of ``state``.

        With ``velocity``, as it is before the exchange, that takes the place of the buffer.
        """
        samples = self._samples.setdefault(bucket.names, _Samples(len(self._samples)))
        samples.exchanges += 1
        number, wait = divmod(samples.exchanges - FIRST - samples.place, PERIOD)
        if wait or number < 0:
            return exchange
        return self._sampled(exchange, samples, number, buffer, group, divisor, state, velocity)

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
        """Begin to count exchanges anew; what was sampled stays."""
        for samples in self._samples.values():
            samples.exchanges = 0

    def clear(self) -> None:
        """Forget all samples, since the plan has changed."""
        self._samples = {}

    @staticmethod
    def _sampled(
        exchange: Steps,
        samples: _Samples,
        number: int,
        buffer: torch.Tensor,
        group: Group,
        divisor: float,
        state: WithResidual | None,
        velocity: Velocity | None,
    ) -> Steps:
        start = number % -(-buffer.numel() // SLICE_NUMEL) * SLICE_NUMEL
        part = buffer.view(-1)[start:][:SLICE_NUMEL]
        exact = part.to(torch.float32, copy=True)
        if velocity is not None:
            exact.mul_(1 - velocity.decay).add_(velocity.values[start:][:SLICE_NUMEL], alpha=velocity.decay)
        if state is not None:
            exact += state.residual[start:][:SLICE_NUMEL]
        yield from dense(exact, group, divisor)
        record_stream(exact)
        yield from exchange
        squares = torch.stack([(part - exact).square().sum(), exact.square().sum()]).double()
        finite = squares.isfinite().all()  # a step with NaN, which a loss scaler skips, is no sample
        before = torch.zeros_like(squares) if samples.squares is None else samples.squares * MEMORY
        samples.squares = torch.where(finite, before + squares, before)
