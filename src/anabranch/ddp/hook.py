"""The comm hook that runs a plan: each bucket by its collective, on its lane.

No ``from __future__ import annotations`` here: DDP refuses hooks whose annotations are text.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from anabranch.comm.collectives import Collectives, DenseCollectives
from anabranch.comm.lanes import Lane, Lanes, Message
from anabranch.observe.step_timer import StepTimer
from anabranch.plan import Plan


class PlanHook:
    """Runs one plan on the reducer that was laid out for it, whose bucket i is the plan's bucket i.

    Counts the buckets itself: in the first step of a static graph torch numbers every one of them 0.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        watch: StepTimer,
        after_last: Callable[[Lane], None],
        collectives: Collectives | None = None,
        before_first: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self._collectives = collectives or DenseCollectives()
        self.divisor: Callable[[], int] | None = None  # where it is not the world size: under join()
        self.look = False  # whether to mark when each bucket is launched and done
        self._lanes, self._watch, self._before_first, self._after_last = lanes, watch, before_first, after_last
        self._world_size = dist.get_world_size(lanes[0].group)
        self._next = 0

    def run(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002
        """The hook itself; DDP calls it in plan order, on every rank alike."""
        if self._next == 0 and self._before_first is not None:
            self._before_first()
        index, self._next = self._next, (self._next + 1) % len(self.plan)
        planned = self.plan.buckets[index]
        lane = self._lanes[planned.lane]
        buffer = bucket.buffer()
        divisor = self.divisor() if self.divisor is not None else self._world_size
        steps = self._collectives.steps(planned, buffer, lane.group, divisor)
        label = (
            f"bucket {index} of {len(self.plan)} ({len(planned.names)} gradients to {planned.names[-1]}, "
            f"{planned.collective} on lane {planned.lane})"
        )
        aside = self._collectives.aside(planned.collective)
        future = lane.submit(Message(steps, buffer, label, self._marker(index), aside))
        if self._next == 0:
            self._after_last(self._lanes[0])
        return future

    def _marker(self, index: int) -> Callable[[list[dist.Work]], None] | None:
        step = self._watch.current
        if step is None or not (self.look or self._watch.lookers):
            return None
        clock = self._watch.clock
        launched = clock.mark()
        return lambda works: step.buckets.append((index, launched, clock.mark_end(launched, works)))
