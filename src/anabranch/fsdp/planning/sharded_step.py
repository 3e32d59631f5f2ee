"""One step of a sharded model, as FSDP2 orders it.

FSDP2's host program says what is launched after what (``host_order``); three rules say when it happens:

*  gathers and reduce-scatters use one communicator, and take turns in the order in which they were launched; the
   exchanges between nodes have one of their own;
*  a unit computes when its parameters are there. A gather waits, in forward, until the unit before the one that
   launched it has its parameters, and in backward until the one that launched it has: so FSDP2 bounds the memory of
   gathers in flight;
*  backward goes on to the next unit when the reduce-scatter before the last one is over: FSDP2 keeps one such buffer.

The next step's gathers wait for the optimizer, which waits for all reductions, so that no step reaches into the next.
The host is taken to be far ahead of the device. Copies into and out of the buffers of messages are not priced.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Self

from anabranch.values.checks import Meta
from anabranch.values.sharded import Block, Links, ShardedTrace, ShardingPlan
from anabranch.values.timeline import COMPUTE, Span, Timeline

INSIDE, BETWEEN = "inside", "between"
REST = -1  # the unit of what is in no block
REST_LABEL = "the rest"

Kind = Literal["gather", "use", "forward", "free", "loss", "use again", "backward", "reduce"]


class Operation(NamedTuple):
    """Something that FSDP2's host program does; ``use`` is the point at which a unit's parameters must be there."""

    kind: Kind
    unit: int


class UnitCost(NamedTuple):
    """A unit, as one block, and the seconds of its messages."""

    sums: Block
    gather_s: float
    reduce_s: float
    average_s: float

    @classmethod
    def of(cls, sums: Block, links: Links) -> Self:
        """What this unit sends, on these links."""
        reduced = sums.gradient_nbytes
        return cls(sums, links.gather_s(sums.nbytes), links.reduce_s(reduced), links.average_s(reduced))


def simulate(trace: ShardedTrace, plan: ShardingPlan, links: Links) -> Timeline:
    """The predicted timeline of one step: computing, messages inside, messages between. Time zero: backward starts."""
    units = _units_as_blocks(trace, plan)
    spans: list[tuple[str, str, float, float]] = []

    def record(track: str, what: str, unit: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            name = what if track == COMPUTE and unit == REST else f"{what} {units[unit].name}"
            spans.append((track, name, start_s, end_s))

    costs = [UnitCost.of(unit, links) for unit in units]
    finish = walk(costs, trace, _operations(plan), links.overlaps, record)
    if not any(track == COMPUTE for track, *_ in spans):
        spans.append((COMPUTE, "nothing", finish.backward_s, finish.backward_s))
    meta: Meta = {"source": "simulated", "units": len(plan), "peak_nbytes": peak_nbytes(trace, plan)}
    at = finish.backward_s
    return Timeline(tuple(Span(track, name, start - at, end - at) for track, name, start, end in spans), meta)


def unit_label(names: Sequence[str]) -> str:
    """The name of a unit in timelines and tables."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def step_s(trace: ShardedTrace, plan: ShardingPlan, links: Links) -> float:
    """How long the step takes: ``simulate(...).iteration_s`` without building the timeline."""
    costs = [UnitCost.of(unit, links) for unit in _units_as_blocks(trace, plan)]
    return walk(costs, trace, _operations(plan), links.overlaps).step_s


def peak_nbytes(trace: ShardedTrace, plan: ShardingPlan) -> int:
    """The most bytes of gathered parameters, whole gradients and buffers of messages that a step holds at a time.

    Shards, the optimizer's state and activations come on top, whatever the plan.
    """
    return peak_of(_units_as_blocks(trace, plan), _operations(plan))


def host_order(reshard: Sequence[bool], prefetch: int) -> Iterator[Operation]:
    """What FSDP2 does in a step, in the order of its host program; unit i is resharded after forward if reshard[i]."""
    count = len(reshard)
    there: set[int] = set()  # gathered, or being gathered

    def gathers(units: range) -> Iterator[Operation]:
        for unit in units:
            if unit not in there:
                there.add(unit)
                yield Operation("gather", unit)

    yield Operation("gather", REST)
    yield Operation("use", REST)
    yield from gathers(range(min(prefetch, count)))
    yield Operation("forward", REST)
    for unit in range(count):
        yield from gathers(range(unit, unit + 1))
        yield Operation("use", unit)
        yield from gathers(range(unit + 1, min(unit + 1 + prefetch, count)))
        yield Operation("forward", unit)
        if reshard[unit]:
            there.discard(unit)
            yield Operation("free", unit)
    yield Operation("loss", REST)
    yield from gathers(range(count - 1, max(count - 1 - prefetch, -1), -1))
    for unit in reversed(range(count)):
        if reshard[unit]:
            yield from gathers(range(unit, unit + 1))
            yield Operation("use again", unit)
        yield from gathers(range(unit - 1, max(unit - 1 - prefetch, -1), -1))
        yield Operation("backward", unit)
        yield Operation("reduce", unit)
    yield Operation("reduce", REST)


class Finish(NamedTuple):
    """When the last unit's backward began, and when the step was over."""

    backward_s: float
    step_s: float


