"""How long backward waits for residuals that are in host memory, predicted bucket by bucket."""

from collections.abc import Sequence
from typing import NamedTuple

from anabranch.lean.activations.cost_model import HostLink
from anabranch.planning.memory import SLOTS


class HostBucket(NamedTuple):
    """A bucket whose residual is in host memory.

    computed_s   of backward between the moment when the bucket before was complete and that when this one is
    """

    nbytes: int
    computed_s: float


def predicted_wait_s(buckets: Sequence[HostBucket], link: HostLink, forward_s: float) -> float:
    """Seconds in a step that computing waits for copies, as ``lean.residuals.HostResiduals`` makes them.

    A bucket's residual is fetched when the bucket before is launched, the first one's when it is launched itself, and
    only into a slot whose last residual is back on the host; a bucket is launched when it is complete and its residual
    is there. So little hides what is fetched for the first bucket, and for a large one right behind another.
    ``forward_s`` of the next step hides what is still stored then. Exchanges count as if they took no time.
    """
    if not buckets:
        return 0.0
    launched_s = waited_s = 0.0
    stored_s = [0.0] * SLOTS  # by slot: when its last residual is back
    last_stored_s = 0.0
    for number, bucket in enumerate(buckets):
        complete_s = launched_s + bucket.computed_s
        fetched_s = max(launched_s if number else complete_s, stored_s[number % SLOTS])
        arrived_s = fetched_s + bucket.nbytes / link.back_nbytes_per_s
        launched_s = max(complete_s, arrived_s)
        waited_s += launched_s - complete_s
        last_stored_s = max(launched_s, last_stored_s) + bucket.nbytes / link.out_nbytes_per_s
        stored_s[number % SLOTS] = last_stored_s
    return waited_s + max(0.0, last_stored_s - launched_s - forward_s - buckets[0].computed_s)
