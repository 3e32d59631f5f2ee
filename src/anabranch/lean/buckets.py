"""The buckets of the plan in force under Lean, and slots: the memory in which a bucket's gradient is one tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import nn
from torch.futures import Future

from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.exchange.model_parameters import shaped
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.lean.optimizers import BucketOptimizer
from anabranch.planning.footprint import SLOTS
from anabranch.values.plan import Bucket

CHUNK_NUMEL = 4 << 20  # elements added to a residual at a time; a temporary tensor of this size is needed


@dataclass(eq=False)
class LiveBucket:
    """One bucket of the plan in force, and its progress in this backward pass.

    residual       that of its exchange; None for a dense bucket
    views          of the residual by parameter name, to which gradients are added as they arrive; None if gradients
                   stay in ``parameter.grad`` until the bucket is complete
    finite_flags   for each gradient added so far whether it was finite on this rank; others were left out
    arrived        names of the parameters whose gradients have arrived
    frozen         names of the parameters that were frozen after wrapping: no gradient of theirs may arrive
    missing        names of the parameters that got no gradient on this rank; set by ``find_missing``
    """

    planned: Bucket
    parameters: Sequence[nn.Parameter]
    optimizer: BucketOptimizer
    residual: BucketState | None = None
    views: Mapping[str, torch.Tensor] | None = None
    finite_flags: list[torch.Tensor] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    missing: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self.dtype = self.parameters[0].dtype

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        return list(zip(self.planned.names, self.parameters, strict=True))

    @property
    def complete(self) -> bool:
        """Whether all expected gradients have arrived."""
        return len(self.arrived) + len(self.frozen) >= len(self.parameters)

    def begin_backward(self, residual: BucketState | None) -> None:
        """Expect a gradient for every parameter that is not frozen now."""
        self.arrived.clear()
        self.frozen = {name for name, parameter in self.named if not parameter.requires_grad}
        self.residual = residual
        if residual is not None:
            residual.accumulates_in_place = True
            residual.hold(self.frozen)
        self.views = None if residual is None or residual.packed is not None else residual.pieces()

    def find_missing(self) -> None:
        """Find the parameters without a gradient, when the bucket is launched; frozen ones need none."""
        named = () if self.complete else self.named
        self.missing = [n for n, p in named if n not in self.arrived and p.grad is None and p.requires_grad]

    def fill(self, slot: "Slot") -> None:
        """Make a slot ready for the exchange: move all gradients to it, or to the residual where there is one.

        Of a bucket with a residual, the slot begins as zeros, with one infinity if a gradient was not finite on this
        rank: every rank learns of it and skips the update.
        """
        if self.residual is None:
            self._flatten_into(slot.tensor)
            return
        if slot.unpacked is not None:
            self.residual.unpack(slot.unpacked)
        self.views = self.residual.pieces()
        for name, parameter in self.named:  # those that were not added as they came
            self.add_to_residual(name, parameter)
        slot.tensor.zero_()
        flags, self.finite_flags = self.finite_flags, []
        if flags and len(slot.tensor):
            slot.tensor[0] = torch.where(torch.stack(flags).all(), 0.0, inf)

    def add_to_residual(self, name: str, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to the residual and free it; one that is not below SUMMABLE_BELOW is left out.

        The gradient is never written to: it may be a view of a tensor that autograd still needs. A frozen parameter
        keeps a gradient that it got before, under no_sync().
        """
        if self.residual is None or self.views is None or parameter.grad is None or name in self.frozen:
            return
        gradient = torch.atleast_1d(parameter.grad.detach())
        parameter.grad = None
        target = torch.atleast_1d(shaped(self.views[name], parameter))
        finite = all_finite(gradient, below=SUMMABLE_BELOW)
        self.finite_flags.append(finite)
        rows = max(1, CHUNK_NUMEL * len(gradient) // max(1, gradient.numel()))
        for added, part in zip(gradient.split(rows), target.split(rows), strict=True):
            torch.where(finite, added + part, part, out=part)

    def _flatten_into(self, slot: torch.Tensor) -> None:
        """Move all gradients to a slot, one after another; zeros for missing gradients and frozen parameters."""
        pieces = slot.split([parameter.numel() for parameter in self.parameters])
        for (name, parameter), piece in zip(self.named, pieces, strict=True):
            if parameter.grad is None or name in self.frozen:
                piece.zero_()
            else:
                shaped(piece, parameter).copy_(parameter.grad)
                parameter.grad = None


@dataclass(eq=False)
class Slot:
    """Memory of a bucket, not initialised; ``last_use`` completes when it may be freed.

    unpacked   for the bucket's residual in float32, where that is stored rounded
    kept       until the end of backward
    """

    tensor: torch.Tensor
    unpacked: torch.Tensor | None
    kept: bool
    last_use: Future[torch.Tensor] | None = None

    def wait(self) -> None:
        """Wait for the last use, and raise its exception: the host waits on a CPU, the current stream on a GPU."""
        last_use, self.last_use = self.last_use, None
        if last_use is not None:
            last_use.wait()

    def free(self) -> None:
        """Free the memory. To drop tensors is not enough: a lane keeps its last works, and these what they sent."""
        self.tensor.untyped_storage().resize_(0)
        if self.unpacked is not None:
            self.unpacked.untyped_storage().resize_(0)


class Slots:
    """A slot for every bucket of a step, as large as the bucket; SLOTS have memory at a time, and those that are kept.

    Memory is taken when a bucket is complete, so when the activations of the layers behind it are gone. None is kept
    between steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[Slot] = []

    def acquire(self, numel: int, dtype: torch.dtype, unpacks: bool = False, kept: bool = False) -> Slot:
        """Return memory for a bucket of ``numel`` elements; first wait for the last use of the oldest, and free it."""
        in_turn = [slot for slot in self._slots if not slot.kept]
        if len(in_turn) >= SLOTS and not kept:
            oldest = in_turn[0]
            oldest.wait()
            oldest.free()
            self._slots.remove(oldest)
        unpacked = torch.empty(numel, dtype=torch.float32, device=self._device) if unpacks else None
        slot = Slot(torch.empty(numel, dtype=dtype, device=self._device), unpacked, kept)
        self._slots.append(slot)
        return slot

    def wait(self) -> None:
        """Wait for all uses, and raise the exception of one that failed."""
        for slot in self._slots:
            slot.wait()

    def free(self) -> None:
        """Free all memory: the step is over, and nothing reads an average any more."""
        while self._slots:
            self._slots.pop().free()
