"""A race: contestants take turns on the same ranks, so that whatever slows the machine slows all of them alike."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.observe.environment import lab_note
from anabranch.tools.bench.compiled import compiled_name
from anabranch.tools.bench.contestants import Contestant
from anabranch.tools.bench.progress import RaceProgress, Say
from anabranch.tools.bench.workload import Workload
from anabranch.tools.lab.rank_environment import LAB_BIT_S
from anabranch.tools.report.documents import BASELINE, COMPUTE, Benchmark, BenchmarkRow
from anabranch.tools.report.formatting import count
from anabranch.values.links import AlphaBeta
from anabranch.values.trace import Trace
from anabranch.values.version import __version__

COUNTERS = Path("/proc/net/dev")  # of this network namespace: in a lab, that of this rank's host


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """How long to measure: ``iters`` turns of each contestant, ``batches`` steps a turn after ``warmup`` others."""

    iters: int = 10
    batches: int = 10
    warmup: int = 3


class Turn(NamedTuple):
    """One turn of one contestant: mean step on the slowest rank, and bytes per step sent by the busiest rank's host."""

    name: str
    seconds: float
    sent_nbytes: float


def race_all(
    workload: Workload, settings: RaceSettings, contestants: Sequence[Contestant], trace: Trace, say: Say
) -> Benchmark:
    """Let the contestants, COMPUTE and BASELINE among them, take turns, and summarise. Collective.

    ``trace``: of the model, for the shortest step that sends every gradient in full.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    progress = RaceProgress(workload.name, len(contestants), settings.iters, say)
    for turn in race(contestants, settings.iters, settings.batches, settings.warmup, workload.device):
        turns[turn.name].append(turn)
        progress.turn_done(turn.name, turn.seconds)
    nic_counts = nic_counts_all(turns[BASELINE], trace.nbytes)
    rows = tuple(
        BenchmarkRow(
            contestant.name,
            tuple(turn.seconds for turn in turns[contestant.name]),
            contestant.predicted_s,
            buckets=None if contestant.plan is None else len(contestant.plan),
            lanes=None if contestant.plan is None else contestant.plan.lanes,
            sent_nbytes=median(turn.sent_nbytes for turn in turns[contestant.name]) if nic_counts else None,
        )
        for contestant in contestants
    )
    references = [turns[name] for name in (COMPUTE, compiled_name(COMPUTE)) if name in turns]
    return Benchmark(
        workload.name,
        workload.batch,
        workload.unit,
        dist.get_world_size(),
        rows,
        _bound_s(trace, min(median(turn.seconds for turn in found) for found in references)),
        explanation="",
        facts=_facts(workload, settings),
    )


def race(
    contestants: Sequence[Contestant], iters: int, batches: int, warmup: int, device: torch.device
) -> Iterator[Turn]:
    """Yields every turn when it is over, ``iters`` turns of each contestant. Collective.

    A turn is the mean over ``batches`` steps, after at least ``warmup`` uncounted ones. Every round begins with another
    contestant, and every second one goes the other way round, so that none always follows the same one.
    """
    for number in range(iters):
        first = number * len(contestants) // iters
        in_turn = [*contestants[first:], *contestants[:first]]
        for contestant in in_turn if number % 2 == 0 else [in_turn[0], *reversed(in_turn[1:])]:
            with contestant.enter() as step:
                for _ in range(max(warmup, contestant.warmup)):
                    step()
                yield Turn(contestant.name, *_means(step, batches, device))


def _means(step: Callable[[], None], batches: int, device: torch.device) -> tuple[float, float]:
    """Seconds and sent bytes per step, each the maximum over the ranks."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)
    before_nbytes, begun_s = sent_nbytes(), perf_counter()
    for _ in range(batches):
        step()
    _synchronize(device)
    took = [perf_counter() - begun_s, float(sent_nbytes() - before_nbytes)]
    means = torch.tensor(took, dtype=torch.float64, device=device) / batches
    dist.all_reduce(means, op=dist.ReduceOp.MAX)
    seconds, nbytes = means.tolist()
    return seconds, nbytes


def sent_nbytes() -> int:
    """Bytes that this host's network interfaces have sent, loopback excluded; 0 where the system has no such count."""
    try:
        lines = COUNTERS.read_text().splitlines()[2:]  # two lines of headings
    except OSError:
        return 0
    cards = dict(line.split(":", 1) for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards.items() if name.strip() != "lo")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nic_counts_all(baseline: Sequence[Turn], nbytes: int) -> bool:
    """Whether network interfaces count what ranks send: DDP must have been seen to send all its gradients once.

    They do not where ranks share a host and its memory, or where RDMA bypasses the kernel.
    """
    return median(turn.sent_nbytes for turn in baseline) >= nbytes


def _bound_s(trace: Trace, compute_s: float) -> float:
    """The shortest step that sends every gradient in full: computation, or forward and all bytes at the link's rate.

    Every rank must send and receive 2(N−1)/N of the bytes, whatever the algorithm. Outside a lab no rate is known.
    """
    rate_bit_s = float(os.environ.get(LAB_BIT_S) or 0)
    s_per_byte = AlphaBeta("ring", 0.0, 8 / rate_bit_s).line(dist.get_world_size())[1] if rate_bit_s else 0.0
    forward_share = trace.forward_s / (trace.forward_s + trace.backward_s)
    return max(compute_s, forward_share * compute_s + trace.nbytes * s_per_byte)


def _facts(workload: Workload, settings: RaceSettings) -> dict[str, str]:
    cuda, lab = workload.device.type == "cuda", lab_note() or ""
    rounds, steps = count(settings.iters, "round"), count(settings.batches, "step")
    versions = [f"anabranch {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if cuda:
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "network": lab or "as it is: no lab",
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(workload.device) if cuda else f"CPU, {platform.machine()}",
        "host": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": ", ".join(versions),
        "command": shlex.join(["anabranch", *sys.argv[1:]]) + (" (under anabranch lab)" if lab else ""),
        "measured": f"{rounds}, each contestant {steps} a round, in turn",
    }
