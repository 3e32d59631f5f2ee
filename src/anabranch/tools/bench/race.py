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

from anabranch.exchange.nodes import local_size
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
RECEIVED, SENT = 0, 8  # their places among the numbers of a card


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """How long to measure: ``iters`` turns of each contestant, ``batches`` steps a turn after ``warmup`` others."""

    iters: int = 10
    batches: int = 10
    warmup: int = 3


class Turn(NamedTuple):
    """One turn of one contestant: mean step on the slowest rank, and bytes per step through a host's network card.

    Of the bytes that a card received and those that it sent the greater number counts; mean over the hosts.
    """

    name: str
    seconds: float
    card_nbytes: float


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
    cards_count = cards_count_all(turns[BASELINE], trace.nbytes)
    rows = tuple(
        BenchmarkRow(
            contestant.name,
            tuple(turn.seconds for turn in turns[contestant.name]),
            contestant.predicted_s,
            buckets=None if contestant.plan is None else len(contestant.plan),
            lanes=None if contestant.plan is None else contestant.plan.lanes,
            card_nbytes=median(turn.card_nbytes for turn in turns[contestant.name]) if cards_count else None,
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
        ranks_per_host=ranks_per_host(),
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
    """Seconds per step, the maximum over the ranks, and bytes per step through a card, the mean over them.

    Cards are read outside the time, when no rank has anything under way.
    """
    _meet(device)
    before, begun_s = card_nbytes(), perf_counter()
    for _ in range(batches):
        step()
    _synchronize(device)
    took_s = perf_counter() - begun_s
    _meet(device)
    passed = max(after - earlier for after, earlier in zip(card_nbytes(), before, strict=True))
    seconds, nbytes = torch.tensor([[took_s], [passed]], dtype=torch.float64, device=device) / batches
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(nbytes)
    return float(seconds), float(nbytes) / dist.get_world_size()


def card_nbytes() -> tuple[int, int]:
    """Bytes that this host's network cards have received and sent, loopback excluded; 0 where nothing counts them."""
    try:
        lines = COUNTERS.read_text().splitlines()[2:]  # two lines of headings
    except OSError:
        return 0, 0
    cards = dict(line.split(":", 1) for line in lines)
    counts = [list(map(int, card.split())) for name, card in cards.items() if name.strip() != "lo"]
    return sum(count[RECEIVED] for count in counts), sum(count[SENT] for count in counts)


def _meet(device: torch.device) -> None:
    """Return when all ranks have come here with nothing under way."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cards_count_all(baseline: Sequence[Turn], nbytes: int) -> bool:
    """Whether network cards count what ranks send: DDP must have been seen to send all its gradients once.

    They do not where ranks share a host and its memory, or where RDMA bypasses the kernel.
    """
    return median(turn.card_nbytes for turn in baseline) >= nbytes


def _bound_s(trace: Trace, compute_s: float) -> float:
    """The shortest step that sends every gradient in full: computation, or forward and all bytes at the link's rate.

    2(N−1)/N of the bytes must pass the card of each of N hosts, whatever the algorithm. Outside a lab no rate is known.
    """
    hosts = dist.get_world_size() // ranks_per_host()
    rate_bit_s = float(os.environ.get(LAB_BIT_S) or 0)
    s_per_byte = AlphaBeta("ring", 0.0, 8 / rate_bit_s).line(hosts)[1] if rate_bit_s else 0.0
    forward_share = trace.forward_s / (trace.forward_s + trace.backward_s)
    return max(compute_s, forward_share * compute_s + trace.nbytes * s_per_byte)


def ranks_per_host() -> int:
    """As the launcher says, and 1 where it says nothing that divides the ranks."""
    said = local_size()
    ranks = int(said) if said.isdecimal() else 0
    return ranks if ranks and dist.get_world_size() % ranks == 0 else 1


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
