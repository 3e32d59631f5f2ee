"""The bucket launcher: starts each bucket of one plan by its exchange, on its lane."""

from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.error_samples import ErrorSamples
from anabranch.exchange.interface import ExchangeFamily, Group, Steps
from anabranch.exchange.lanes import Lane, Lanes, Message
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket, Plan

Behind = Callable[[Group], Steps]
EndMarker = Callable[[list[dist.Work]], None]


class BucketLauncher:
    """Launches the buckets of ``plan`` in plan order; every rank launches in the same order.

    mark_bucket    called with the bucket's index at each launch; returns a function to call with the works at the end,
                   or None if this bucket is not timed
    before_first   called before the first bucket of each step
    divisor        returns the number by which sums are divided; None for the world size (it differs under join())
    errors         samples of the errors of averages
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        collectives: Collectives,
        mark_bucket: Callable[[int], EndMarker | None],
        before_first: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.divisor: Callable[[], int] | None = None
        self.errors = ErrorSamples(plan, collectives.residuals)
        self._mark_bucket = mark_bucket
        self._before_first = before_first
        self._world_size = dist.get_world_size(lanes[0].group)
        # What does not change between steps: each bucket, its family, its lane, and its name in errors.
        self._routes: list[tuple[Bucket, ExchangeFamily, Lane, str]] = []
        for index, bucket in enumerate(plan.buckets):
            label = (
                f"bucket {index} of {len(plan)} ({len(bucket.names)} gradients to {bucket.names[-1]}, "
                f"{bucket.collective} on lane {bucket.lane})"
            )
            self._routes.append((bucket, collectives.family(bucket.collective), lanes[bucket.lane], label))

    def launch(self, index: int, buffer: torch.Tensor, behind: Behind | None = None) -> Future[torch.Tensor]:
        """Start the exchange of bucket ``index``, whose gradients are in ``buffer``; the future holds the average.

        ``behind`` gets the group, and returns steps that the lane runs when the exchange is over.
        """
        if index == 0 and self._before_first is not None:
            self._before_first()
        bucket, family, lane, label = self._routes[index]
        divisor = self.divisor() if self.divisor is not None else self._world_size
        steps = family.steps(bucket, buffer, lane.group, divisor)
        if self.errors.due(index):
            steps = self.errors.sampled(steps, index, buffer, lane.group, divisor)
        if behind is not None:
            steps = chain(steps, behind(lane.group))
        return lane.submit(Message(steps, buffer, label, self._mark_bucket(index), bucket.collective != DENSE))

    def close(self) -> None:
        """Drop the lanes, whose last works hold memory; nothing can be launched any more."""
        self._routes = []
