"""One benchmark: a subject on the ranks of the default process group, from the first step to the finished figures."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from anabranch.bench.contestants import AUTO, DDP, OPTIONS, Contestant, baselines, living, ours, rivals
from anabranch.bench.race import race
from anabranch.bench.subject import Subject
from anabranch.network import Network
from anabranch.report.benchmark import Benchmark, Row
from anabranch.runtime.candidates import least_s, predicted_s
from anabranch.runtime.measure import LARGEST_NBYTES, measure
from anabranch.runtime.parallel import DataParallel
from anabranch.trace import Trace
from anabranch.version import __version__

BF16_BUDGET_S = 2.0
MOST_STEPS = 1000  # for DataParallel to choose: it takes about a hundred


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure, and what. ``only``: those contestants whose name contains one of these, if any are given."""

    iters: int = 10
    batches: int = 10
    warmup: int = 2
    profile_steps: int = 10
    sizes_mib: Sequence[float] = (1, 5, 10, 50, 100)
    lanes: Sequence[int] = (2, 4)
    only: Sequence[str] = ()


def run(subject: Subject, settings: Settings, say: Callable[[str], None]) -> Benchmark:
    """Let DataParallel choose, then race everyone. Collective; ``say`` gets a word now and then."""
    own_model, own_step = subject.build()
    say(f"{subject.name}: DataParallel profiles, measures, plans and chooses")
    parallel = DataParallel(own_model, profile_steps=settings.profile_steps, **OPTIONS)
    for _ in range(MOST_STEPS):
        own_step(parallel)
        if parallel.timeline is not None:  # of what it has chosen
            break
    trace, network = parallel.trace, parallel.network
    if trace is None or network is None:
        raise RuntimeError(f"nothing to compare: {parallel.explain()}")
    explanation = parallel.explain()
    network = _with_bf16(network, trace, subject.device)

    model, step = subject.build()
    nccl = "nccl" in dist.get_backend()
    field = [
        *baselines(model, step, subject.device),
        *rivals(model, step, trace, network, settings.sizes_mib, nccl),
        living(parallel, own_step),
        *ours(model, step, trace, network, settings.lanes),
    ]
    field = [c for c in field if _wanted(c, settings.only)]
    turns: dict[str, list[float]] = {contestant.name: [] for contestant in field}
    for done, (name, seconds) in enumerate(
        race(field, settings.iters, settings.batches, settings.warmup, subject.device)
    ):
        turns[name].append(seconds)
        if (done + 1) % len(field) == 0:
            say(f"{subject.name}: round {(done + 1) // len(field)} of {settings.iters}")
    parallel.close()
    rows = [_row(contestant, turns[contestant.name], trace, network) for contestant in field]
    skipped = () if nccl else ("PowerSGD: torch's hook waits inside a callback, which hangs on Gloo",)
    return Benchmark(
        subject.name, subject.batch, subject.unit, dist.get_world_size(), tuple(rows), least_s(trace, network),
        explanation, _facts(subject, settings), skipped,
    )  # fmt: skip


def _wanted(contestant: Contestant, only: Sequence[str]) -> bool:
    """DDP and DataParallel always run: everything is compared with them."""
    return not only or contestant.name in (DDP, AUTO) or any(part in contestant.name for part in only)


def _row(contestant: Contestant, turns_s: Sequence[float], trace: Trace, network: Network) -> Row:
    plan = contestant.plan
    predicted = contestant.name == AUTO or plan is not None
    return Row(
        contestant.name,
        tuple(turns_s),
        predicted_s(trace, plan, network) if predicted else None,
        len(plan) if plan is not None else None,
        plan.lanes if plan is not None else None,
    )


def _with_bf16(network: Network, trace: Trace, device: torch.device) -> Network:
    """The network, and what bf16 on the wire costs."""
    group = dist.group.WORLD
    assert group is not None
    largest = min(max(trace.nbytes, 1 << 16), LARGEST_NBYTES)
    measured = measure([group], device, largest, BF16_BUDGET_S, ("dense", "bf16"))
    return replace(network, curves={**network.curves, "bf16": measured.curve("bf16")}, model=None)


def _facts(subject: Subject, settings: Settings) -> dict[str, str]:
    cuda = subject.device.type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "network": os.environ.get("ANABRANCH_LAB", "as it is: no lab"),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(subject.device) if cuda else f"CPU, {platform.machine()}",
        "host": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"anabranch {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "measured": f"{settings.iters} rounds, each contestant {settings.batches} steps a round, in turn",
    }
