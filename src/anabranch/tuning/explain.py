"""The text of ``explain()``: what a DataParallel does and why, with predictions next to measurements."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.exchange.nodes import UNKNOWN, FoundNodes
from anabranch.observe.measure import POOR_SPREAD
from anabranch.planning.simulator import lower_bound_s
from anabranch.tuning.decisions import step_noise
from anabranch.tuning.trial import Trial, prediction_s, share_of_recorded
from anabranch.values.files import plain
from anabranch.values.kinds.fidelity import is_compressed
from anabranch.values.kinds.names import DENSE, is_two_level, two_level
from anabranch.values.network import InsideNodes, Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.trace import Trace

MIB = 1 << 20
MUCH_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of tuning so far, for ``explanation``.

    kept            the trial of the layout in force; None before the first choice
    plan            the plan of the next step; None for DDP's own buckets
    network_note    says that the network is emulated, if it is
    exchange_lines  the state of exchanges, such as residuals
    cost            what searching has cost; empty before the first trial
    errors          measured relative errors of compressed buckets, once there are samples
    graph_lines     the graphs of a compiled model
    nodes           the ranks' nodes, or why exchanges are flat
    """

    stage: str
    trace: Trace | None
    network: Network | None
    trials: Sequence[Trial]
    kept: Trial | None
    plan: Plan | None
    network_note: str | None
    exchange_lines: Sequence[str]
    cost: str = ""
    errors: Mapping[Bucket, float] = field(default_factory=dict)
    graph_lines: Sequence[str] = ()
    nodes: FoundNodes = UNKNOWN


def explanation(found: Findings) -> str:
    """Stage, trace, network, every layout that was tried with prediction and measurement, and the plan in force."""
    lines = [f"anabranch: {found.stage}."]
    trace, network = found.trace, found.network
    if trace is not None:
        lines.append(
            f"Model: {len(trace)} gradients, {trace.nbytes / MIB:.1f} MiB; forward {trace.forward_s * 1e3:.2f} ms, "
            f"backward {trace.backward_s * 1e3:.2f} ms (slowest rank)."
        )
        if (share := share_of_recorded(trace)) < 1:
            lines.append(
                f"That is {share:.0%} of what was recorded: the plan's messages leave more of the device free."
            )
        if name := trace.meta.get("order_changed_at"):
            lines.append(f"Gradients change their order between steps, first at {name}: plans may wait for late ones.")
    lines += found.graph_lines
    if found.nodes != UNKNOWN:
        lines.append(str(found.nodes))
    title = f"Network ({found.network_note})" if found.network_note else "Network"
    if network is not None:
        whole_s = network.allreduce_s(trace.nbytes) if trace is not None else 0.0
        lines.append(
            f"{title}: {network.world_size} ranks, {network.curve('dense').start_s * 1e3:.3f} ms per message, "
            f"{whole_s * 1e3:.2f} ms for all gradients at once; {_second_lane_gain(network)}."
        )
        if network.inside is not None and trace is not None and two_level(DENSE) in network.curves:
            lines.append(_inside_nodes(trace, network, network.inside))
        if notes := [str(note) for name, note in network.meta.items() if name.startswith("refined")]:
            lines.append(f"Corrected by live steps: {'; '.join(notes)}.")
        spread = network.meta.get("median_relative_spread")
        if isinstance(spread, float) and spread > POOR_SPREAD:
            lines.append(f"Its costs varied by {spread:.0%} while they were measured, so predictions are uncertain.")
        if trace is not None:
            lines.append(_exposed_bound(trace, network))
    elif found.network_note:
        lines.append(f"{title}: not measured.")
    if found.trials:
        lines += ["", *_trial_rows(found)]
    if found.plan is not None:
        lines += ["", *_bucket_rows(found.plan, trace, network, found.errors), *found.exchange_lines]
    return "\n".join(map(plain, lines))  # a network or a trace may come from a file


def in_short(found: Findings) -> str:
    """What was gained over the layout's own buckets, or that nothing was, and why: one or two lines."""
    own = min((trial for trial in found.trials if trial.plan is None), key=lambda trial: trial.step_s, default=None)
    kept = found.kept
    if kept is None:
        return f"nothing was chosen before training ended ({found.stage}): a search takes some 60 steps."
    if own is None:  # the last search began with the plan of an earlier one
        return f"{found.stage}, {kept.step_s * 1e3:.2f} ms a step; the last search compared it with other plans only."
    took = f"{own.label} {own.step_s * 1e3:.2f} ms a step"
    if kept.plan is None:
        others = [f"{trial.label} {trial.step_s * 1e3:.2f} ms" for trial in found.trials if trial is not own]
        tried = f" Tried: {'; '.join(others)}." if others else ""
        return f"nothing was gained ({found.stage}); {took}.{tried}"
    seconds = prediction_s(found.trace, kept.plan, found.network)
    predicted = f" (predicted {seconds * 1e3:.2f} ms)" if seconds is not None else ""
    return (
        f"{own.step_s / kept.step_s:.2f}× as fast. {took}, {kept.label} {kept.step_s * 1e3:.2f} ms{predicted}; from "
        "the start of forward to averaged gradients."
    )


