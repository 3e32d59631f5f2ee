"""ASC-WFBP: the 32-GPU table and its two headlines, as published, and with the same constants for every planner."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.papers import stand_in
from benchmarks.papers.mgwfbp_published import LINES_32
from benchmarks.papers.stand_in import StandIn
from benchmarks.papers.table import Figure, Reasons, Reproduction, Section, range_text

from anabranch import planning as planners
from anabranch.planning.simulator import finish_s
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

PAPER = "ASC-WFBP (Shi, Chu, Li: INFOCOM 2021)"
SOURCE = "8 nodes × 4 GPUs, 10GbE: the authors' plot data, §2.7; the headlines also stand in the abstract"
NODES, RANKS = 8, 32

# nccl-tests on 8 nodes with one GPU each, LL protocol and trees switched off, as the authors' plot script has it, and
# their law for two messages at once (§2.2).
START_S, S_PER_BYTE, ETA = 1.3687e-3, 1.6570e-9, 0.5
LINK_BYTES_PER_S = 9.43e9 / 8  # by iperf

WFBP, MG, ASC, BEST, LANES = "WFBP", "MG-WFBP", "ASC-WFBP", "exact optimum, one lane", "lanes, searched"
TIMES = Reasons("more is hidden in the model than was", "a was measured without NCCL's LL protocol and trees")
GAINS = {
    WFBP: Reasons("WFBP pays less in the model", "WFBP pays more start-up, and ASC hides more, in the model"),
    MG: Reasons("MG-WFBP does better in the model", "ASC hides more in the model"),
}
ALIKE = Reasons("MG-WFBP has the right a, and ASC no more than the link carries", "ASC hides more in the model")


class Case(NamedTuple):
    """Published: forward and backward seconds, and seconds per iteration."""

    model: str
    stand_in: StandIn
    forward_s: float
    backward_s: float
    wfbp: float
    mgwfbp: float
    asc: float

    @property
    def trace(self) -> Trace:
        """Our trace of the model, with the published durations."""
        return self.stand_in.with_durations(self.forward_s, self.backward_s)


CASES = (
    Case("ResNet-152", stand_in.RESNET152, 0.091, 0.182, 0.9559, 0.7099, 0.5243),
    Case("DenseNet-201", stand_in.DENSENET201, 0.073, 0.146, 0.7782, 0.3751, 0.3137),
    Case("Inception-v4", stand_in.INCEPTION_V4, 0.0632, 0.1263, 0.7186, 0.5099, 0.3771),
    Case("BERT-Base", stand_in.BERT_BASE, 0.1018, 0.2037, 1.0102, 1.0624, 0.9242),
)
HEADLINES = {WFBP: (1.09, 2.48), MG: (1.15, 1.35)}  # ASC over them, of the abstract

Planner = Callable[[Trace, Network], Plan]
PUBLISHED: dict[str, Planner] = {WFBP: planners.per_tensor, MG: planners.mgwfbp, ASC: planners.asc}
OURS: dict[str, Planner] = {BEST: planners.optimal, LANES: planners.lanes}


def code_table() -> Network:
    """The network that the public code plans with: hard-coded, and apparently not measured (§1.11)."""
    return Network.linear(RANKS, *LINES_32["10GbE"])


def contended() -> Network:
    """The network that the authors measured, with their law for simultaneous messages."""
    return Network.linear(RANKS, START_S, S_PER_BYTE, eta=ETA)


def capped(crossings: float = 2.0) -> Network:
    """The same on a link that carries no more than iperf found; how often every byte crosses it is the authors' 2.

    By that, one message at the measured rate fills the link, and two share it.
    """
    least_s_per_byte = crossings / LINK_BYTES_PER_S
    return Network.linear(RANKS, START_S, S_PER_BYTE, eta=ETA, link_cap=max(1.0, S_PER_BYTE / least_s_per_byte))


def reproduce() -> Reproduction:
    """With the published constants, then with the same constants for every planner."""
    return Reproduction(PAPER, (as_published(), same_constants()))


def step_s(trace: Trace, ways: dict[str, Planner], believed: Network, network: Network) -> dict[str, float]:
    """Seconds per iteration of plans made for the network believed in, run on the real one."""
    return {
        name: trace.forward_s + finish_s(trace, plan(trace, believed), network) for name, plan in ways.items()
    }  # fmt: skip


def as_published() -> Section:
    """Planned with the public code's table, run on what its authors measured."""
    believed, network = code_table(), contended()
    steps = {case: step_s(case.trace, PUBLISHED, believed, network) for case in CASES}
    figures = [figure for case, ours in steps.items() for figure in _figures(case, ours)]
    least = [_least_s(case) / ours[ASC] for case, ours in steps.items()]
    figures += _headlines(list(steps.values()))
    return Section(
        "32 GPUs, seconds per iteration, planned as in the public code",
        SOURCE,
        "simulated: our H200 trace of the model, stretched to the published forward and backward; planned with the "
        "code's hard-coded 32-worker table (4.04 ms, 0.864 ns/B); run with the authors' nccl-tests fit of 8 one-GPU "
        "nodes (1.37 ms, 1.657 ns/B), two lanes for ASC, two messages at once by their law η = 0.5",
        tuple(figures),
        (
            "two messages at once by that law exceed the link: by the authors' own bound (every byte twice over 9.43 "
            f"Gbit/s, after forward) a step takes at least {range_text(least)} times what is simulated for ASC. Below, "
            "the link is a cap",
            "the a and b of 32 GPUs were not published; nothing here was fitted to the table",
            stand_in.SUBSTITUTES,
        ),
    )


