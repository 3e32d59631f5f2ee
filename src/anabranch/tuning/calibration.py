"""Calibration: the network of one training, corrected by the times of messages while the model was computing.

During a backward pass messages take longer than on an idle machine: each waits for kernels to be launched, for a busy
host and for a share of the device, and simultaneous messages slow each other differently. The bucket times of a planned
step show by how much, and its end shows what they do not: ranks that wait for each other between messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from anabranch.exchange.agreement import agree_on
from anabranch.exchange.interface import Collective, Group
from anabranch.exchange.lanes import Lanes
from anabranch.observe.measure import LARGEST_NBYTES, measure
from anabranch.planning.simulator import finish_s
from anabranch.tuning.trial import MIN_STRETCH, Trial, computed_faster, prediction_s
from anabranch.values.kinds.fidelity import is_compressed
from anabranch.values.kinds.names import DENSE
from anabranch.values.network import Contention, Network
from anabranch.values.plan import Plan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

FACTORS = (0.8, 2.0)  # plausible changes of the cost per byte; outside this range something else was measured
LARGE = 10  # times the start-up: the cost of a message that takes longer is that of its bytes
MAX_ETA = 1.5  # contention of simultaneous messages: at 1 they gain nothing, above they take longer than in turn
DELAY_NOTE = "refined_delay_"  # and the kind: a key of a network's meta
WAITING_NOTE = "refined_waiting"
END_NOTE = "refined_end"
MIN_EFFECT = 0.05  # share of the step; if contention changes it by less, η cannot be distinguished from noise
BISECTIONS = 30
SMALLEST_LARGEST_NBYTES = 1 << 16
MEASUREMENT_S = (0.1, 2.0)  # shortest, longest


def calibrate(network: Network, trace: Trace, trial: Trial, control: Group) -> Network:
    """The network calibrated by this trial, the same on every rank: its costs, or with several lanes its contention.

    A message's cost is the least time that any rank measured: the others waited for later ranks. Computing and the end
    of a step are those of the fastest step of the slowest rank: neither noise nor a rank that has less to do counts.
    Returns the network unchanged if some rank did not time every message. Collective.
    """
    plan = trial.plan
    if plan is None:
        return network
    if plan.lanes > 1:
        return agree_on(Network, with_calibrated_contention(network, trace, plan, trial.finish_s), control)
    took_s = bucket_seconds(trial.detailed)
    not_timed = [-math.inf] * len(plan)
    seconds = torch.tensor(took_s if len(took_s) == len(plan) else not_timed, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=control)
    if seconds.isinf().any():
        return network
    fastest = [min(step.whole_s - step.exposed_s for step in trial.steps), min(step.finish_s for step in trial.steps)]
    computing_s, ended_s, typical_s = slowest_rank([*fastest, trial.finish_s], control)
    network = with_calibrated_costs(network, trace, plan, seconds.tolist())
    network = with_costs_bounded_by_end(network, trace, plan, typical_s)
    network = with_calibrated_delays(network, trace, plan, computing_s, ended_s)
    return agree_on(Network, with_calibrated_waiting(network, trace, plan, ended_s), control)


def slowest_rank(seconds: Sequence[float], control: Group) -> list[float]:
    """The maximum of each over all ranks. Collective."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
    return [float(second) for second in slowest]


def bucket_seconds(steps: Sequence[Timeline]) -> list[float]:
    """Seconds of each message on its lane from when that was free: medians over some one-lane steps of one plan.

    On a rank that came early this includes waiting for the others; the minimum over all ranks is the cost. Empty
    if not all steps have the same number of messages.
    """
    took_s = []
    for step in steps:
        seconds, free_s = [], 0.0
        for span in sorted(step.messages, key=lambda span: span.start_s):
            seconds.append(span.end_s - max(span.start_s, free_s))
            free_s = span.end_s
        took_s.append(seconds)
    if len({len(seconds) for seconds in took_s}) != 1:
        return []
    return [median(of_steps) for of_steps in zip(*took_s, strict=True)]


