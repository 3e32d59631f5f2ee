"""The least lossy plan that costs no time: for each bucket the most faithful kind of exchange that stays hidden.

Among all plans of consecutive buckets on one lane, each bucket sent by any of the given kinds, let ``best`` be the step
that finishes first. The plan returned is the one with the smallest error among those that finish within the slack after
``best``; among equals, the one that finishes first, with neighbours of one kind merged where that takes no more than
``MERGED`` of the computing time. The error of a plan is the sum over its buckets of (elements × error of the kind),
with errors from ``fidelity.error_of``.

The slack is ``FREE`` of the computing time C (forward and backward), times (C / best)²: 1 % of computing where the
network is no limit, and less the longer the best step takes. So it grows with the rate of the network. Were it 1 % of C
everywhere, or of the step, a slow network could afford what a faster one cannot, such as to wait for a large bucket,
and the faster network would get the lossier plan. It still does now and then: docs/design/planning.md has the counts.

It is a search for the shortest path with two costs. With r[i] the instant at which gradient i is ready, S[i] the bytes
of the first i gradients, and T_k the cost of a message of kind k, a state (t, e) of i says that the first i gradients
can have travelled at t with error e, and leads to

    (max(t, r[j]) + T_k(S[j] − S[i]),  e + error_k · elements)      for every later j and every kind k.

Of the states of one i only those matter that no other one beats in both numbers, and of those only the ones that can
still finish in time, which a pass from the end tells (``_latest``), and with a smaller error than a plan that is known:
a quick search finds that plan, and ``_Bound`` tells how small the error of the rest can be at best. Mostly that is
exact. Where more than ``MOST_STATES`` are left, those that promise the smallest error stay: on five recorded models
and 64 networks the error was 0.01 % above that of an exact search on average, and 0.5 % at most. Beyond
``MOST_GRADIENTS`` neighbouring gradients are merged.

Where sending a message delays the gradients after it (``Network.delays``), a state has the delays D of its messages,
too, and r[j] + D takes the place of r[j]. Kept are those that no other one beats in error and in t, D or t + D: good,
and not exact.

Of two-level kinds a state has when its messages have left the scatter and the gather inside nodes, too. Kept are those
that no other one beats in error and in one of the three: good, and not exact. The exact plans of one kind are among the
candidates, so no single kind is ever faster. In 600 cases of up to 4 gradients, with nodes at most twice as slow inside
as between them, 594 plans were the least lossy ones in time, and the others finished 4 % late at most.

Gradients of several dtypes, or that may not use the same kinds, are planned apart, as if the others took no time; the
simulator then tells by how much earlier each must finish. That is good, and not proven best.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np

from anabranch.planning.by_size import at_most
from anabranch.planning.costs import CostLines, Floats, Ints
from anabranch.planning.merge import optimal
from anabranch.planning.simulator import finish_s
from anabranch.values.curve import Curve
from anabranch.values.kinds.names import DENSE, is_two_level
from anabranch.values.network import Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import TensorSpec, Trace

FREE = 0.01  # share of the computing time by which a step may end later for a smaller error, at most
MERGED = 0.001  # the same, for fewer messages
ADDED_ERROR = 0.01  # share of a plan's error that all mergers of neighbours may add (``with_fewer_messages``)
MOST_GRADIENTS = 128  # more are merged with their neighbours before the search
MOST_STATES = 25_600  # for all gradients together
FEW_STATES = 16  # for each gradient, in the quick search
PRICES = 12, 24  # how many prices of a second are tried to find the range that matters, and within it
ROUNDING = 1 + 1e-12
MAX_ATTEMPTS = 6  # to make parts that were planned apart finish together in time


def least_lossy(
    trace: Trace, network: Network, errors: Mapping[str, int], excluded: Mapping[str, Collection[str]] | None = None
) -> Plan:
    """The plan with the smallest error that finishes within the slack (``slack_s``) after the fastest one.

    ``errors`` gives the kinds to choose from, "dense" among them, and their errors. ``excluded`` names, by kind,
    the gradients that must not use it.
    """
    if DENSE not in errors:
        raise ValueError(f"kinds to choose from are {', '.join(errors) or 'none'}: {DENSE!r} must be among them")
    forbidden = {kind: frozenset(names) for kind, names in (excluded or {}).items() if kind in errors}
    computing_s = trace.forward_s + trace.backward_s
    arrangements = _arrangements(trace, network, errors, forbidden, MERGED * computing_s)
    fastest = [_plan_of_choices(trace, [part.within(0.0, quick=True) for part in parts]) for parts in arrangements]
    for kind in errors:
        if not forbidden.get(kind):
            fastest.append(optimal(trace, network, collective=kind))
    best = min(fastest, key=lambda plan: finish_s(trace, plan, network))
    best_s = finish_s(trace, best, network)
    limit_s = best_s + slack_s(trace, best_s)
    found = [_plan_in_time(trace, network, parts, limit_s) for parts in arrangements]
    numels = {tensor.name: tensor.numel for tensor in trace.tensors}

    def rank(plan: Plan) -> tuple[int, float, int]:
        error = sum(errors[bucket.collective] * numels[name] for bucket in plan.buckets for name in bucket.names)
        return error, finish_s(trace, plan, network), len(plan)

    in_time = [plan for plan in fastest if finish_s(trace, plan, network) <= limit_s]
    return min([*in_time, *(plan for plan in found if plan is not None)], key=rank)


def with_fewer_messages(
    trace: Trace, network: Network, plan: Plan, errors: Mapping[str, int], excluded: Mapping[str, Collection[str]]
) -> Plan:
    """``plan`` with neighbours merged, by the lossier of their two kinds, where that costs next to nothing.

    The least lossy plan sends a bias exactly, in a message of its own, wherever the prices of the network leave
    time for it. On a live model every message costs the host and the device a little that no price has, and a bias
    hardly counts in the error. GPT-2 at 10 Gbit/s (H200 lab, 2026-11-18): 20 messages took 3 % longer than int4
    alone, 16 took 1 % longer.

    It ends at most ``MERGED`` of the computing time later, and no merger adds more than its share of ``ADDED_ERROR``.
    ``excluded`` names, by kind, the gradients that must not use it.
    """
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    latest_s = finish_s(trace, plan, network) + MERGED * (trace.forward_s + trace.backward_s)

    def error(bucket: Bucket) -> int:
        return errors[bucket.collective] * sum(trace.tensors[place[name]].numel for name in bucket.names)

    def together(first: Bucket, second: Bucket) -> Bucket | None:
        """The two as one bucket; None if they cannot be one, or if that would add too much error."""
        # Of equal errors the two-level one, which gains more by the bytes of both.
        kind = max(first.collective, second.collective, key=lambda kind: (errors[kind], is_two_level(kind)))
        names = tuple(sorted(first.names + second.names, key=place.__getitem__))
        of_one_dtype = len({trace.tensors[place[name]].kind for name in names}) == 1
        if first.lane != second.lane or not of_one_dtype or not set(names).isdisjoint(excluded.get(kind, ())):
            return None
        one = replace(second, names=names, collective=kind)
        return one if error(one) - error(first) - error(second) <= most_added else None

    most_added = ADDED_ERROR * sum(map(error, plan.buckets)) / len(plan)
    buckets = list(plan.buckets)
    for at in range(len(buckets) - 1, 0, -1):
        one = together(buckets[at - 1], buckets[at])
        merged = Plan((*buckets[: at - 1], one, *buckets[at + 1 :])) if one is not None else None
        if merged is not None and finish_s(trace, merged, network) <= latest_s:
            buckets = list(merged.buckets)
    return Plan(tuple(buckets))


def slack_s(trace: Trace, best_s: float) -> float:
    """By how much a step may end later than the fastest one, which ends ``best_s`` after the start of backward."""
    computing_s = trace.forward_s + trace.backward_s
    step_s = trace.forward_s + best_s
    return FREE * computing_s * (computing_s / step_s) ** 2 if step_s else 0.0


class Choice(NamedTuple):
    """Gradients that travel together, and by which kind."""

    tensors: Sequence[TensorSpec]
    kind: str


class _Ends(NamedTuple):
    """When messages have left the scatter inside nodes, the link and the gather; flat ones only use the link."""

    scattered: Floats
    between: Floats
    gathered: Floats

    def at(self, some: Ints) -> "_Ends":
        """Of some of the messages."""
        return _Ends(*(ends[some] for ends in self))


class _States(NamedTuple):
    """States of the search, one to each place.

    ends     when the gradients so far have left the stages
    late     by how much the messages so far delay the gradients after them
    totals   their error
    owner    the number of groups so far
    before   the state before the last message; −1 for none
    by       the kind of the last message
    """

    ends: _Ends
    late: Floats
    totals: Ints
    owner: Ints
    before: Ints
    by: Ints


class _Bound(NamedTuple):
    """How small the error of the last groups can be at best, if they are to finish in time.

    Let messages that start at t cost c seconds in all, and have the error e. They finish in time only if
    c ≤ limit − t, so for every price p of a second, e ≥ e + p · c − p · (limit − t), and e + p · c is no less than
    that of the shortest path. That holds for any price; the highest of the bounds counts.

    prices    some prices of a second, in error
    sums      for each price and i, the least sum of (error + price · cost) over messages with the groups from i on
    limit_s   by when they have to finish
    """

    prices: Floats
    sums: Floats
    limit_s: float

    def least_error(self, i: int, starts_s: Floats) -> Floats:
        """The bound for the groups from i on, for messages that start at these instants."""
        bounds = self.sums[:, i, None] - self.prices[:, None] * (self.limit_s - starts_s)
        rounding = (ROUNDING - 1) * float(self.prices.max()) * self.limit_s
        return np.asarray(np.maximum(bounds.max(axis=0) - rounding, 0.0))


class _Part:
    """Gradients that can share buckets, with the kinds that they may use, the most faithful first.

    ``merging_s`` is what merging neighbours of one kind may cost.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], network: Network, errors: Mapping[str, int], merging_s: float
    ) -> None:
        self._merging_s = merging_s
        self._groups = at_most(tensors, MOST_GRADIENTS)
        self._kinds = sorted(errors, key=errors.__getitem__)
        self._errors = np.array([errors[kind] for kind in self._kinds], dtype=np.int64)
        self._ready = np.array([0.0, *(group[-1].ready_s for group in self._groups)])
        self._next_ready = np.append(self._ready[1:], 0.0)
        self._numel = np.cumsum([0, *(sum(t.numel for t in group) for group in self._groups)])
        # _costs[kind, i, j]: of one message with the groups i … j−1
        self._costs = np.stack([self._cost_table(network.curve(kind), kind) for kind in self._kinds])
        self._scatters, self._gathers = np.zeros_like(self._costs), np.zeros_like(self._costs)
        self._in_stages = np.array([network.inside is not None and is_two_level(kind) for kind in self._kinds])
        if network.inside is not None:
            self._scatters[self._in_stages] = self._cost_table(network.inside.scatter)
            self._gathers[self._in_stages] = self._cost_table(network.inside.gather)
        self._delays = np.array([network.delay_s(kind) for kind in self._kinds])
        self._least = self._costs.min(axis=0)
        self._fastest_s = self._earliest_s()

    def __len__(self) -> int:
        return len(self._groups)

    def _cost_table(self, curve: Curve, kind: str = DENSE) -> Floats:
        nbytes = [sum(t.cost_nbytes(kind) for t in group) for group in self._groups]
        return CostLines(curve.segments()).table(nbytes)

    def _earliest_s(self) -> float:
        """The earliest instant at which all can have travelled, by any kinds; with delays or stages, an early one."""
        every, some = len(self) + 1, np.arange(len(self) + 1)
        ends, late = _Ends(np.zeros(every), np.zeros(every), np.zeros(every)), np.zeros(every)
        for j in range(1, every):
            i, kinds = some[:j], np.arange(len(self._kinds))[:, None]
            after = self._after(ends.at(i), late[:j], kinds, i, j)
            delays = late[:j] + self._delays[:, None]
            decisive = after.gathered if j == len(self) else after.between
            kind, best = np.unravel_index((decisive + delays).argmin(), delays.shape)
            for column, found in zip((*ends, late), (*after, delays), strict=True):
                column[j] = found[kind, best]
        return float(max(ends.gathered[-1], self._ready[-1] + late[-1]))

    def _after(self, before: "_Ends", late: Floats, kind: Ints, i: Ints, j: int) -> "_Ends":
        """When a message of this kind with the groups i … j − 1 has left its stages, after those before it."""
        scattered = np.maximum(before.scattered, self._ready[j] + late) + self._scatters[kind, i, j]
        between = np.maximum(before.between, scattered) + self._costs[kind, i, j]
        return _Ends(scattered, between, np.maximum(before.gathered, between) + self._gathers[kind, i, j])

    def within(self, limit_s: float, quick: bool = False) -> list[Choice]:
        """The buckets with the smallest error that finish by ``limit_s``, or as early as any do.

        A quick search finishes as early, with a larger error.
        """
        limit_s = max(limit_s, self._fastest_s) * ROUNDING
        latest, bound = self._latest(limit_s), self._bound(limit_s)
        # With delays more states stay unbeaten, and to compare them takes more time.
        most = max(2, (MOST_STATES // 2 if self._delays.any() else MOST_STATES) // (len(self) + 1))
        states = self._states(latest, bound, min(FEW_STATES, most))
        if not quick:
            known = self._least_error(states, limit_s)
            more = self._states(latest, bound, most, known)
            # With delays, what the quick search found may be dropped where more states compete.
            states = more if self._least_error(more, limit_s) <= known else states
        if len(self) not in states.owner:  # with delays, states that could have finished in time may have been dropped
            states = self._states(self._latest(inf), bound, most)
        at = self._least_lossy(states, limit_s)
        finish_s = max(states.ends.gathered[at], self._ready[-1] + states.late[at])
        messages = []
        while states.before[at] >= 0:
            before = states.before[at]
            messages.append((int(states.owner[before]), int(states.owner[at]), int(states.by[at])))
            at = before
        return [
            Choice([tensor for group in self._groups[low:high] for tensor in group], self._kinds[kind])
            for low, high, kind in self._merge_neighbours(
                messages[::-1], min(max(limit_s, finish_s), finish_s + self._merging_s)
            )
        ]

    def _states(self, latest: "_Ends", bound: "_Bound", most: int, known: float = inf) -> "_States":
        """The states of all prefixes that may still finish in time, with an error of at most ``known``."""
        none, nothing = np.zeros(1), np.zeros(1, np.int64)
        found = _States(_Ends(none, none, none), none, nothing, nothing, nothing - 1, nothing - 1)
        delays = self._delays[:, None]
        quicker = delays < _least_before(delays)
        for j in range(1, len(self) + 1):
            costs = self._costs[:, :j, j]
            # A kind is of use only where it is faster than all that are more faithful, or delays less; and a flat one
            # where it is faster than such flat ones.
            flat = np.where(self._in_stages[:, None], inf, costs)
            useful = (costs < _least_before(costs)) | (flat < _least_before(flat)) | quicker
            kind, state = np.nonzero(useful[:, found.owner])
            start = found.owner[state]
            ends = self._after(found.ends.at(state), found.late[state], kind, start, j)
            late = found.late[state] + self._delays[kind]
            totals = found.totals[state] + self._errors[kind] * (self._numel[j] - self._numel[start])
            overdue_s = np.max([end - last[j] for end, last in zip(ends, latest, strict=True)], axis=0)
            some = np.flatnonzero((overdue_s <= 0) & (totals <= known))
            some = some[self._unbeaten(j, ends.at(some), late[some], totals[some])]
            some = some[np.argsort(overdue_s[some], kind="stable")]
            starts = np.maximum(ends.between[some], self._next_ready[j] + late[some])
            kept = some[_most_promising(totals[some] + bound.least_error(j, starts), most, known)]
            new = _States(ends.at(kept), late[kept], totals[kept], np.full(len(kept), j), state[kept], kind[kept])
            both = _Ends(*(np.append(old, more) for old, more in zip(found.ends, new.ends, strict=True)))
            found = _States(both, *(np.append(old, more) for old, more in zip(found[1:], new[1:], strict=True)))
        return found

    def _unbeaten(self, j: int, ends: "_Ends", late: Floats, errors: Ints) -> Ints:
        """Indices of the states of j that no other one beats in error and in one of their times."""
        times = [ends.between]
        if late.any():
            times += [late, ends.between + late]
        if self._in_stages.any():  # no earlier than they can matter to the next message
            free = np.maximum(ends.scattered, self._next_ready[j] + late)
            next_s = self._least[j, j + 1] if j < len(self) else 0.0
            times += [free, np.maximum(ends.gathered, np.maximum(ends.between, free) + next_s)]
        kept = [_pareto_front(one, errors) for one in times]
        return kept[0] if len(kept) == 1 else np.unique(np.concatenate(kept))

    def _least_error(self, states: "_States", limit_s: float) -> float:
        """The smallest error of all gradients that finish by ``limit_s``; infinite if none do."""
        last = states.owner == len(self)
        in_time = np.maximum(states.ends.gathered[last], self._ready[-1] + states.late[last]) <= limit_s
        return float(min(states.totals[last][in_time], default=inf))

    def _least_lossy(self, states: "_States", limit_s: float) -> int:
        """The state of all gradients with the smallest error that finishes by ``limit_s``, or the first to finish."""
        last = np.flatnonzero(states.owner == len(self))
        finish = np.maximum(states.ends.gathered[last], self._ready[-1] + states.late[last])
        in_time = finish <= max(limit_s, finish.min())
        return int(last[in_time][np.lexsort((finish[in_time], states.totals[last][in_time]))[0]])

    def _merge_neighbours(self, messages: list[tuple[int, int, int]], limit_s: float) -> list[tuple[int, int, int]]:
        """The messages (first group, last + 1, kind), neighbours of one kind merged while all finish by ``limit_s``."""
        at = len(messages) - 1
        while at > 0:
            (low, _, kind), (_, high, other) = messages[at - 1 : at + 1]
            merged = [*messages[: at - 1], (low, high, kind), *messages[at + 1 :]]
            if kind == other and self._finish_s(merged) <= limit_s:
                messages = merged
            at -= 1
        return messages

    def _finish_s(self, messages: Sequence[tuple[int, int, int]]) -> float:
        late = np.zeros(())
        ends = _Ends(late, late, late)
        for low, high, kind in messages:
            ends = self._after(ends, late, np.array(kind), np.array(low), high)
            late = late + self._delays[kind]
        return float(max(ends.gathered, self._ready[-1] + late))

    def _bound(self, limit_s: float) -> "_Bound":
        """The bound at prices around the one that bounds the error of all groups best."""
        scale = max(1, self._errors[-1]) * self._numel[-1] / max(limit_s, 1e-12)  # a step may take no time
        coarse = scale * np.geomspace(1e-6, 1e3, PRICES[0])
        least = self._least_sums(coarse)
        at = int(np.argmax(least[:, 0] - coarse * limit_s))
        fine = coarse[at] * np.geomspace(0.05, 20, PRICES[1])
        return _Bound(np.append(coarse, fine), np.vstack([least, self._least_sums(fine)]), limit_s)

    def _least_sums(self, prices: Floats) -> Floats:
        """For each price and i, the least sum of (error + price · cost) over messages with the groups from i on."""
        numel = np.maximum(self._numel[None, :] - self._numel[:, None], 0)
        one = np.full((len(prices), *numel.shape), inf)  # for one message
        for error, costs in zip(self._errors, self._costs, strict=True):
            np.minimum(one, error * numel + prices[:, None, None] * costs, out=one)
        sums = np.zeros((len(prices), len(self) + 1))
        for i in range(len(self) - 1, -1, -1):
            sums[:, i] = (one[:, i, i + 1 :] + sums[:, i + 1 :]).min(axis=1)
        return sums

    def _latest(self, limit_s: float) -> "_Ends":
        """For each i, when the groups before it must have left each stage to finish in time, at the latest.

        That is as if this stage were the only one that messages wait for.
        """
        scattered, between = np.full(len(self) + 1, inf), np.full(len(self) + 1, -inf)
        between[-1] = limit_s
        for i in range(len(self) - 1, -1, -1):
            later = slice(i + 1, len(self) + 1)
            ready, scatters = self._ready[later], self._scatters[:, i, later]
            starts = between[later] - self._costs[:, i, later]
            starts[:, -1] -= self._gathers[:, i, -1]
            in_time = starts * ROUNDING >= ready + scatters
            between[i] = starts[in_time].max(initial=-inf)
            scattered[i] = (np.minimum(scattered[later], starts) - scatters)[in_time].max(initial=-inf)
        return _Ends(scattered * ROUNDING, between * ROUNDING, np.full(len(self) + 1, limit_s * ROUNDING))


def _least_before(rows: Floats) -> Floats:
    """For each row the least of all rows before it; infinite for the first."""
    first = np.full((1, rows.shape[1]), inf)
    return np.asarray(np.minimum.accumulate(np.vstack([first, rows[:-1]]), axis=0))


def _pareto_front(times: Floats, errors: Ints) -> Ints:
    """Indices of the states that no other one beats in both numbers, the earliest first."""
    order = np.lexsort((errors, times))
    ordered = errors[order]
    smallest = np.minimum.accumulate(ordered)
    return np.asarray(np.append(order[:1], order[1:][ordered[1:] < smallest[:-1]]))


def _most_promising(least: Floats, most: int, known: float) -> Ints:
    """Indices of the ``most`` states with the least bound, where it is not above ``known``."""
    kept = np.flatnonzero(least <= known)
    if len(kept) <= most:
        return kept
    # The first, which has most time left, always stays: what finishes in time may be left to it.
    others = kept[1:][np.argsort(least[kept[1:]], kind="stable")[: most - 1]]
    return np.sort(np.append(kept[0], others))


def _arrangements(
    trace: Trace,
    network: Network,
    errors: Mapping[str, int],
    forbidden: Mapping[str, frozenset[str]],
    merging_s: float,
) -> list[list[_Part]]:
    """Ways to divide the gradients into parts.

    In the first, gradients are apart where they may use other kinds. In the second, they are apart by dtype alone, so
    that fewer messages are sent, and use only what all of their dtype may use.
    """

    def kinds_of(tensor: TensorSpec) -> tuple[str, ...]:
        return tuple(kind for kind in errors if tensor.name not in forbidden.get(kind, ()))

    apart, together = [], []
    for tensors in trace.by_kind():
        by_kinds = sorted(tensors, key=kinds_of)
        for kinds, part in groupby(by_kinds, key=kinds_of):
            apart.append(_Part(list(part), network, {kind: errors[kind] for kind in kinds}, merging_s))
        common = [kind for kind in errors if all(t.name not in forbidden.get(kind, ()) for t in tensors)]
        together.append(_Part(tensors, network, {kind: errors[kind] for kind in common}, merging_s))
    return [apart] if len(apart) == len(together) else [apart, together]


def _plan_in_time(trace: Trace, network: Network, parts: Sequence[_Part], limit_s: float) -> Plan | None:
    """The plan of parts that were each planned apart, if they can be made to finish in time together."""
    allowed_s, before_s = limit_s, inf
    for _ in range(MAX_ATTEMPTS):
        plan = _plan_of_choices(trace, [part.within(allowed_s) for part in parts])
        late_s = finish_s(trace, plan, network) - limit_s
        if late_s <= limit_s * (ROUNDING - 1):
            return plan
        if late_s >= before_s:  # a stricter limit does not help
            return None
        allowed_s, before_s = allowed_s - late_s, late_s
    return None


def _plan_of_choices(trace: Trace, parts: Sequence[Sequence[Choice]]) -> Plan:
    """One plan of the choices of all parts, launched in the order in which they are complete."""
    place = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    choices = sorted((choice for part in parts for choice in part), key=lambda choice: place[choice.tensors[-1].name])
    return Plan(tuple(Bucket(tuple(t.name for t in tensors), collective=kind) for tensors, kind in choices))