def walk(
    units: Sequence[UnitCost],
    trace: ShardedTrace,
    actions: Iterable[Operation],
    overlaps: bool = True,
    record: Callable[[str, str, int, float, float], None] | None = None,
) -> Finish:
    """Follow FSDP2's ``actions`` and say when all is done; ``record`` is told track, action, unit, start and end.

    ``units``: the rest last, so that REST is its index. ``trace`` says what is computed outside of them.
    """
    compute_s = inside_s = between_s = 0.0  # when each track is free
    reduced_s = gate_s = used_s = 0.0  # end of the last reduce-scatter; what gathers wait for; the last "use"
    arrived: dict[int, float] = {}
    backward_s: float | None = None

    def run(track: str, what: str, unit: int, start_s: float, seconds: float) -> float:
        if record is not None:
            record(track, what, unit, start_s, start_s + seconds)
        return start_s + seconds

    for kind, unit in actions:
        one = units[unit]
        if not overlaps:  # one thing after another
            compute_s = inside_s = between_s = max(compute_s, inside_s, between_s)
        if kind == "gather":
            if one.gather_s:
                inside_s = run(INSIDE, "gather", unit, max(inside_s, gate_s), one.gather_s)
            arrived[unit] = inside_s if one.gather_s else 0.0
        elif kind == "use":
            compute_s = max(compute_s, arrived[unit])
            gate_s, used_s = used_s, compute_s
        elif kind == "use again":
            gate_s = compute_s = max(compute_s, arrived[unit])
        elif kind == "forward":
            what, seconds = ("before", trace.before_s) if unit == REST else ("forward", one.sums.forward_s)
            compute_s = run(COMPUTE, what, unit, compute_s, seconds)
        elif kind == "loss":
            compute_s = run(COMPUTE, "loss", unit, compute_s, trace.loss_s)
            gate_s = used_s
        elif kind == "backward":
            backward_s = compute_s if backward_s is None else backward_s
            compute_s = run(COMPUTE, "backward", unit, compute_s, one.sums.backward_s)
        elif kind == "reduce":
            compute_s = max(compute_s, reduced_s)
            reduced_s = compute_s
            if one.reduce_s:
                reduced_s = inside_s = run(INSIDE, "reduce", unit, max(inside_s, compute_s), one.reduce_s)
            if one.average_s:
                between_s = run(BETWEEN, "average", unit, max(between_s, reduced_s), one.average_s)
    compute_s = run(COMPUTE, "update", REST, max(compute_s, inside_s, between_s), trace.update_s)
    return Finish(backward_s or 0.0, compute_s)


class UnshardedBytes(NamedTuple):
    """Bytes of gathered parameters, of whole gradients, and of the buffers of gathers and of reductions."""

    parameters: int
    gradients: int
    gathering: int
    reducing: int


def unsharded_at(units: Sequence[Block], actions: Iterable[Operation]) -> Iterator[tuple[Operation, UnshardedBytes]]:
    """What is held at the fullest moment of each action; ``units``: each as one block, the rest last."""
    parameters = gradients = gathering = reducing = 0
    kept = 0  # the buffer of the last gather in forward, which lives until the next unit is used
    for action in actions:
        kind, unit = action
        nbytes, gradient_nbytes = units[unit].nbytes, units[unit].gradient_nbytes
        freed = 0
        if kind == "gather":
            gathering += nbytes
        elif kind == "use":
            gathering, kept = gathering - kept, nbytes
            parameters += nbytes
        elif kind == "use again":
            parameters, freed = parameters + nbytes, nbytes  # copied out, then the buffer is freed at once
        elif kind == "free":
            parameters -= nbytes
        elif kind == "loss":
            gathering, kept = gathering - kept, 0
            gradients += gradient_nbytes  # those of the rest wait for the end of backward
        elif kind == "backward":
            gradients += gradient_nbytes
        elif kind == "reduce":  # parameters and the last buffer are freed, gradients are copied into a new one
            parameters, reducing = parameters - nbytes, gradient_nbytes
        yield action, UnshardedBytes(parameters, gradients, gathering, reducing)
        gathering -= freed
        if kind == "reduce":
            gradients -= gradient_nbytes


def peak_of(units: Sequence[Block], actions: Iterable[Operation]) -> int:
    """``peak_nbytes`` of these units, each as one block, the rest last, and FSDP2's ``actions``."""
    return max(sum(held) for _, held in unsharded_at(units, actions))


def _operations(plan: ShardingPlan) -> Iterator[Operation]:
    return host_order([unit.reshard for unit in plan.units], plan.prefetch)


def _units_as_blocks(trace: ShardedTrace, plan: ShardingPlan) -> list[Block]:
    """Each unit as one block, the rest last."""
    plan.check(trace)
    blocks = iter(trace.blocks)
    return [*(merged([next(blocks) for _ in unit.names]) for unit in plan.units), rest_of(trace)]


def merged(blocks: Sequence[Block]) -> Block:
    """A unit of these blocks, as one block."""
    return Block(
        unit_label([block.name for block in blocks]),
        sum(block.nbytes for block in blocks),
        sum(block.gradient_nbytes for block in blocks),
        sum(block.forward_s for block in blocks),
        sum(block.backward_s for block in blocks),
    )


def rest_of(trace: ShardedTrace) -> Block:
    """What is in no block, as one."""
    return Block(REST_LABEL, trace.rest_nbytes, trace.rest_gradient_nbytes, 0.0, 0.0)
