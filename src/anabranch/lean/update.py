"""The update of a bucket behind its exchange; an average that is not finite updates nothing, on any rank.

The average is the same on all ranks, so each rank sees by itself whether it is finite. On a CPU the lane's thread
checks and steps. On a GPU the host must not wait for the exchange inside backward. Fused optimizers get the answer on
the device (``found_inf``). For others the answer is copied to the host and the step is launched when it has arrived, at
the latest when the bucket's slot is needed again or backward ends.

Where gradients are clipped by the norm over all of them, updates are held until the end of backward. Then one average
that is not finite leaves out the whole step, as a GradScaler does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import nn

from anabranch.exchange.contracts import Steps, record_stream
from anabranch.exchange.dense import all_finite
from anabranch.lean.clipping import Clipping, StepNorm
from anabranch.lean.held_updates import HeldUpdate
from anabranch.lean.optimizers import BucketOptimizer
from anabranch.values.errors import UpdateError


@dataclass(frozen=True)
class Pending:
    """Work on a bucket's average that is launched when the host has what it depends on: behind ``arrived``."""

    average: torch.Tensor
    arrived: torch.cuda.Event
    launch: Callable[[], None]


class BucketUpdater:
    """Steps the optimizers of buckets.

    clipping     by the norm over all gradients; None: not at all
    parameters   those of the model, in its order
    clip_value   the largest magnitude of an element of an average; None: any

    ``loss_scale``: by what a GradScaler multiplied the loss. ``grad_norm``: the norm over all average gradients of the
    last step, before clipping, on the device; None without ``clipping`` and before the first step.
    """

    def __init__(
        self,
        clipping: Clipping | None = None,
        parameters: Sequence[nn.Parameter] = (),
        clip_value: float | None = None,
    ) -> None:
        self._clip_value = clip_value
        self.loss_scale = 1.0
        self.grad_norm: torch.Tensor | None = None
        self.holds_updates = clipping is not None and clipping.holds_updates
        self._clipping = clipping
        self._norm = None if clipping is None else StepNorm(clipping.norm_type, parameters)
        self._held: list[HeldUpdate] = []  # in this backward pass
        self._found_inf: list[torch.Tensor] = []  # on the device, of fused optimizers: 1 for a skipped step
        self._pending: deque[Pending | None] = deque()  # by bucket; None: its update needs nothing from the host
        self._stream: torch.cuda.Stream | None = None  # of its own: on a lane's, a step would wait for later exchanges
        self._finite: dict[BucketOptimizer, torch.Tensor] = {}  # in the last backward pass
        self._skipped = 0  # as far as the host knows
        self._skipped_lock = Lock()  # on a CPU several lanes, which are threads, count

    def exchange_and_step(
        self,
        exchange: Steps,
        average: torch.Tensor,
        optimizer: BucketOptimizer,
        used: torch.Tensor | None = None,
        put_back: Callable[[torch.Tensor], None] | None = None,
    ) -> Steps:
        """Run ``exchange``, which leaves the average in ``average``, and behind it the step of ``optimizer``.

        ``used`` has a number for each of the bucket's parameters: 0 if no rank used it. None: all were used.
        ``put_back`` gives an average that nobody applies back to the bucket's residual. None: it has no residual, and
        if updates are held, nobody else uses the memory of ``average`` before backward ends.
        """
        yield from exchange
        if used is not None:  # a residual may also reach parameters that no rank used in this step
            used = (used != 0).logical_or_(optimizer.nonzero(average))
        finite = all_finite(average)
        if self.loss_scale != 1.0:
            average.div_(self.loss_scale)
        if self._clip_value is not None:
            average.clamp_(-self._clip_value, self._clip_value)
        if self._norm is not None:
            self._norm.add(optimizer.parts(average))
        if self.holds_updates:
            self._hold(HeldUpdate(optimizer, average, finite, used, put_back))
        else:
            self._finite[optimizer] = finite
            self._update(optimizer, average, finite, used)

    def _update(
        self, optimizer: BucketOptimizer, average: torch.Tensor, finite: torch.Tensor, used: torch.Tensor | None
    ) -> None:
        """Step at once, on the device's word, or when the host knows."""
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
            self._launch_later(average, lambda: self._step(optimizer, average, bool(finite_on_host), used_on_host))

    def _hold(self, update: HeldUpdate) -> None:
        """Keep an update until the norm is known; a slot that other buckets use, too, is left as soon as possible."""

        def hold() -> None:
            self._held.append(update.compacted())

        if update.put_back is None:
            self._held.append(update)
        elif update.finite.is_cuda:
            self._launch_later(update.average(), hold)
        else:
            hold()

    def _launch_later(self, average: torch.Tensor, launch: Callable[[], None]) -> None:
        """Call ``launch`` when all that the current stream has to do so far is done, before the slot is used again."""
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append(Pending(average, arrived, launch))

    def launch_pending(self, keep: int = 0) -> None:
        """Launch all pending work but that of the last ``keep`` buckets; blocks the host until it has the answers."""
        while len(self._pending) > keep:
            if (pending := self._pending.popleft()) is None:
                continue
            pending.arrived.synchronize()
            device = pending.average.device
            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                pending.launch()
            torch.cuda.current_stream(device).wait_stream(self._stream)  # before the slot is used again
        if keep == 0 and len(self._found_inf) > 1:  # lanes have been waited for; skipped() may never be called
            record_stream(*self._found_inf)
            self._found_inf = [torch.stack(self._found_inf).sum()]

    def finish_step(self) -> RuntimeError | None:
        """Call this when all exchanges of a step are over: launches all that is pending, and applies what is held.

        Returns the error for a norm that is not finite, if one was asked for; then nothing was updated.
        """
        self.launch_pending()
        if self._clipping is None or self._norm is None:
            return None
        self.grad_norm = self._norm.taken()
        refusal = self._clipping.refusal(self.grad_norm)
        if self._held:
            self._apply_held(self._clipping.coefficient(self.grad_norm), refused=refusal is not None)
            self.launch_pending()
        return refusal

    def _apply_held(self, coefficient: torch.Tensor, refused: bool) -> None:
        """Apply all held updates, or none if an average is not finite."""
        held, self._held = self._held, []
        flags = [update.finite for update in held]
        record_stream(*flags, *(update.used for update in held if update.used is not None))
        finite = torch.stack(flags).all() & (not refused)
        self._finite.update((update.optimizer, finite) for update in held)
        on_host = bool(finite) if any(update.waits_for_host for update in held) else None
        while held:
            update = held.pop()
            if on_host is False:
                update.undo(self.loss_scale)
                self._skipped += 1
                continue
            average = update.average().mul_(coefficient)
            if on_host is None:
                self._update(update.optimizer, average, finite, update.used)
            else:
                self._step(update.optimizer, average, on_host, update.used)

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
