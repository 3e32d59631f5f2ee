"""Planners for simultaneous messages: the published ASC-WFBP rule, and a search whose objective is the simulator."""

from collections.abc import Iterator
from itertools import product

from anabranch.planning.fixed import by_bytes
from anabranch.planning.merge import mgwfbp, optimal, published, using
from anabranch.planning.search import Search
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

# Factors on the real costs, with which the exact one-lane plan is made for further candidates. A higher start-up cost
# gives fewer buckets and a lower cost per byte later ones: lanes hide each other's start-up and share the link.
START_FACTORS = (0.5, 1.0, 4.0)
BYTE_FACTORS = (0.1, 0.3, 1.0)

# Numbers of buckets of equal size, which no other candidate has: best where lanes do not slow each other.
EQUAL_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def asc(trace: Trace, network: Network, lanes: int = 2) -> Plan:
    """The published rule for simultaneous communication (ASC-WFBP): merge only what need not wait.

    The next gradient joins a bucket if it is ready before the bucket could start. The buckets go to ``lanes`` lanes in
    turn. When a bucket could start is computed as if there were one lane, as published, and with the straight line
    nearest to the curve. The rule ignores how much lanes slow each other.
    """
    _check(lanes)
    start_s, s_per_byte = network.curve("dense").line()
    return published(trace, start_s, s_per_byte, patience_s=0.0, lanes=lanes)


def lanes(trace: Trace, network: Network, lanes: int = 4, polish: int = 300, collective: str = "dense") -> Plan:
    """Merging and 1 … ``lanes`` lanes together: the best of many candidates in the simulator, improved by small moves.

    Every message is of the kind ``collective``, at its prices.

    Candidates are the published rules and the exact one-lane optimum under several scaled costs, dealt to every number
    of lanes; the best is then improved in at most ``polish`` trials (``planners.search``). Never worse than
    ``optimal``; ties go to fewer lanes, then fewer buckets. Not proven best: benchmarks/ has its gap to brute force.
    Relies on the network's contention; a network that was not measured assumes that one message fills the link.
    """
    _check(lanes)
    search = Search(trace, network, collective)
    for layout in dict.fromkeys(map(search.layout, _candidates(trace, network, collective))):
        for count in range(1, lanes + 1):
            search.offer(layout.dealt(count))
    search.polish(polish, lanes)
    return using(search.best.plan(trace), collective)


def _candidates(trace: Trace, network: Network, collective: str) -> Iterator[Plan]:
    yield optimal(trace, network, collective=collective)
    yield mgwfbp(trace, network)
    for parts in EQUAL_PARTS:
        yield by_bytes(trace, network, cap_nbytes=max(1, trace.nbytes // parts))
    start_s, s_per_byte = network.curve(collective).line()
    for start_factor, byte_factor in product(START_FACTORS, BYTE_FACTORS):
        a, b = start_factor * start_s, byte_factor * s_per_byte
        yield optimal(trace, Network.linear(network.world_size, a, b))
        yield published(trace, a, b, patience_s=a)
        yield published(trace, a, b, patience_s=0.0)


def _check(lanes: int) -> None:
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}: expected at least 1")