def with_calibrated_costs(network: Network, trace: Trace, plan: Plan, took_s: Sequence[float]) -> Network:
    """``network`` with costs fitted to the measured times of the buckets of ``plan``: factor · cost + extra seconds.

    Each kind of exchange is fitted to its own buckets. Compressed kinds that no plan has used yet get the correction
    of those that this one uses: otherwise they would look faster, just because nobody tried them.
    """
    tensors = {tensor.name: tensor for tensor in trace.tensors}
    curves, notes = dict(network.curves), {}
    fits = []  # of compressed kinds
    for kind in dict.fromkeys(bucket.collective for bucket in plan.buckets):
        own = [i for i, bucket in enumerate(plan.buckets) if bucket.collective == kind]
        sizes = [sum(tensors[name].cost_nbytes(kind) for name in plan.buckets[i].names) for i in own]
        expected = [network.seconds(kind, nbytes) for nbytes in sizes]
        factor, extra_s = _fit(np.array(expected), np.array([took_s[i] for i in own]), network.curve(kind).start_s)
        curves[kind] = network.curve(kind).scaled(factor, extra_s)
        fits += [(factor, extra_s)] if is_compressed(kind) else []
        of = f"{len(own)} bucket{'s' if len(own) != 1 else ''}"
        named = "costs" if kind == DENSE else f"costs of {kind}"
        note = f"{named} × {factor:.2f} + {extra_s * 1e3:.3f} ms per message, from live steps of {of}"
        notes["refined" if kind == DENSE else f"refined_{kind}"] = note
    for kind in filter(is_compressed, network.curves if fits else ()):
        if f"refined_{kind}" not in {**network.meta, **notes}:
            curves[kind] = network.curve(kind).scaled(*np.median(fits, axis=0).tolist())
    return replace(network, curves=curves, model=None, meta={**network.meta, **notes})


def with_costs_bounded_by_end(network: Network, trace: Trace, plan: Plan, ended_s: float) -> Network:
    """``network`` with cheaper messages, so that ``plan`` ends at ``ended_s``; unchanged if it does not end later.

    Messages are timed in a few steps, which timing makes slower than others. Also unchanged if no plausible factor
    explains the difference: then it is computing that was faster than recorded. Kinds that were not tried get the
    factor, too: they got the costs of those steps.
    """
    used = dict.fromkeys(bucket.collective for bucket in plan.buckets)
    corrected = _corrected_kinds(network, plan)
    # Their delays are those of an earlier trial until this one has shown its own.
    delays = {kind: delay_s for kind, delay_s in network.delays.items() if kind not in corrected}

    def at(factor: float) -> Network:
        return _with_scaled(network, {*used, *corrected}, factor, 0.0)

    def ends_s(factor: float) -> float:
        return finish_s(trace, plan, replace(at(factor), delays=delays))

    notes = {name: note for name, note in network.meta.items() if name != END_NOTE}
    least, latest_s = FACTORS[0], (1 + MIN_STRETCH) * ended_s
    if ends_s(1.0) <= latest_s or ends_s(least) > latest_s:
        return replace(network, meta=notes)
    factor = least + _largest(1 - least, lambda more: ends_s(least + more) <= ended_s)
    notes[END_NOTE] = f"{', '.join(used)} then × {factor:.2f}, from the end of live steps of {len(plan)} buckets"
    return replace(at(factor), meta=notes)


def with_calibrated_delays(network: Network, trace: Trace, plan: Plan, computing_s: float, ended_s: float) -> Network:
    """``network`` with the delays under which computing takes ``computing_s``, where it took less when it was recorded.

    All compressed buckets share it alike, or all buckets if none is compressed: on a GPU it is the time in which the
    host launches an exchange of several kernels, whatever their size. Kinds that were not tried get it, too, as above.
    Where the plan would then end after ``ended_s``, delays are smaller: computing has waited for messages, which take
    their time anyway.
    """
    compressed = [bucket for bucket in plan.buckets if is_compressed(bucket.collective)]
    tried = {bucket.collective for bucket in compressed or plan.buckets}
    others_s = sum(network.delay_s(bucket.collective) for bucket in plan.buckets if bucket.collective not in tried)
    stretch_s = computing_s - (trace.forward_s + trace.backward_s) - others_s
    delay_s = stretch_s / len(compressed or plan.buckets) if stretch_s > MIN_STRETCH * computing_s else 0.0
    kinds = _corrected_kinds(network, plan)

    def at(delay_s: float) -> Network:
        return replace(network, delays={**network.delays, **dict.fromkeys(kinds, delay_s)})

    delay_s = _largest(delay_s, lambda delay_s: finish_s(trace, plan, at(delay_s)) <= ended_s)
    notes = {name: note for name, note in network.meta.items() if name not in {DELAY_NOTE + kind for kind in tried}}
    if delay_s:
        text = f"delays computing by {delay_s * 1e3:.3f} ms"
        notes |= {DELAY_NOTE + kind: f"a message of {kind} {text}" for kind in tried}
    return replace(at(delay_s), meta=notes)


