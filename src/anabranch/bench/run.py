"""One benchmark: a subject on the ranks of the default process group, from the first step to the finished figures."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from time import monotonic

import torch
import torch.distributed as dist

from anabranch.alpha_beta import AlphaBeta
from anabranch.bench.compress import Rival, compression
from anabranch.bench.contestants import OPTIONS, Contestant, baselines, living, ours, rivals
from anabranch.bench.race import Turn, race
from anabranch.bench.sparse import sparse_rivals
from anabranch.bench.subject import Subject
from anabranch.bench.zoo import Step
from anabranch.comm.dense import COLLECTIVES
from anabranch.errors import AnabranchError
from anabranch.lab.environment import LAB, LAB_BIT_S
from anabranch.parallel import DataParallel
from anabranch.report.documents import BASELINE, COMPUTE, OURS, Benchmark, BenchmarkRow
from anabranch.sparse.options import OkTopk
from anabranch.version import __version__

MOST_STEPS = 1000  # for DataParallel to choose: it takes about a hundred


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure, and what. ``only``: those contestants whose name contains one of these, if any are given."""

    iters: int = 10
    batches: int = 10
    warmup: int = 3
    profile_steps: int = 10
    sizes_mib: Sequence[float] = (1, 5, 10, 50, 100)
    lanes: Sequence[int] = (2, 4)
    wires: Sequence[str] = ()
    only: Sequence[str] = ()


def run(subject: Subject, settings: Settings, say: Callable[[str], None]) -> Benchmark:
    """Let DataParallel choose, then race everyone. Collective; ``say`` gets a word now and then."""
    if dist.get_world_size() == 1:
        raise AnabranchError("there is one rank, so nothing to send and nothing to compare: run at least two")
    say(f"{subject.name}: DataParallel profiles, measures, plans and chooses")
    asked = {wire: compression(wire) for wire in settings.wires}
    auto, auto_step = _chosen(subject, settings, None)
    packed = [(wire, *_chosen(subject, settings, way)) for wire, way in asked.items() if not isinstance(way, Rival)]
    assert auto.trace is not None and auto.network is not None
    network = auto.network
    for wire, parallel, _ in packed:  # each has measured, and corrected by its own steps, what its wire costs
        assert parallel.network is not None
        if wire in COLLECTIVES:  # any plan can use it
            network = replace(network, curves={**network.curves, wire: parallel.network.curve(wire)}, model=None)
    model, step = subject.build()
    nccl = "nccl" in dist.get_backend()
    sparse = {wire: way for wire, way in asked.items() if isinstance(way, Rival)}
    compressed = [
        *(living(f"{OURS}, {wire}", parallel, own_step) for wire, parallel, own_step in packed),
        *sparse_rivals(model, step, auto.trace, network, sparse, [parallel.plan for _, parallel, _ in packed]),
    ]
    field = [
        *baselines(model, step, subject.device),
        *rivals(model, step, auto.trace, network, settings.sizes_mib, nccl),
        living(OURS, auto, auto_step),
        *compressed,
        *ours(model, step, auto.trace, network, settings.lanes),
    ]
    always = {COMPUTE, BASELINE, OURS, *(contestant.name for contestant in compressed)}
    field = [contestant for contestant in field if _wanted(contestant.name, settings.only, always)]
    turns = _raced(subject, settings, field, say)
    everyone = [auto, *(parallel for _, parallel, _ in packed)]
    explanation = "\n\n".join(parallel.explain() for parallel in everyone)
    forward_share = auto.trace.forward_s / (auto.trace.forward_s + auto.trace.backward_s)
    compute_s = median(turn.seconds for turn in turns[COMPUTE])
    bound_s = max(compute_s, forward_share * compute_s + wire_s(auto.trace.nbytes, dist.get_world_size()))
    counted = counts(turns[BASELINE], auto.trace.nbytes)
    for parallel in everyone:
        parallel.close()
    rows = tuple(_row(contestant, turns[contestant.name], counted) for contestant in field)
    skipped = () if nccl else ("PowerSGD: torch's hook waits inside a callback, which hangs on Gloo",)
    return Benchmark(
        subject.name, subject.batch, subject.unit, dist.get_world_size(), rows, bound_s, explanation,
        _facts(subject, settings), skipped,
    )  # fmt: skip


def _raced(
    subject: Subject, settings: Settings, field: Sequence[Contestant], say: Callable[[str], None]
) -> dict[str, list[Turn]]:
    """Everyone's turns; says after each round how long the others will take."""
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in field}
    begun_s = monotonic()
    racing = race(field, settings.iters, settings.batches, settings.warmup, subject.device)
    for done, turn in enumerate(racing, start=1):
        turns[turn.name].append(turn)
        if done % len(field) == 0:
            spent_s = monotonic() - begun_s
            number = done // len(field)
            left_s = spent_s / number * (settings.iters - number)
            say(f"{subject.name}: round {number} of {settings.iters}, {len(field)} contestants; {left_s:.0f} s to go")
    return turns


def counts(baseline: Sequence[Turn], nbytes: int) -> bool:
    """Whether network cards count what ranks send: DDP's own gradients, all of them once, must have been seen.

    They are not where ranks share a host and its memory, or where RDMA passes by the kernel.
    """
    return median(turn.sent_nbytes for turn in baseline) >= nbytes


def wire_s(nbytes: int, ranks: int) -> float:
    """What an all-reduce of so much takes at least on the lab's slowest link; 0 where no lab tells its rate.

    Every rank must send and receive 2(N−1)/N of it, whatever the algorithm.
    """
    rate_bit_s = float(os.environ.get(LAB_BIT_S) or 0)
    return nbytes * AlphaBeta("ring", 0.0, 8 / rate_bit_s).line(ranks)[1] if rate_bit_s else 0.0


def _chosen(subject: Subject, settings: Settings, way: str | OkTopk | None) -> tuple[DataParallel, Step]:
    """A DataParallel that has made its choice, on a model of its own."""
    model, step = subject.build()
    parallel = DataParallel(model, compress=way, profile_steps=settings.profile_steps, **OPTIONS)
    for _ in range(MOST_STEPS):
        step(parallel)
        if parallel.timeline is not None:  # of what it has chosen
            return parallel, step
    raise RuntimeError(f"nothing to compare, DataParallel makes no choice: {parallel.explain()}")


def _wanted(name: str, only: Sequence[str], always: Collection[str]) -> bool:
    """Those with which all others are compared always run, and those that were asked for by name."""
    return not only or name in always or any(part in name for part in only)


def _row(contestant: Contestant, turns: Sequence[Turn], counted: bool) -> BenchmarkRow:
    plan = contestant.plan
    return BenchmarkRow(
        contestant.name,
        tuple(turn.seconds for turn in turns),
        contestant.predicted_s,
        buckets=len(plan) if plan is not None else None,
        lanes=plan.lanes if plan is not None else None,
        sent_nbytes=median(turn.sent_nbytes for turn in turns) if counted else None,
    )


def _facts(subject: Subject, settings: Settings) -> dict[str, str]:
    cuda, lab = subject.device.type == "cuda", os.environ.get(LAB, "")
    versions = [f"anabranch {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if cuda:
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "network": lab or "as it is: no lab",
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(subject.device) if cuda else f"CPU, {platform.machine()}",
        "host": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": ", ".join(versions),
        "command": shlex.join(["anabranch", *sys.argv[1:]]) + (" (under anabranch lab)" if lab else ""),
        "measured": f"{settings.iters} rounds, each contestant {settings.batches} steps a round, in turn",
    }
