"""The update of a bucket behind its exchange; an average that is not finite updates nothing, on any rank.

The average is the same on all ranks, so each rank sees by itself whether it is finite. On a CPU the lane's thread
checks and steps. On a GPU the host must not wait for the exchange inside backward. Fused optimizers get the answer on
the device (``found_inf``). For others the answer is copied to the host and the step is launched when it has arrived, at
the latest when the bucket's slot is needed again or backward ends.
"""

from collections import deque
from dataclasses import dataclass
from threading import Lock

import torch

from anabranch.comm.dense import all_finite
from anabranch.comm.exchange import Steps, record_stream
from anabranch.errors import UpdateError
from anabranch.lean.optimizers import BucketOptimizer


@dataclass(frozen=True)
class PendingStep:
    """A step that is launched when the host knows whether the average is finite and which parameters were used."""

    optimizer: BucketOptimizer
    average: torch.Tensor
    finite: torch.Tensor  # in pinned memory
    used: torch.Tensor | None  # in pinned memory
    copied: torch.cuda.Event  # when both have arrived there


class BucketUpdater:
    """Steps the optimizers of buckets. ``loss_scale``: by what a GradScaler multiplied the loss."""

    def __init__(self, clip_norm: float | None) -> None:
        self.loss_scale = 1.0
        self._clip_norm = clip_norm
        self._found_inf: list[torch.Tensor] = []  # on the device, of fused optimizers: 1 for a skipped step
        self._pending: deque[PendingStep | None] = deque()  # by bucket; None: its step needs nothing from the host
        self._stream: torch.cuda.Stream | None = None  # of its own: on a lane's, a step would wait for later exchanges
        self._finite: dict[BucketOptimizer, torch.Tensor] = {}  # in the last backward pass
        self._skipped = 0  # as far as the host knows
        self._skipped_lock = Lock()  # on a CPU several lanes, which are threads, count

    def exchange_and_step(
        self, exchange: Steps, average: torch.Tensor, optimizer: BucketOptimizer, used: torch.Tensor | None = None
    ) -> Steps:
        """Run ``exchange``, which leaves the average in ``average``, and behind it the step of ``optimizer``.

        ``used`` has a number for each of the bucket's parameters: 0 if no rank used it. None: all were used.
        """
        yield from exchange
        if used is not None:  # a residual may also reach parameters that no rank used in this step
            used = (used != 0).logical_or_(optimizer.nonzero(average))
        finite = self._finite[optimizer] = all_finite(average)
        if self.loss_scale != 1.0:
            average.div_(self.loss_scale)
        if self._clip_norm is not None:
            norm = torch.linalg.vector_norm(average, dtype=torch.promote_types(average.dtype, torch.float32))
            average.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if not average.is_cuda:
            self._step(optimizer, average, bool(finite), used)
        elif optimizer.takes_found_inf and used is None:
            self._found_inf.append(finite.logical_not().float())
            optimizer.step(average, found_inf=self._found_inf[-1])
            self._pending.append(None)
        else:
            record_stream(finite)
            finite_on_host = _to_host(finite)
            used_on_host = None if used is None else _to_host(used)
            copied = torch.cuda.Event()
            copied.record()
            self._pending.append(PendingStep(optimizer, average, finite_on_host, used_on_host, copied))

    def launch_pending(self, keep: int = 0) -> None:
        """Launch all pending steps but those of the last ``keep`` buckets; blocks the host until it has the answers."""
        while len(self._pending) > keep:
            if (pending := self._pending.popleft()) is None:
                continue
            pending.copied.synchronize()
            device = pending.average.device
            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                self._step(pending.optimizer, pending.average, bool(pending.finite), pending.used)
            torch.cuda.current_stream(device).wait_stream(self._stream)  # before the slot is used again
        if keep == 0 and len(self._found_inf) > 1:  # lanes have been waited for; skipped() may never be called
            record_stream(*self._found_inf)
            self._found_inf = [torch.stack(self._found_inf).sum()]

    def was_applied(self, optimizer: BucketOptimizer) -> bool:
        """Whether this bucket was updated in the last backward pass; waits for the device."""
        return optimizer in self._finite and bool(self._finite[optimizer])

    def forget_buckets(self) -> None:
        """Drop what refers to the buckets of the plan so far: the plan changes."""
        self._finite.clear()

    def skipped(self) -> int:
        """Count the updates that were left out so far; waits for the device where only it knows."""
        if self._found_inf:
            self._skipped += int(torch.stack(self._found_inf).sum())
            self._found_inf = []
        return self._skipped

    def _step(self, optimizer: BucketOptimizer, average: torch.Tensor, finite: bool, used: torch.Tensor | None) -> None:
        if finite:
            try:
                optimizer.step(average, used=None if used is None else used.tolist())
            except Exception as error:
                raise UpdateError(f"the optimizer's step failed on this rank: {error!r}") from error
        else:
            with self._skipped_lock:
                self._skipped += 1


def _to_host(answer: torch.Tensor) -> torch.Tensor:
    """Copy to pinned memory on the current stream; does not wait."""
    return torch.empty_like(answer, device="cpu", pin_memory=True).copy_(answer, non_blocking=True)
