"""MG-WFBP: 16-GPU iteration times, 32-GPU throughputs, the 4 to 2048 GPU simulation; the exact optimum beside all."""

from collections.abc import Iterator

from benchmarks.papers import mgwfbp_published as published
from benchmarks.papers import stand_in
from benchmarks.papers.table import Figure, Reasons, Reproduction, Section, range_text

from anabranch import planning as planners
from anabranch.planning.simulator import finish_s
from anabranch.values.network import Network
from anabranch.values.trace import Trace

PAPER = "MG-WFBP (Shi, Chu, Li: INFOCOM 2019 and TPDS 2021)"
WAYS = {
    "WFBP": planners.per_tensor,
    "SyncEASGD": planners.single,
    "MG-WFBP": planners.mgwfbp,
    "exact optimum": planners.optimal,
}
RULE, BEST, EVERY, ONE = "MG-WFBP", "exact optimum", "WFBP", "SyncEASGD"

TIMES = Reasons("a + b·M says less than was measured", "a + b·M says more than was measured")
OVER_WFBP = Reasons("WFBP hides more in the model", "merging hides more in the model")
OVER_ONE = Reasons("one message costs less by a + b·M", "merging hides more in the model")
SPEEDS = Reasons("the table's a or b says more than was measured", "the table's a or b says less than was measured")
RERUN = Reasons("layers are ready at other times than on a K80", "layers are ready at other times than on a K80")


def reproduce() -> Reproduction:
    """Everything that was published and can be simulated."""
    k80 = stand_in.by_layer(stand_in.GOOGLENET.with_durations(published.K80_FORWARD_S, published.K80_BACKWARD_S))
    origin = (
        "our H200 trace of GoogleNet, stretched to their backward and forward on a K80, its tensors merged to "
        f"{len(k80)} layers as in Caffe"
    )
    return Reproduction(PAPER, (sixteen(), thirty_two(), simulation(k80, origin)))


def step_s(trace: Trace, network: Network) -> dict[str, float]:
    """Seconds per iteration under every way of merging."""
    return {name: trace.forward_s + finish_s(trace, plan(trace, network), network) for name, plan in WAYS.items()}


def sixteen() -> Section:
    """16 V100 on two networks."""
    figures: list[Figure] = []
    longer: list[float] = []
    for case in published.CASES_16:
        trace = case.stand_in.with_compute_s(case.compute_s, case.itemsize)
        for name, step in case.steps.items():
            network = Network.linear(16, *published.LINES_16[name])
            figures += _step_figures(f"{case.model}, {name}", step, step_s(trace, network))
            longer.append((step.single - case.compute_s) / network.allreduce_s(trace.nbytes))
    return Section(
        "16 GPUs, seconds per iteration",
        published.SIXTEEN,
        "simulated: our H200 trace of the model, stretched to the published computing time (a third of it forward); "
        "one lane, T(M) = a + b·M with the papers' fits, 10GbE 0.908 ms and 0.740 ns/B, 56Gb IB 0.236 ms and 0.406 "
        "ns/B; fp16: gradients of 2 bytes",
        tuple(figures),
        (
            f"absolute times differ: published SyncEASGD steps leave {range_text(longer)} times as long for their one "
            "message as a + b·M says (the authors' code fits it to messages up to 2 MiB). The simulator adds "
            "nothing, such as Horovod's cycle of 5 ms; compare the ratios",
            stand_in.SUBSTITUTES,
        ),
    )


def _step_figures(case: str, step: published.Step, ours: dict[str, float]) -> Iterator[Figure]:
    yield TIMES.compare(case, EVERY, "s", step.wfbp, ours[EVERY])
    yield TIMES.compare(case, ONE, "s", step.single, ours[ONE])
    yield TIMES.compare(case, RULE, "s", step.mgwfbp, ours[RULE])
    yield TIMES.compare(case, BEST, "s", None, ours[BEST])
    yield OVER_WFBP.compare(case, f"{RULE} over {EVERY}", "×", step.wfbp / step.mgwfbp, ours[EVERY] / ours[RULE])
    yield OVER_ONE.compare(case, f"{RULE} over {ONE}", "×", step.single / step.mgwfbp, ours[ONE] / ours[RULE])


