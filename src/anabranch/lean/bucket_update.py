"""The update of a bucket behind its exchange; an average that is not finite updates nothing, on any rank.

The average is the same on all ranks, so each rank sees by itself whether it is finite. On a CPU the lane's thread
checks and steps. On a GPU the host must not wait for the exchange inside backward. Fused optimizers get the answer on
the device (``found_inf``). For others the answer is copied to the host and the step is launched when it has arrived, at
the latest when the bucket's slot is needed again or backward ends.

Where gradients are clipped by the norm over all of them, updates are held until the end of backward. Then one average
that is not finite leaves out the whole step, as a GradScaler does. The norm is torch's: the norm of the parameters'
norms, in the model's order, so that the bits are those of ``torch.nn.utils.clip_grad_norm_``, if all have one dtype
(torch takes dtypes one after another).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from threading import Lock

import torch
import torch.distributed as dist
from torch import nn

from anabranch.exchange.dense import all_finite
from anabranch.exchange.interface import Group, Steps, issued, record_stream
from anabranch.lean.buckets import LiveBucket
from anabranch.lean.optimizers import BucketOptimizer
from anabranch.values.errors import UpdateError


@dataclass(frozen=True)
class HeldUpdate:
    """The update of a bucket that is held until the norm is known.

    held     the bucket's average; a sparse tensor where that needs less memory
    finite   whether the average is finite, on the device
    used     as in ``BucketUpdater.update``, over all ranks; None: all were used
    """

    bucket: LiveBucket
    held: torch.Tensor
    finite: torch.Tensor
    used: torch.Tensor | None

    @property
    def waits_for_host(self) -> bool:
        """Whether only the host can leave it out; a fused optimizer of a dense bucket does that on the device."""
        on_device = self.finite.is_cuda and self.bucket.optimizer.takes_found_inf
        return not on_device or self.used is not None or self.bucket.residual is not None

    def average(self) -> torch.Tensor:
        """The bucket's average."""
        if not self.held.is_sparse:
            return self.held
        record_stream(self.held.indices(), self.held.values())
        return self.held.to_dense()

    def compacted(self) -> "HeldUpdate":
        """This update with its average in as little memory of its own as it needs; waits for the device."""
        sparse = self.held.to_sparse()
        nbytes = sparse.indices().nbytes + sparse.values().nbytes
        return replace(self, held=sparse if nbytes < self.held.nbytes else self.held.clone())