def with_calibrated_waiting(network: Network, trace: Trace, plan: Plan, ended_s: float) -> Network:
    """``network`` with a higher cost of each message, so that the simulated ``plan`` ends at ``ended_s``.

    The cost of a message is that on its fastest rank. Every message waits for its slowest one, which is another each
    time, so that many messages in a row take longer than their costs together. As delays, it is put down to compressed
    messages if there are any, and to kinds that were not tried.
    """
    kinds = _corrected_kinds(network, plan)

    def at(extra_s: float) -> Network:
        return _with_scaled(network, kinds, 1.0, extra_s)

    notes = {name: note for name, note in network.meta.items() if name != WAITING_NOTE}
    missing_s = ended_s - finish_s(trace, plan, network)
    if missing_s <= MIN_STRETCH * ended_s:
        return replace(network, meta=notes)
    extra_s = _largest(missing_s, lambda extra_s: finish_s(trace, plan, at(extra_s)) <= ended_s)
    notes[WAITING_NOTE] = f"{extra_s * 1e3:.3f} ms more per message, from the end of live steps of {len(plan)} buckets"
    return replace(at(extra_s), meta=notes)


def _corrected_kinds(network: Network, plan: Plan) -> set[str]:
    """The kinds that a trial of ``plan`` corrects: its compressed ones and untried ones, or if it has none, its own."""
    used = {bucket.collective for bucket in plan.buckets}
    compressed = set(filter(is_compressed, used))
    if not compressed:
        return used
    return compressed | {k for k in network.curves if is_compressed(k) and f"refined_{k}" not in network.meta}


def with_calibrated_contention(network: Network, trace: Trace, plan: Plan, ended_s: float) -> Network:
    """``network`` with the contention η of simultaneous messages under which ``plan`` ends at ``ended_s``.

    ``ended_s`` counts from the start of backward. The end moves later as η grows, so bisection finds η.
    """

    def at(eta: float) -> Network:
        return replace(network, contention=Contention.law(eta), model=None)

    if finish_s(trace, plan, at(MAX_ETA)) < (1 + MIN_EFFECT) * finish_s(trace, plan, at(0.0)):
        return network  # messages hardly overlap, so the result would be noise
    eta = _largest(MAX_ETA, lambda eta: finish_s(trace, plan, at(eta)) < ended_s)
    note = f"k messages at once take 1 + {eta:.2f} (k − 1) times as long each, from live steps on {plan.lanes} lanes"
    return replace(at(eta), meta={**network.meta, "refined_contention": note})


def _largest(limit: float, holds: Callable[[float], bool]) -> float:
    """The largest number from 0 to ``limit`` for which this holds, by bisection; 0 if it holds for none."""
    if not limit or holds(limit):
        return limit
    low, high = 0.0, limit
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fit(expected: np.ndarray, took: np.ndarray, start_s: float) -> tuple[float, float]:
    """The factor and the extra seconds per message that fit best, within plausible limits.

    From a few messages, or such of one size, the two cannot be told apart: those that take many times their start-up
    ``start_s`` are believed to tell the factor, since bytes are what they cost, and others the extra seconds.
    """
    factor, extra_s = 1.0, float(np.median(took - expected))
    if len(expected) >= 4 and np.ptp(expected) > expected.mean() / 2:
        factor = float(np.clip(np.polyfit(expected, took, 1)[0], *FACTORS))
        extra_s = float(np.median(took - factor * expected))
    elif np.median(expected) > LARGE * start_s:
        factor = float(np.clip(took.sum() / expected.sum(), *FACTORS))
        extra_s = float(np.median(took - factor * expected)) if factor in FACTORS else 0.0
    if extra_s < 0:  # extra seconds cannot be negative: put the difference into the factor
        factor, extra_s = float(np.clip(took.sum() / expected.sum(), *FACTORS)), 0.0
    return factor, extra_s


