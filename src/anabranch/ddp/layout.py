"""The bucket layout of a live DDP: a plan's buckets, with the comm hook that runs them, or DDP's own.

No ``from __future__ import annotations`` here: DDP refuses hooks whose annotations are text.
"""

import logging
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import get_gradient_edge

from anabranch.ddp.deferred_buffers import DeferredBuffers
from anabranch.ddp.reducer import BucketIndices, ExtensibleDDP, Reduction, built_by_ddp, reduced_parameters, relayout
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.lanes import Lane
from anabranch.exchange.model_parameters import trained_only

log = logging.getLogger("anabranch")


class PlanHook:
    """The comm hook: gives each bucket of a reducer to ``launcher``; the reducer's bucket i is the plan's bucket i.

    ``after_last`` is called with the first lane after the last bucket of a step. The hook counts buckets itself: in
    the first step of a static graph torch gives all of them the index 0.
    """

    def __init__(self, launcher: BucketLauncher, after_last: Callable[[Lane], None]) -> None:
        self._launcher = launcher
        self._after_last = after_last
        self._next = 0

    def run(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002
        """The hook itself; DDP calls it in plan order, the same on every rank."""
        index = self._next
        self._next = (index + 1) % len(self._launcher.plan)
        future = self._launcher.launch(index, bucket.buffer())
        if self._next == 0:
            self._after_last(self._launcher.lanes[0])
        return future


class DdpLayout:
    """The bucket layout of one DDP, which owns this object; ``tuning.runner.Layout`` is the contract.

    ``buffers`` are sent under a plan; DataParallel asks for them where DDP would broadcast them.
    """

    default_label = "DDP's own buckets"
    default_plan = None  # DDP's own buckets are built by DDP

    def __init__(self, ddp: ExtensibleDDP) -> None:
        self._ddp_ref = weakref.ref(ddp)  # weak, so that a model that is not used any more is freed
        self.buffers = DeferredBuffers(lambda: self._ddp._current_buffers())
        self._own_buckets: BucketIndices | None = None  # the buckets that DDP built, once others have replaced them
        self._wrapped = reduced_parameters(ddp)
        self._hooked = {p: get_gradient_edge(p).node for p in self._wrapped.values()}
        # Watched for conversions, which are for all together: the largest of those that have a memory format.
        self._watched = max(self._hooked, key=lambda p: (p.dim() > 3, p.numel()))
        self._strides = self._watched.stride()
        self._launcher: BucketLauncher | None = None  # of the plan in force
        self._reduction: Reduction | None = None
        self._on_averaged: Callable[[], None] | None = None

    @property
    def _ddp(self) -> ExtensibleDDP:
        ddp = self._ddp_ref()
        if ddp is None:
            raise RuntimeError("the DataParallel of this layout was freed: keep a reference to it")
        return ddp

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in reduced_parameters(self._ddp).items() if not self._is_converted(p)}

    def _is_converted(self, parameter: nn.Parameter) -> bool:
        """Whether autograd has given it a new node, without DDP's hook, as it does for another dtype or device."""
        if not parameter.requires_grad or parameter not in self._hooked:
            return False
        return get_gradient_edge(parameter).node is not self._hooked[parameter]

    def report_averaged(self, callback: Callable[[], None]) -> None:
        self._on_averaged = callback

    def may_change(self, averaged: bool) -> bool:
        # With static_graph a new reducer would average after its first backward even under no_sync().
        return averaged or not self._ddp.static_graph

    def can_rebuild(self) -> bool:
        current = dict(self._ddp.module.named_parameters())
        return all(current.get(name) is p and not self._is_converted(p) for name, p in self._wrapped.items())

    def before_forward(self) -> None:
        """Build the buckets again if the memory format has changed: DDP mixes up elements of gradients then.

        DDP itself checks that the last backward has finished.
        """
        if self._watched.stride() != self._strides and not self.converted():
            log.warning("anabranch: the memory format was changed after the model was wrapped: buckets are built again")
            self._build(self._launcher)

    def use(self, launcher: BucketLauncher | None) -> None:
        if launcher is not None:
            self.buffers.control = launcher.lanes.control
        if launcher is not self._launcher:
            self._build(launcher)

    def _build(self, launcher: BucketLauncher | None) -> None:
        """Build the buckets of this launcher's plan; None: DDP's own."""
        if self._launcher is None:
            self._own_buckets = self._own_buckets or built_by_ddp(self._ddp)
        buckets, hook = self._own_buckets, None
        if launcher is not None:
            buckets = launcher.plan.indices(list(self._wrapped))
            hook = PlanHook(launcher, self._send_buffers).run
        self._reduction = None  # before the reducer that holds it is replaced
        with trained_only(self._ddp.module, self._wrapped.values()):  # as DDP, which does not follow later changes
            relayout(self._ddp, buckets, hook)
        self._launcher = launcher
        self._strides = self._watched.stride()

    def close(self) -> None:
        self._reduction = None  # before the reducer is freed
        self.buffers.close()

    # Called by DataParallel.

    def expect_reduction(self) -> bool:
        """Report the reduction that this forward has prepared; False if an earlier forward's has not ended."""
        if self._reduction is not None and not self._reduction.over:
            return False
        self._reduction = Reduction(self._ddp, self._reduced)
        return True

    def converted(self) -> str:
        """Says which parameter was converted since the model was wrapped, if all were: DDP does not average them then.

        If only some were, DDP's own error follows: their gradients are missing.
        """
        if not self._is_converted(self._watched):
            return ""
        for name, p in reduced_parameters(self._ddp).items():
            if self._is_converted(p):
                return (
                    f"{name} was converted, to {p.dtype} on {p.device}, after the model was wrapped, and DDP does not "
                    "average gradients of what was converted: convert a model before wrapping it, or close() this "
                    "DataParallel and wrap the module again"
                )
        return ""

    def _reduced(self) -> None:
        ddp = self._ddp_ref()
        if ddp is not None and not ddp._inside_join and self._on_averaged is not None:
            self._on_averaged()

    def _send_buffers(self, lane: Lane) -> None:
        if self._ddp._sends_deferred_buffers():
            self.buffers.send(lane)
