"""The update of a bucket behind its exchange: nothing is updated with a gradient that is not finite, on any rank.

The average is the same on all ranks, so each sees by itself whether it is finite. On a CPU the lane's thread looks and
steps. On a GPU the host must not wait for the exchange inside backward: fused optimizers are told on the device, for
others the answer is copied to the host, and the step is launched when it is there, at the latest when its slot or the
end of backward comes.
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
    """A step that waits for the host to know whether its average is finite, and which parameters were used."""

    optimizer: BucketOptimizer
    average: torch.Tensor
    finite: torch.Tensor  # in pinned memory
    used: torch.Tensor | None  # as well
    known: torch.cuda.Event


class Updates:
    """Steps the optimizers of buckets. ``skipped``: steps that were left out, as far as the host knows: ``count()``."""

    def __init__(self, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        self.scale = 1.0  # of the loss whose gradients these are
        self._found_inf: list[torch.Tensor] = []  # on the device, of fused optimizers
        self._due: deque[PendingStep | None] = deque()  # by bucket; None for one whose step needs no word from the host
        self._stream: torch.cuda.Stream | None = None  # of its own: on a lane's, a step would wait for later exchanges
        self._finite: dict[BucketOptimizer, torch.Tensor] = {}  # in the last step
        self._counting = Lock()  # lanes are threads on a CPU
        self.skipped = 0

    def after(
        self, exchange: Steps, average: torch.Tensor, optimizer: BucketOptimizer, used: torch.Tensor | None = None
    ) -> Steps:
        """The exchange that leaves the average in ``average``, and the step with it.

        ``used``, if it may be 0 for any: what is not 0 then, for each of the bucket's parameters that any rank used.
        """
        yield from exchange
        if used is not None:  # what had waited may arrive for others too
            used = (used != 0).logical_or_(optimizer.touched(average))
        finite = self._finite[optimizer] = all_finite(average)
        if self.scale != 1.0:
            average.div_(self.scale)
        if self._clip_norm is not None:
            norm = torch.linalg.vector_norm(average, dtype=torch.promote_types(average.dtype, torch.float32))
            average.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if not average.is_cuda:
            self._step(optimizer, average, bool(finite), used)
        elif optimizer.takes_found_inf and used is None:
            self._found_inf.append(finite.logical_not().float())
            optimizer.step(average, found_inf=self._found_inf[-1])
            self._due.append(None)
        else:
            record_stream(finite)
            whether, which = _to_host(finite), None if used is None else _to_host(used)
            known = torch.cuda.Event()
            known.record()
            self._due.append(PendingStep(optimizer, average, whether, which, known))

    def settle(self, keep: int = 0) -> None:
        """Launch the steps that are due, but for those of the last ``keep`` buckets.

        Waits on the host for what it must know.
        """
        while len(self._due) > keep:
            if (due := self._due.popleft()) is None:
                continue
            due.known.synchronize()
            self._stream = self._stream or torch.cuda.Stream(due.average.device)
            with torch.cuda.stream(self._stream):
                self._step(due.optimizer, due.average, bool(due.finite), due.used)
            torch.cuda.current_stream(due.average.device).wait_stream(self._stream)  # before the slot is used again
        if keep == 0 and len(self._found_inf) > 1:  # lanes have been waited for; nobody may ever ask for the count
            record_stream(*self._found_inf)
            self._found_inf = [torch.stack(self._found_inf).sum()]

    def applied(self, optimizer: BucketOptimizer) -> bool:
        """Whether it was stepped in the last backward pass; waits for the device."""
        return optimizer in self._finite and bool(self._finite[optimizer])

    def forget(self) -> None:
        """The buckets are no more."""
        self._finite.clear()

    def count(self) -> int:
        """Steps left out so far; waits for the device where it alone knows."""
        if self._found_inf:
            self.skipped += int(torch.stack(self._found_inf).sum())
            self._found_inf = []
        return self.skipped

    def _step(self, optimizer: BucketOptimizer, average: torch.Tensor, finite: bool, used: torch.Tensor | None) -> None:
        if finite:
            try:
                optimizer.step(average, used=None if used is None else used.tolist())
            except Exception as error:
                raise UpdateError(f"the optimizer's step failed on this rank: {error!r}") from error
        else:
            with self._counting:
                self.skipped += 1


def _to_host(answer: torch.Tensor) -> torch.Tensor:
    """A copy that is there when the current stream is."""
    return torch.empty_like(answer, device="cpu", pin_memory=True).copy_(answer, non_blocking=True)