def _with_scaled(network: Network, kinds: set[str], factor: float, extra_s: float) -> Network:
    curves = {kind: network.curve(kind).scaled(factor, extra_s) for kind in kinds}
    return replace(network, curves={**network.curves, **curves}, model=None)


@dataclass(eq=False)
class CalibratedNetwork:
    """The network that plans are made with, and what it predicts.

    given   by the user: it is believed, neither measured nor calibrated
    lanes   have the group for small messages, which is created by its first use
    known   None before the network is measured or agreed on
    """

    given: Network | None
    lanes: Lanes
    known: Network | None = None
    _error: float | None = None  # predicted by measured step of the layout that was kept last
    _predicted_for: tuple[Trace | None, Plan | None, Network | None] = (None, None, None)
    _predicted_s: float | None = None

    def agree_on_given(self) -> bool:
        """Use the network that the user gave, the same on every rank; False if there is none. Collective."""
        if self.given is not None:
            self.known = agree_on(Network, self.given, self.lanes.control)
        return self.given is not None

    def measure(self, device: torch.device, probes: Mapping[str, Collective], nbytes: int, left_s: float) -> Network:
        """Measure the kinds of messages of ``probes`` up to ``nbytes``, and how much lanes slow each other. Collective.

        Takes about a third of ``left_s``, by rank 0's number, within limits.
        """
        largest = min(max(nbytes, SMALLEST_LARGEST_NBYTES), LARGEST_NBYTES)
        shortest_s, longest_s = MEASUREMENT_S
        budget_s = min(longest_s, max(shortest_s, left_s / 3))
        self.known = measure(self.lanes.groups, device, largest, budget_s, probes, growth=4, nodes=self.lanes[0].nodes)
        return self.known

    def calibrate(self, trace: Trace, trials: Sequence[Trial], several_lanes: bool) -> bool:
        """Calibrate a measured network by trials on one lane or on several; whether it changed. Collective."""
        before = self.known
        if self.given is None and self.known is not None:
            for trial in trials:
                if trial.plan is not None and (trial.plan.lanes > 1) == several_lanes:
                    self.known = calibrate(self.known, trace, trial, self.lanes.control)
        return self.known != before

    def trace_under(self, trace: Trace, best: Trial, first: Trial) -> Trace:
        """The trace with computing as fast as under the best layout, if that is a plan. Collective.

        ``first``: the layout with which the search began, under which the trace was recorded.
        """
        if self.given is not None or best.plan is None:
            return trace
        computing_s, before_s = slowest_rank([best.computing_s, first.computing_s], self.lanes.control)
        return computed_faster(trace, best.plan, computing_s, before_s)

    def predicted_s(self, trace: Trace | None, plan: Plan | None) -> float | None:
        """The simulator's prediction for this layout, computed once per layout; None if it cannot be predicted."""
        inputs = trace, plan, self.known
        if any(one is not other for one, other in zip(inputs, self._predicted_for, strict=True)):
            self._predicted_for, self._predicted_s = inputs, prediction_s(*inputs)
        return self._predicted_s

    def note_error(self, trace: Trace | None, kept: Trial) -> None:
        """Remember how well the layout that is kept was predicted."""
        predicted_s = self.predicted_s(trace, kept.plan)
        self._error = predicted_s / kept.step_s if predicted_s is not None else None

    def outdated(self, trace: Trace, running: Trial, max_drift: float) -> bool:
        """Whether the layout that runs is predicted worse than when it was kept; a given network is believed."""
        predicted_s = self.predicted_s(trace, running.plan)
        if self.given is not None:
            return False
        if predicted_s is None or self._error is None:
            return True
        return abs(predicted_s / running.step_s / self._error - 1) > max_drift