class StepNorm:
    """The norm over all average gradients of a step, from the norms of parameters as their buckets arrive."""

    def __init__(self, order: Sequence[nn.Parameter]) -> None:
        self._order = order
        self._norms: dict[nn.Parameter, torch.Tensor] = {}

    def add(self, parts: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Add the average gradients of a bucket; lanes may call it at the same time."""
        if parts:
            norms: Sequence[torch.Tensor] = torch._foreach_norm(list(parts.values()))
            self._norms.update(zip(parts, norms, strict=True))

    def take(self) -> torch.Tensor:
        """The norm of the step that ends, on the device; forgets it for the next step."""
        norms = [self._norms[parameter] for parameter in self._order if parameter in self._norms]
        self._norms.clear()
        record_stream(*norms)
        if not norms:
            return torch.zeros(())
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total


@dataclass(frozen=True)
class Pending:
    """Work on a bucket's average that is launched when the host has what it depends on: behind ``arrived``."""

    average: torch.Tensor
    arrived: torch.cuda.Event
    launch: Callable[[], None]


class BucketUpdater:
    """Steps the optimizers of buckets.

    clip_norm    Lean's clip_norm; None: the norm is not computed
    parameters   those of the model, in its order
    clip_value   the largest magnitude of an element of an average; None: any

    ``loss_scale``: by what a GradScaler multiplied the loss. ``grad_norm``: the norm over all average gradients of the
    last step, before clipping, on the device; None without ``clip_norm`` and before the first step.
    """

    def __init__(
        self,
        clip_norm: float | None = None,
        parameters: Sequence[nn.Parameter] = (),
        clip_value: float | None = None,
    ) -> None:
        self._clip_value = clip_value
        self.loss_scale = 1.0
        self.grad_norm: torch.Tensor | None = None
        self._clip_norm = inf if clip_norm is None else clip_norm
        self.holds_updates = self._clip_norm < inf  # until the norm is known
        self._norm = None if clip_norm is None else StepNorm(parameters)
        self._held: list[HeldUpdate] = []  # in this backward pass
        self._found_inf: list[torch.Tensor] = []  # on the device, of fused optimizers: 1 for a skipped step
        self._pending: deque[Pending | None] = deque()  # by bucket; None: its update needs nothing from the host
        self._stream: torch.cuda.Stream | None = None  # its own: on a lane's, a step would wait for later exchanges
        self._finite: dict[LiveBucket, torch.Tensor] = {}  # in the last backward pass
        self._skipped = 0  # as far as the host knows
        self._skipped_lock = Lock()  # on a CPU several lanes, which are threads, count

    def update(self, bucket: LiveBucket, average: torch.Tensor, used: torch.Tensor | None, group: Group) -> Steps:
        """Step the bucket's optimizer with ``average``, which its exchange has left there; or hold the update.

        ``used``: a number for each of the bucket's parameters, 0 if this rank did not use it; None: all are updated.
        """
        optimizer = bucket.optimizer
        if bucket.residual is not None and bucket.residual.packed is not None:
            bucket.residual.pack()
        if used is not None:
            record_stream(used)
            yield issued(dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group, async_op=True))
            # If nothing is missing here, every parameter was used, and this rank need not read the result. A residual
            # may also reach parameters that no rank used in this step.
            used = (used != 0).logical_or_(optimizer.nonzero(average)) if bucket.missing else None
        finite = all_finite(average)
        if self.loss_scale != 1.0:
            average.div_(self.loss_scale)
        if self._clip_value is not None:
            average.clamp_(-self._clip_value, self._clip_value)
        if self._norm is not None:
            self._norm.add(optimizer.parts(average))
        if self.holds_updates:
            self._hold(HeldUpdate(bucket, average, finite, used))
            return
        self._finite[bucket] = finite
        if not average.is_cuda:
            self._step(optimizer, average, bool(finite), used)
        elif optimizer.takes_found_inf and used is None:
            self._found_inf.append(finite.logical_not().float())
            optimizer.step(average, found_inf=self._found_inf[-1])
            self._pending.append(None)
        else:  # once the host has the flag
            record_stream(finite)
            finite_on_host = _to_host(finite)
            used_on_host = None if used is None else _to_host(used)
            self._launch_later(average, lambda: self._step(optimizer, average, bool(finite_on_host), used_on_host))

    def _hold(self, update: HeldUpdate) -> None:
        """Hold an update until the norm is known; a slot that other buckets use, too, is left as soon as possible."""
        if update.bucket.residual is None:  # nothing else uses the memory of its average before backward ends
            self._held.append(update)
        elif update.finite.is_cuda:
            self._launch_later(update.held, lambda: self._held.append(update.compacted()))
        else:
            self._held.append(update.compacted())

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

    def finish_step(self) -> None:
        """Call this when all exchanges of a step are over: launches all that is pending, and applies what is held."""
        self.launch_pending()
        if self._norm is not None:
            self.grad_norm = self._norm.take()
        if self._held and self.grad_norm is not None:
            self._apply_held(torch.clamp(self._clip_norm / (self.grad_norm + 1e-6), max=1.0))  # as in torch
            self.launch_pending()

    def _apply_held(self, coefficient: torch.Tensor) -> None:
        """Apply all held updates, or none if an average is not finite."""
        held, self._held = self._held, []
        flags = [update.finite for update in held]
        record_stream(*flags, *(update.used for update in held if update.used is not None))
        finite = torch.stack(flags).all()
        self._finite.update((update.bucket, finite) for update in held)
        on_host = bool(finite) if any(update.waits_for_host for update in held) else None
        while held:
            update = held.pop()
            if on_host is False:
                if (residual := update.bucket.residual) is not None:
                    residual.take_back(update.average(), self.loss_scale)
                self._skipped += 1
                continue
            average, optimizer = update.average().mul_(coefficient), update.bucket.optimizer
            if on_host is None:
                self._found_inf.append(finite.logical_not().float())
                optimizer.step(average, found_inf=self._found_inf[-1])
            else:
                self._step(optimizer, average, on_host, update.used)

    def applied(self, names: Collection[str]) -> list[str]:
        """Select those of these parameters that the last backward pass has updated; waits for the device."""
        updated = [bucket for bucket, finite in self._finite.items() if bool(finite)]
        return [name for bucket in updated for name in bucket.planned.names if name in names]

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
