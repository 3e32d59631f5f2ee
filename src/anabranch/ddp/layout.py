"""The bucket layout of a live DDP: a plan's buckets or DDP's own; also sends the model's buffers."""

import weakref

from torch import nn
from torch._compile import _disable_dynamo

from anabranch.comm.collectives import Collectives
from anabranch.comm.lanes import Lane
from anabranch.comm.launcher import BucketLauncher
from anabranch.ddp.deferred_buffers import DeferredBuffers
from anabranch.ddp.hook import PlanHook
from anabranch.ddp.reducer import (
    BucketIndices,
    ExtensibleDDP,
    built_by_ddp,
    gradients_seen,
    reduced_parameters,
    relayout,
)


class DdpLayout:
    """The bucket layout of one DDP, which owns this object; ``tuning.runner.Layout`` is the contract."""

    default_label = "DDP's own buckets"
    default_plan = None  # DDP's own buckets are built by DDP

    def __init__(self, ddp: ExtensibleDDP, exchange: Collectives) -> None:
        self.exchange = exchange
        self._ddp_ref = weakref.ref(ddp)  # weak, so that a model that is not used any more is freed
        self._buffers: DeferredBuffers | None = None  # once there is a plan
        self._own_buckets: BucketIndices | None = None  # the buckets that DDP built, once a plan has replaced them
        self._planned = False

    @property
    def _ddp(self) -> ExtensibleDDP:
        ddp = self._ddp_ref()
        if ddp is None:
            raise RuntimeError("the DataParallel of this layout was freed: keep a reference to it")
        return ddp

    def trained(self) -> dict[str, nn.Parameter]:
        return reduced_parameters(self._ddp)

    def progress(self) -> object:
        ddp = self._ddp_ref()
        return None if ddp is None else gradients_seen(ddp)

    def may_change(self, averaged: bool) -> bool:
        # With static_graph a new reducer would average after its first backward even under no_sync().
        return averaged or not self._ddp.static_graph

    def before_forward(self) -> None:
        """DDP itself checks that the last backward has finished."""

    def before_change(self) -> None:
        """No-op: DDP's reducer has no work in progress between steps."""

    def use(self, launcher: BucketLauncher | None) -> None:
        if launcher is None:
            if self._planned:
                relayout(self._ddp, self._own_buckets, None)
            self._planned = False
            return
        if not self._planned:
            self._own_buckets = self._own_buckets or built_by_ddp(self._ddp)
        if self._buffers is None:
            self._buffers = DeferredBuffers(lambda: self._ddp._current_buffers(), launcher.lanes.control)
        names = list(self.trained())
        relayout(self._ddp, launcher.plan.indices(names), PlanHook(launcher, self._send_buffers).run)
        self._planned = True

    def close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()

    # Called by DataParallel where DDP would broadcast buffers.

    @_disable_dynamo
    def drain_buffers(self) -> None:
        """Wait for the broadcast of buffers, so that the next messages cannot be mixed up with it."""
        if self._buffers is not None:
            self._buffers.drain()

    @_disable_dynamo
    def discard_buffers(self) -> None:
        """Drop received buffers, because a buffer hook or join() broadcasts them this time."""
        if self._buffers is not None:
            self._buffers.discard()

    @_disable_dynamo
    def install_buffers(self) -> bool:
        """Copy rank 0's buffers to this model; False if DDP must broadcast them instead."""
        return self._buffers is not None and self._buffers.install()

    def _send_buffers(self, lane: Lane) -> None:
        if self._buffers is not None and self._ddp._sends_deferred_buffers():
            self._buffers.send(lane)