def _exposed_bound(trace: Trace, network: Network) -> str:
    """The least exposed time of any plan on one lane, and its reason."""
    first, last = trace.tensors[0], trace.tensors[-1]
    least_ms = (lower_bound_s(trace, network) - trace.backward_s) * 1e3
    reason = (
        f"the last gradient, {last.name}, must still be sent when backward ends"
        if network.allreduce_s(trace.nbytes) < trace.backward_s - first.ready_s
        else "communication takes longer than backward"
    )
    return f"At least {least_ms:.2f} ms stay exposed with dense messages on one lane, since {reason}."


def _inside_nodes(trace: Trace, network: Network, inside: InsideNodes) -> str:
    """What sums inside nodes cost, and the exact exchange between nodes after them."""
    between_ms, inside_ms = (
        seconds * 1e3
        for seconds in (
            network.seconds(two_level(DENSE), trace.nbytes),
            inside.scatter.seconds(trace.nbytes) + inside.gather.seconds(trace.nbytes),
        )
    )
    return f"Summed inside nodes first, they take {inside_ms:.2f} ms there, and {between_ms:.2f} ms between nodes."


def _second_lane_gain(network: Network) -> str:
    """What a second lane gains, by how two simultaneous messages slow each other."""
    slowdown = network.contention.slowdown(2)
    if slowdown >= 2 * 0.98:
        return "two messages at once take no less time than one after the other"
    gain = f"a second lane gains up to {2 / slowdown:.2f}×"
    return f"two messages at once take {slowdown:.2f} times as long as one, so {gain}"


def _trial_rows(found: Findings) -> list[str]:
    """A row per layout that was tried: its prediction and its measurement."""
    rows = [("", "layout", "buckets", "lanes", "predicted", "measured", "error", "exposed", "speed-up", "result")]
    for trial in found.trials:
        predicted = error = "-"
        if (seconds := prediction_s(found.trace, trial.plan, found.network)) is not None:
            predicted, error = f"{seconds * 1e3:.2f} ms", f"{seconds / trial.step_s - 1:+.0%}"
        buckets, lanes = (str(len(trial.plan)), str(trial.plan.lanes)) if trial.plan is not None else ("-", "1")
        rows.append((
            "*" if trial is found.kept else "", trial.label, buckets, lanes, predicted, f"{trial.step_s * 1e3:.2f} ms",
            error, f"{trial.exposed_s * 1e3:.2f} ms", f"{found.trials[0].step_s / trial.step_s:.2f}×", trial.result,
        ))  # fmt: skip
    star = "* in force. " if found.kept in found.trials else ""
    note = f"{star}From the start of forward to averaged gradients; medians on rank 0."
    lines = [*_table(rows, left=(0, 1, 9)), note]
    noise = step_noise([trial.steps_s for trial in found.trials])
    if noise > MUCH_NOISE:
        lines.append(f"Steps of the same layout differ by about {noise:.0%}, so small gains cannot be seen.")
    return [*lines, found.cost] if found.cost else lines


def _bucket_rows(plan: Plan, trace: Trace | None, network: Network | None, errors: Mapping[Bucket, float]) -> list[str]:
    """A row per bucket: its exchange, its predicted time by itself and that of a dense one, and its measured error."""
    tensors = {tensor.name: tensor for tensor in trace.tensors} if trace is not None else {}
    rows = [("  #", "lane", "by", "MiB", "gradients", "ready, ms", "takes, ms", "dense, ms", "error", "last gradient")]
    taken_s = dense_s = 0.0
    for index, bucket in enumerate(plan.buckets):
        kind, members = bucket.collective, [tensors[name] for name in bucket.names if name in tensors]
        nbytes = sum(tensor.nbytes for tensor in members)
        mib = ready = takes = dense = "-"
        if members:
            mib, ready = f"{nbytes / MIB:.3f}", f"{max(tensor.ready_s for tensor in members) * 1e3:.2f}"
        if members and network is not None and kind in network.curves:
            seconds = network.seconds(kind, sum(tensor.cost_nbytes(kind) for tensor in members))
            seconds += sum(network.inside_s(kind, nbytes))
            plain_s = network.seconds(DENSE, nbytes)
            takes, dense = f"{seconds * 1e3:.2f}", f"{plain_s * 1e3:.2f}"
            if kind != DENSE:
                taken_s, dense_s = taken_s + seconds, dense_s + plain_s
        error = f"{errors[bucket]:.2%}" if bucket in errors else "-"
        count, last = str(len(bucket.names)), bucket.names[-1]
        rows.append((str(index), str(bucket.lane), kind, mib, count, ready, takes, dense, error, last))
    lines = [f"Plan {plan.fingerprint[:12]}:", *_table(rows, left=(2, 9))]
    if dense_s > 0:
        kinds = [bucket.collective for bucket in plan.buckets if bucket.collective != DENSE]
        ways = ["are compressed"] * any(map(is_compressed, kinds)) + ["sum inside nodes"] * any(
            map(is_two_level, kinds)
        )
        lines.append(
            f"{len(kinds)} of {len(plan)} buckets {' or '.join(ways)}, which saves {(dense_s - taken_s) * 1e3:.2f} ms "
            f"of the {dense_s * 1e3:.2f} ms that dense messages between all ranks would take (predicted)."
        )
    if errors:
        lines.append(
            "error: of a step's averages, relative to the exact ones, in samples. What residuals keep counts as error, "
            "although a later step sends it."
        )
    return lines


def _table(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows in columns, those with numbers in ``left`` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " ".join(cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
