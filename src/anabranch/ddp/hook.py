"""The comm hook that runs a plan on DDP's reducer.

No ``from __future__ import annotations`` here: DDP refuses hooks whose annotations are text.
"""

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import GradBucket

from anabranch.exchange.lanes import Lane
from anabranch.exchange.launcher import BucketLauncher


class PlanHook:
    """Gives each bucket of a reducer to ``launcher``; the reducer's bucket i is the plan's bucket i.

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
