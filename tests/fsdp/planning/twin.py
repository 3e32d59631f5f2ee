"""The simulator's naive twin: every rule of FSDP2 as "this begins after that", relaxed until nothing moves."""

from itertools import combinations, pairwise, product

from hypothesis import strategies as st

from anabranch import Network
from anabranch.fsdp.planning import Block, Links, ShardedTrace, ShardingPlan, Unit, peak_nbytes

ROOT = -1


def twin_step_s(trace: ShardedTrace, plan: ShardingPlan, links: Links) -> float:
    """How long a step takes, from a table of what waits for what."""
    sizes: dict[int, tuple[int, int]] = {ROOT: (trace.rest_nbytes, trace.rest_gradient_nbytes)}
    seconds: dict[tuple[str, int], float] = {("F", ROOT): trace.before_s, ("loss", ROOT): trace.loss_s}
    blocks = {block.name: block for block in trace.blocks}
    n, d = len(plan), plan.prefetch
    for u, unit in enumerate(plan.units):
        mine = [blocks[name] for name in unit.names]
        sizes[u] = (sum(b.nbytes for b in mine), sum(b.gradient_nbytes for b in mine))
        seconds["F", u] = sum(b.forward_s for b in mine)
        seconds["B", u] = sum(b.backward_s for b in mine)
    for u, (nbytes, gradient_nbytes) in sizes.items():
        seconds["G", u] = seconds["G again", u] = links.gather_s(nbytes)
        seconds["RS", u] = links.reduce_s(gradient_nbytes)
        seconds["AR", u] = links.average_s(gradient_nbytes)
        seconds["use", u] = seconds["use again", u] = seconds["wait", u] = 0.0

    forward: list[int] = [ROOT, *range(n)]
    backward: list[int] = [*reversed(range(n)), ROOT]
    freed = [u for u in reversed(range(n)) if plan.units[u].reshard]
    computing: list[tuple[str, int]] = []
    for u in forward:
        computing += [("use", u), ("F", u)]
    computing.append(("loss", ROOT))
    for u in backward:
        if u in freed:
            computing.append(("use again", u))
        if u != ROOT:
            computing.append(("B", u))
        computing.append(("wait", u))
    inside = [("G", u) for u in forward]
    inside += [("G again", u) for u in freed if u >= n - d]  # launched by the root
    for u in reversed(range(n)):
        if u - d in freed:
            inside.append(("G again", u - d))
        inside.append(("RS", u))
    inside.append(("RS", ROOT))
    inside = [op for op in inside if seconds[op]]
    between = [("AR", u) for u in backward if seconds["AR", u]]
    after = [*pairwise(computing), *pairwise(inside), *pairwise(between)]
    for u in forward:
        if seconds["G", u]:
            after.append((("G", u), ("use", u)))
            if u - d >= 0:
                after.append((("use", forward[u - d]), ("G", u)))
    for u in freed:
        if not seconds["G again", u]:
            continue
        after.append((("G again", u), ("use again", u)))
        after.append((("use", n - 1), ("G again", u)))
        after += [(("use again", other), ("G again", u)) for other in freed if other >= u + d]
    for u in backward:
        after += [(("wait", u), ("RS", u)), (("RS", u), ("AR", u))]
    for earlier, later in pairwise(backward):
        after.append((("RS", earlier), ("wait", later)))

    if not links.overlaps:
        return sum(seconds[op] for op in [*computing, *inside, *between]) + trace.update_s
    begins = dict.fromkeys(seconds, 0.0)
    moved = True
    while moved:
        moved = False
        for first, then in after:
            if begins[then] < begins[first] + seconds[first]:
                begins[then] = begins[first] + seconds[first]
                moved = True
    done = [*computing, *inside, *between, *(("RS", u) for u in backward)]
    return max(begins[op] + seconds[op] for op in done) + trace.update_s


def every_plan(trace: ShardedTrace) -> list[ShardingPlan]:
    """All there are."""
    names = [block.name for block in trace.blocks]
    found = []
    for cuts in range(len(names)):
        for inner in combinations(range(1, len(names)), cuts):
            runs = [tuple(names[a:b]) for a, b in pairwise((0, *inner, len(names)))]
            for flags in product((True, False), repeat=len(runs)):
                units = tuple(Unit(run, flag) for run, flag in zip(runs, flags, strict=True))
                found += [ShardingPlan(units, prefetch) for prefetch in range(1, len(runs) + 1)]
    return found


def fastest_s(trace: ShardedTrace, links: Links, memory_nbytes: int | None) -> float:
    """The least of all plans within the bound; infinity if there is none."""
    fits = (p for p in every_plan(trace) if memory_nbytes is None or peak_nbytes(trace, p) <= memory_nbytes)
    return min((twin_step_s(trace, plan, links) for plan in fits), default=float("inf"))


whole_s = st.integers(0, 12).map(float)
whole_nbytes = st.integers(0, 9)


@st.composite
def sharded_traces(draw: st.DrawFn, max_blocks: int = 5) -> ShardedTrace:
    """Small whole numbers of seconds and bytes: every sum is exact, and ties abound."""
    count = draw(st.integers(1, max_blocks))
    blocks = []
    for index in range(count):
        nbytes = draw(whole_nbytes)
        gradient_nbytes = draw(st.sampled_from([nbytes, 0, 2 * nbytes]))
        blocks.append(Block(f"b{index}", nbytes, gradient_nbytes, draw(whole_s), draw(whole_s)))
    rest = draw(whole_nbytes)
    return ShardedTrace(tuple(blocks), rest, rest, draw(whole_s), draw(whole_s), draw(whole_s))


@st.composite
def links_of(draw: st.DrawFn) -> Links:
    """Whole costs; with and without nodes, and with backends that cannot overlap."""
    inside = Network.linear(2, 2.0 * draw(st.integers(0, 4)), 2.0 * draw(st.integers(0, 3)))
    between = Network.linear(2, 2.0 * draw(st.integers(0, 4)), 2.0 * draw(st.integers(0, 6)))
    return Links(inside, draw(st.sampled_from([None, between])), overlaps=draw(st.sampled_from([True, True, False])))


@st.composite
def plans_of(draw: st.DrawFn, trace: ShardedTrace) -> ShardingPlan:
    """Any that fits."""
    names = [block.name for block in trace.blocks]
    units = []
    while names:
        count = draw(st.integers(1, len(names)))
        units.append(Unit(tuple(names[:count]), draw(st.booleans())))
        names = names[count:]
    return ShardingPlan(tuple(units), draw(st.integers(1, 4)))
