"""Planners that use sizes only, not times: what frameworks do today, and the two extremes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import TensorSpec, Trace

T = TypeVar("T")

MIB = 1 << 20
DDP_FIRST_NBYTES = 1 * MIB
DDP_CAP_NBYTES = 25 * MIB
HOROVOD_CAP_NBYTES = 128 * MIB


def per_tensor(trace: Trace, network: Network) -> Plan:  # noqa: ARG001 (every planner takes a network)
    """Every gradient by itself as soon as it is ready: wait-free back-propagation (WFBP), no merging."""
    return Plan.of_runs([tensor] for tensor in trace.tensors)


def single(trace: Trace, network: Network) -> Plan:  # noqa: ARG001
    """One message after backward (SyncEASGD); one per dtype if there are several."""
    return in_ready_order(trace, trace.by_kind())


def by_bytes(
    trace: Trace,
    network: Network,  # noqa: ARG001
    cap_nbytes: int | None = None,
    first_nbytes: int | None = None,
    closes: Literal["reached", "before"] = "reached",
) -> Plan:
    """Fill buckets up to a size, in ready order, separately per dtype.

    Without options: torch DDP's default, 25 MiB with a first bucket of 1 MiB. A ``cap_nbytes`` alone drops the small
    first bucket, as an explicit ``bucket_cap_mb`` does in DDP. DDP closes a bucket once it has *reached* its cap;
    with ``closes="before"`` a tensor that would overflow the cap opens the next bucket instead, as Horovod's fusion
    buffer does (``HOROVOD_CAP_NBYTES``).
    """
    if first_nbytes is None:
        first_nbytes = DDP_FIRST_NBYTES if cap_nbytes is None else cap_nbytes
    if cap_nbytes is None:
        cap_nbytes = DDP_CAP_NBYTES
    if cap_nbytes < 1 or first_nbytes < 1:
        raise ValueError(f"bucket caps are {first_nbytes} and {cap_nbytes} bytes: expected at least 1")
    if closes not in ("reached", "before"):
        raise ValueError(f"closes is {closes!r}: expected 'reached' or 'before'")
    parts: list[Sequence[TensorSpec]] = []
    for tensors in trace.by_kind():
        parts += filled(tensors, lambda tensor: tensor.nbytes, first_nbytes, cap_nbytes, closes == "reached")
    return in_ready_order(trace, parts)


def in_ready_order(trace: Trace, parts: Sequence[Sequence[TensorSpec]], lanes: int = 1) -> Plan:
    """A plan of these parts, launched in the order in which they are complete, dealt to the lanes in turn."""
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    return Plan.of_runs(sorted(parts, key=lambda part: place[part[-1].name]), lanes)


def filled(
    items: Iterable[T], nbytes_of: Callable[[T], int], first: float, cap: float, reached: bool
) -> list[Sequence[T]]:
    """Consecutive items in parts of about ``cap`` bytes, the first of about ``first``.

    ``reached``: a part is closed once it has that many; else before an item with which it would have more.
    """
    parts: list[list[T]] = []
    nbytes = 0
    for item in items:
        limit = first if len(parts) <= 1 else cap
        is_full = nbytes >= limit if reached else nbytes + nbytes_of(item) > limit
        if is_full or not parts:
            parts.append([])
            nbytes = 0
        parts[-1].append(item)
        nbytes += nbytes_of(item)
    return list(parts)


def at_most(tensors: Sequence[TensorSpec], count: int) -> list[Sequence[TensorSpec]]:
    """Each gradient by itself, or neighbours together where there are more than ``count``."""
    if len(tensors) <= count:
        return [[tensor] for tensor in tensors]
    # A group is closed when it has its share, or before a gradient that has one by itself: at most two for each share.
    share = -(-2 * sum(tensor.nbytes for tensor in tensors) // count)
    return filled(tensors, lambda tensor: tensor.nbytes, share, share, reached=False)