def _figures(case: Case, ours: dict[str, float]) -> Iterator[Figure]:
    said = {WFBP: case.wfbp, MG: case.mgwfbp, ASC: case.asc}
    for way in PUBLISHED:
        yield TIMES.compare(case.model, way, "s", said[way], ours[way])
    for over in (WFBP, MG):
        yield GAINS[over].compare(case.model, f"{ASC} over {over}", "×", said[over] / said[ASC], ours[over] / ours[ASC])


def _headlines(steps: Sequence[dict[str, float]]) -> Iterator[Figure]:
    for over, ends in HEADLINES.items():
        ours = [step[over] / step[ASC] for step in steps]
        for end, said, value in zip(("least", "most"), ends, (min(ours), max(ours)), strict=True):
            yield GAINS[over].compare("all four", f"{ASC} over {over}, {end}", "×", said, value)


def _least_s(case: Case) -> float:
    """Forward, and the longer of backward and all bytes twice over the link."""
    return case.forward_s + max(case.backward_s, 2 * case.trace.nbytes / LINK_BYTES_PER_S)


def same_constants() -> Section:
    """Every planner with the same constants, on a link of limited capacity."""
    network, believed = capped(), code_table()
    figures: list[Figure] = []
    better: list[float] = []
    slower: list[float] = []
    roomier: list[float] = []
    among_nodes = capped(2 * (NODES - 1) / NODES)
    for case in CASES:
        said = {WFBP: case.wfbp, MG: case.mgwfbp, ASC: case.asc}
        ours = step_s(case.trace, {**PUBLISHED, **OURS}, network, network)
        figures += [TIMES.compare(case.model, way, "s", said.get(way), ours[way]) for way in ours]
        figures.append(ALIKE.compare(case.model, f"{ASC} over {MG}", "×", case.mgwfbp / case.asc, ours[MG] / ours[ASC]))
        before = step_s(case.trace, PUBLISHED, believed, network)
        better.append(before[MG] / ours[MG])
        slower.append(before[ASC] / step_s(case.trace, PUBLISHED, believed, contended())[ASC])
        room = step_s(case.trace, PUBLISHED, among_nodes, among_nodes)
        roomier.append(room[MG] / room[ASC])
    return Section(
        "32 GPUs, seconds per iteration, every planner with the same constants and the link as a cap",
        SOURCE,
        "simulated: the same traces; planned and run with 1.37 ms and 1.657 ns/B; by the authors' bound (every byte "
        "twice over 9.43 Gbit/s) one message fills the link, so two share it, and η = 0.5 does not apply",
        tuple(figures),
        (
            f"planned with the a that it meets, instead of the table's, MG-WFBP is {range_text(better)} times as fast",
            f"the cap makes a step of ASC-WFBP, planned as above, {range_text(slower)} times as long: on a full link "
            "two messages gain only their start-up",
            f"with every byte 2·{NODES - 1}/{NODES} times over the link, as in a ring of that fit's {NODES} nodes, "
            f"two messages would carry {among_nodes.contention.link_cap:.2f} times as much as one, and ASC-WFBP be "
            f"{range_text(roomier)} times as fast as MG-WFBP",
        ),
    )
