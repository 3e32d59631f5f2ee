"""The bucket launcher: starts each bucket of one plan by its exchange, on its lane."""

from collections.abc import Callable, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.error_samples import ErrorSamples
from anabranch.exchange.interface import Group, Steps
from anabranch.exchange.lanes import Lane, Lanes, Message
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket, Plan

Behind = Callable[[Group], Steps]
EndMarker = Callable[[list[dist.Work], bool], None]


class BucketLauncher:
    """Launches the buckets of ``plan`` in plan order; every rank launches in the same order.

    numels         elements of each parameter
    mark_bucket    called with the bucket's index at each launch; returns ``Message.on_end``, or None if this bucket is
                   not timed
    before_first   called before the first bucket of each step
    divisor        returns the number by which sums are divided; None for the world size (it differs under join())
    errors         samples of the errors of averages
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        collectives: Collectives,
        numels: Mapping[str, int],
        mark_bucket: Callable[[int], EndMarker | None],
        before_first: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.divisor: Callable[[], int] | None = None
        self.errors = ErrorSamples(plan, collectives.residuals)
        self._collectives = collectives
        self._mark_bucket = mark_bucket
        self._before_first = before_first
        self._world_size = dist.get_world_size(lanes[0].group)
        # What does not change between steps: each bucket, its parameters' sizes, its lane, and its name in errors.
        self._routes: list[tuple[Bucket, list[int], Lane, str]] = []
        for index, bucket in enumerate(plan.buckets):
            label = (
                f"bucket {index} of {len(plan)} ({len(bucket.names)} gradients to {bucket.names[-1]}, "
                f"{bucket.collective} on lane {bucket.lane})"
            )
            collectives.family(bucket.collective)  # raises if there is none
            self._routes.append((bucket, [numels[name] for name in bucket.names], lanes[bucket.lane], label))

    def launch(self, index: int, buffer: torch.Tensor, behind: Behind | None = None) -> Future[torch.Tensor]:
        """Start the exchange of bucket ``index``, whose gradients are in ``buffer``; the future holds the average.

        ``behind`` gets the group, and returns steps that the lane runs when the exchange is over.
        """
        if index == 0 and self._before_first is not None:
            self._before_first()
        bucket, numels, lane, label = self._routes[index]
        divisor = self.divisor() if self.divisor is not None else self._world_size

        def sampled(steps: Steps, sent: torch.Tensor, group: Group, divisor: float) -> Steps:
            return self.errors.sampled(steps, index, sent, group, divisor) if self.errors.due(index) else steps

        *stages, last = self._collectives.stages(bucket, buffer, numels, lane, divisor, sampled)
        if behind is not None:
            last = chain(last, behind(lane.group))
        computes = bucket.collective != DENSE
        return lane.submit(Message((*stages, last), buffer, label, self._mark_bucket(index), computes))

    def close(self) -> None:
        """Drop the lanes, whose last works hold memory; nothing can be launched any more."""
        self._routes = []