def thirty_two() -> Section:
    """32 GPUs, where there are costs to simulate with."""
    return Section(
        "32 GPUs, samples per second",
        published.THIRTY_TWO,
        "simulated: our H200 trace of the model, stretched to what one GPU of theirs took; the public code's table for "
        "32 workers, 10GbE 4.04 ms and 0.864 ns/B; its 56Gb IB row, 0.406 ms and 0.491 ns/B, for 100Gb IB",
        tuple(figure for case in published.CASES_32 for figure in _throughputs(case)),
        (
            "those 32-worker rows are apparently not measurements but older fits with constants added (§1.11); what "
            "BSP does is inferred: one message after backward",
            "BERT-Base: 109.5 million recorded parameters enlarged alike to 110.1 million",
        ),
    )


def _throughputs(case: published.Throughput) -> Iterator[Figure]:
    said = {"BSP": case.bsp, EVERY: case.wfbp, RULE: case.mgwfbp}
    name, unit = f"{case.model}, {case.network}", "samples/s"
    if case.network in published.LINES_32:
        network = Network.linear(32, *published.LINES_32[case.network])
        steps = step_s(case.stand_in.with_compute_s(case.batch / case.alone), network)
        speed = {way: 32 * case.batch / seconds for way, seconds in steps.items()}
        speed["BSP"] = speed[ONE]
        for way, value in said.items():
            yield SPEEDS.compare(name, way, unit, value, speed[way])
        yield SPEEDS.compare(name, BEST, unit, None, speed[BEST])
        yield OVER_WFBP.compare(name, f"{RULE} over {EVERY}", "×", case.mgwfbp / case.wfbp, speed[RULE] / speed[EVERY])
    else:
        for way, value in said.items():
            yield Figure(name, way, unit, value, None, f"not simulated: no a and b known for {case.network} on 32 GPUs")
    yield Figure(
        name, "ByteScheduler", unit, case.bytescheduler, None, "not simulated: this project has no such planner"
    )


def simulation(trace: Trace, origin: str) -> Section:
    """The papers' simulation from 4 to 2048 GPUs, on this trace of GoogleNet."""
    figures: list[Figure] = []
    for ranks, point in published.POINTS.items():
        ours = step_s(trace, Network.linear(ranks, *published.ring(ranks)))
        said = {way: trace.forward_s + ms * 1e-3 for way, ms in zip(WAYS, point, strict=True)}
        case = f"{ranks} GPUs"
        figures += [RERUN.compare(case, way, "s", said[way], ours[way]) for way in WAYS]
        for over, under in ((EVERY, RULE), (ONE, RULE), (RULE, BEST)):
            figures.append(
                RERUN.compare(case, f"{under} over {over}", "×", said[over] / said[under], ours[over] / ours[under])
            )
    lost = [figure.ours for figure in figures if figure.what == f"{BEST} over {RULE}" and figure.ours]
    return Section(
        "4 to 2048 GPUs, GoogleNet, seconds per iteration",
        published.SIMULATION,
        f"simulated: {origin}; ring with the papers' α = 45.25 µs, β = 1.2/(9·2³⁰/8) s/B, γ = 2.5 ns/B",
        tuple(figures),
        (
            f"the exact optimum is {range_text(lost)} times as fast as the published rule under the rule's own model",
            "SyncEASGD could hardly differ: it follows from all bytes and the backward time. So does the rule where it "
            "merges everything, and WFBP on many GPUs from the number of layers. The optimum, and the rule on "
            "few, do not",
        ),
        against="rerun",
    )
