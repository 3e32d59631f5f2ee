"""What searching costs: whole trainings under DataParallel beside stock DDP in the same run; prints Markdown.

    anabranch lab --hosts 4 --rate 100mbit -- python benchmarks/search_cost.py short
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/search_cost.py noisy --load 2
    anabranch lab --hosts 4 --rate 100mbit -- python benchmarks/search_cost.py restart
    anabranch lab --hosts 4 --rate 25gbit --backend nccl -- python benchmarks/search_cost.py first --model resnet50

short     240 steps on a slow link, one training after the other, in reversed order in every other repeat
noisy     3,000 steps of a small model while other processes load the machine; both trainings take turns on the same
          ranks, so that both meet the same noise
restart   the same training started twice with a plan cache: the first steps of the second start beside its later ones
first     the first search alone, in steps and seconds, for models of ``anabranch bench`` or replayed traces

Stages come from the metrics of each step, except in ``noisy``: there a logger would cost as much as what is looked for,
so choices are counted in the log. Every training ends after ``--limit-s``. Progress goes to stderr.
"""

import argparse
import json
import logging
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from inspect import signature
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.bench.workload import Workload, replay_workload, zoo_workload
from anabranch.bench.zoo import MODELS, Step
from anabranch.cli import arguments
from anabranch.cli.ranks import join
from anabranch.lab.environment import LAB

DDP = "DDP"
SETTLED = ("running", "no longer planning", "stopped planning")  # stages in which nothing is searched
ASK_EVERY = 10  # steps after which rank 0 says whether to go on
TELL_EVERY_S = 10.0
PAUSE = 5  # a step so many times longer than the median is a pause
FIRST_STEPS = 50  # of a second start
BURST = """
import os, random, sys, time
rng, parent = random.Random(int(sys.argv[1])), os.getppid()
while os.getppid() == parent:
    mean_s = rng.choice((0.01, 0.1, 1.0))
    end = time.perf_counter() + rng.expovariate(1 / mean_s)
    while time.perf_counter() < end:
        pass
    time.sleep(rng.expovariate(1 / mean_s))
"""  # spins half of the time, in bursts of very different lengths; ends with its parent


def main() -> None:
    """Run one scenario and print its table, or JSON, on rank 0."""
    options = parsed()
    torch.set_num_threads(1)
    device = join(None, on_gpu=not getattr(options, "trace", None))
    if dist.get_world_size() == 1:
        raise SystemExit("search_cost needs at least two ranks: use anabranch lab, or torchrun as above")
    results, lines = options.scenario(options, device)
    if dist.get_rank() == 0:
        facts = described(device)
        if options.json:
            print(json.dumps({"scenario": options.name, "facts": facts, "results": results}, indent=1))
        else:
            print("\n".join([f"\n## {options.name}\n", ", ".join(facts.values()) + ".\n", *lines]))
    dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    """The options of the scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scenarios = parser.add_subparsers(dest="name", required=True)

    def scenario(name: str, run: Callable[..., Any], steps: int, width: int, batch: int) -> argparse.ArgumentParser:
        sub = scenarios.add_parser(name)
        sub.set_defaults(scenario=run)
        sub.add_argument("--steps", type=int, default=steps)
        sub.add_argument("--width", type=int, default=width, help="of the 8 layers of the network that is trained")
        sub.add_argument("--batch", type=int, default=batch, help="per rank")
        sub.add_argument("--limit-s", type=float, default=600.0, help="end each training after so many seconds")
        sub.add_argument("--json", action="store_true")
        return sub

    def compressible(sub: argparse.ArgumentParser, variants: str, warmup_steps: int) -> None:
        sub.add_argument("--variants", default=variants, help=f"of {', '.join(['dense', 'bf16', 'oktopk'])}")
        sub.add_argument("--density", type=float, default=0.01)
        sub.add_argument("--warmup-steps", type=int, default=warmup_steps, help="dense steps of oktopk")

    sub = scenario("short", short, 240, 304, 32)
    compressible(sub, "dense,bf16,oktopk", ab.OkTopk().warmup_steps)
    sub.add_argument("--repeat", type=int, default=1)
    sub = scenario("noisy", noisy, 3000, 256, 128)
    sub.add_argument("--load", type=int, default=2, help="background processes")
    sub.add_argument("--turn", type=int, default=100, help="steps of a turn")
    sub.add_argument("--repeat", type=int, default=5)
    sub.add_argument("--seed", type=int, default=0, help="of the background processes")
    sub = scenario("restart", restart, 240, 304, 32)
    compressible(sub, "dense,bf16,oktopk", 0)
    sub.add_argument("--folder", help="of the cache, the same on every rank; by default a new one")
    sub.add_argument("--starts", type=int, default=2, help="1: start once, and start this program twice")
    sub = scenario("first", first, 400, 304, 32)
    compressible(sub, "dense", 0)
    sub.add_argument("--model", action="append", default=[], choices=MODELS)
    sub.add_argument("--trace", action="append", default=[], help="a file or a bundled name, replayed on the CPU")
    sub.add_argument("--slower", type=float, default=1.0, help="replay traces so many times more slowly")
    sub.add_argument("--batch-size", type=int, help="per rank, for --model")
    sub.add_argument("--ddp-steps", type=int, default=30)
    sub.add_argument("--after", type=int, default=30, help="steps after the first choice")
    return parser.parse_args()


# What is trained.


def layers(width: int, batch: int, device: torch.device) -> Workload:
    """A plain network of 34 tensors, trained by SGD on random data."""

    def build() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for _ in range(8):
            parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
        model = nn.Sequential(*parts, nn.Linear(width, 10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())
        inputs, labels = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)

        def step(wrapped: nn.Module | None = None) -> None:
            optimizer.zero_grad(set_to_none=True)
            cross_entropy((wrapped or model)(inputs), labels).backward()
            optimizer.step()

        return model, step

    return Workload(f"8 layers of {width}", batch, "samples", device, build)


Wrap = Callable[[nn.Module], nn.Module]


def wraps(options: argparse.Namespace, **more: Any) -> dict[str, Wrap]:
    """The variants of DataParallel that were asked for."""
    known: dict[str, Any] = {
        "dense": None,
        "bf16": "bf16",
        "oktopk": ab.OkTopk(density=options.density, warmup_steps=options.warmup_steps),
    }
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--variants names {unknown[0]!r}: expected some of {', '.join(known)}")
    return {name: partial(ab.DataParallel, compress=known[name], **more) for name in names}


class Stages:
    """A logger that keeps the stage and the plan of every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []

    def log(self, metrics: ab.Metrics) -> None:
        self.seen.append((metrics.stage, metrics.plan))

    def close(self) -> None:
        pass


class Training:
    """A training with the wall time of each of its steps, as rank 0 saw it; ``setup_s`` is what wrapping took."""

    def __init__(self, name: str, workload: Workload, wrap: Wrap, watched: bool = True) -> None:
        self.name, self.device = name, workload.device
        model, self._step = workload.build()
        dist.barrier()
        self.begun = perf_counter()
        self.parallel = wrap(model)
        self.stages = Stages()
        if watched and isinstance(self.parallel, ab.DataParallel):
            self.parallel.log_to(self.stages)
        self.setup_s = perf_counter() - self.begun
        self.seconds: list[float] = []

    def steps(self, count: int) -> None:
        """Run and time so many steps."""
        for _ in range(count):
            begun = perf_counter()
            self._step(self.parallel)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds.append(perf_counter() - begun)

    def run(self, count: int, limit_s: float, until_chosen: bool = False) -> float:
        """Run up to so many steps, or only to a choice; the seconds since wrapping began."""
        told = perf_counter()
        while (done := len(self.seconds)) < count:
            self.steps(min(ASK_EVERY, count - done))
            if perf_counter() - told > TELL_EVERY_S:
                told = perf_counter()
                say(f"{self.name}: step {len(self.seconds)} of {count}, {told - self.begun:.0f} s, {self.stage}")
            enough = until_chosen and self.stage.startswith(SETTLED)
            if from_rank_0(enough or perf_counter() - self.begun > limit_s, self.device):
                break
        dist.barrier()
        return perf_counter() - self.begun

    @property
    def stage(self) -> str:
        """Of the last step that is known."""
        return self.stages.seen[-1][0] if self.stages.seen else "training"

    def close(self) -> None:
        """Release the model; for DDP, dropping it is enough."""
        if isinstance(self.parallel, ab.DataParallel):
            self.parallel.close()
        del self.parallel, self._step


def from_rank_0(flag: bool, device: torch.device) -> bool:
    """Rank 0's flag on every rank."""
    sent = torch.tensor([flag], dtype=torch.uint8, device=device)
    dist.broadcast(sent, 0)
    return bool(sent.item())


# What was seen.


@dataclass
class Search:
    """What a training under DataParallel spent on searching, seen from outside.

    steps, seconds   until the first choice; None if there was none
    lost_s           beyond as many steps of the faster of DDP and the kept layout
    beyond_ddp_s     beyond as many steps of DDP
    searches         episodes of steps in which something was searched
    kept_steps       steps that ran the layout that was in force in the end
    kept_s           the median of those after the first choice
    stages           stage, steps and seconds, in order
    """

    steps: int | None
    seconds: float | None
    lost_s: float | None
    beyond_ddp_s: float | None
    searches: int
    kept: str
    kept_steps: int
    kept_s: float
    stages: list[tuple[str, int, float]] = field(default_factory=list)


def searched(training: Training, ddp_s: float) -> Search:
    """Rank 0's steps, summed up."""
    seen = training.stages.seen[: len(training.seconds)]
    assert seen, f"{training.name}: DataParallel gave no metrics, so it plans nothing here"
    timed = list(zip(seen, training.seconds, strict=False))
    steps = next((i for i, (stage, _) in enumerate(seen) if stage.startswith(SETTLED)), None)
    final = seen[-1][1]
    after = [s for (_, plan), s in timed[steps or 0 :] if plan == final]
    kept_s = median(after)
    stages = []
    for stage, part in groupby(timed, key=lambda entry: entry[0][0]):
        part_s = [s for _, s in part]
        stages.append((stage, len(part_s), sum(part_s)))
    seconds = sum(training.seconds[:steps]) if steps is not None else None
    episodes = [busy for busy, _ in groupby(not stage.startswith(SETTLED) for stage, _ in seen)]
    return Search(
        steps=steps,
        seconds=seconds,
        lost_s=seconds - steps * min(ddp_s, kept_s) if steps is not None and seconds is not None else None,
        beyond_ddp_s=seconds - steps * ddp_s if steps is not None and seconds is not None else None,
        searches=sum(episodes),
        kept=training.stage,
        kept_steps=sum(plan == final for _, plan in seen),
        kept_s=kept_s,
        stages=stages,
    )


def in_words(name: str, search: Search) -> str:
    """The stages of a training, one after the other."""
    parts = [f"{stage} {steps} ({seconds:.1f} s)" for stage, steps, seconds in search.stages]
    return f"\n{name}, steps by stage: {'; '.join(parts)}."


def number(value: float | None, digits: int = 1) -> str:
    """A cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, and the extremes where there are several."""
    text = f"{median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


# The scenarios.


def short(options: argparse.Namespace, device: torch.device) -> tuple[list[Any], list[str]]:
    """Whole trainings, one after the other."""
    workload = layers(options.width, options.batch, device)
    wanted: dict[str, Wrap] = {DDP: DistributedDataParallel, **wraps(options)}
    totals: dict[str, list[float]] = {name: [] for name in wanted}
    ended: dict[str, list[Training]] = {name: [] for name in wanted}
    for turn in range(options.repeat):
        for name in reversed(wanted) if turn % 2 else wanted:
            training = Training(name, workload, wanted[name])
            totals[name].append(training.run(options.steps, options.limit_s))
            say(f"{name}: {totals[name][-1]:.1f} s for {len(training.seconds)} steps; {training.stage}")
            training.close()
            ended[name].append(training)
    if dist.get_rank():
        return [], []
    ddp_s = median(s for training in ended[DDP] for s in training.seconds)
    results: list[Any] = []
    notes: list[str] = []
    lines = [
        f"{workload.name}, batch {options.batch}, {options.steps} steps, {options.repeat} time(s) each; "
        f"oktopk: density {options.density}, {options.warmup_steps} dense steps first. Median step of DDP: "
        f"{ddp_s * 1e3:.0f} ms. Totals include wrapping. Lost: until the first choice, beyond as many steps of the "
        "faster of DDP and the kept layout. Search columns: of the last repeat.\n",
        "| variant | total, s | ratio to DDP | steps, s to first choice | lost, s | beyond DDP, s | searches "
        "| steps of the kept layout | its step, ms | kept |\n|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, trainings in ended.items():
        ratios = [s / ddp for s, ddp in zip(totals[name], totals[DDP], strict=True)]
        row: dict[str, Any] = {"variant": name, "totals_s": totals[name], "ratios": ratios}
        row["steps_s"] = [training.seconds for training in trainings]
        cells = [name, spread(totals[name], 1), spread(ratios)]
        if name != DDP:
            search = searched(trainings[-1], ddp_s)
            row["searches"] = [asdict(searched(training, ddp_s)) for training in trainings]
            cells += search_cells(search)
            notes.append(in_words(name, search))
        lines.append(f"| {' | '.join(cells + ['-'] * (10 - len(cells)))} |")
        results.append(row)
    return results, lines + notes


def search_cells(search: Search) -> list[str]:
    """The columns of a search, from its first choice on."""
    return [
        f"{search.steps}, {number(search.seconds)}", number(search.lost_s), number(search.beyond_ddp_s),
        str(search.searches), str(search.kept_steps), number(search.kept_s * 1e3), search.kept,
    ]  # fmt: skip


def noisy(options: argparse.Namespace, device: torch.device) -> tuple[list[Any], list[str]]:
    """Both trainings in turns on the same ranks."""
    workload = layers(options.width, options.batch, device)
    choices = Choices()
    results = []
    for repeat in range(options.repeat):
        with background(options.load, options.seed + 100 * repeat):
            results.append(taking_turns(workload, options, choices, repeat))
            say(f"repeat {repeat + 1} of {options.repeat}: {results[-1]['ratio']:.3f} of DDP's time")
    lines = [
        f"{workload.name}, batch {options.batch}, {options.steps} steps of each, in turns of {options.turn}; "
        f"{options.load} background processes, each spinning half of the time in bursts of 10 ms to 1 s; seed "
        f"{options.seed}. Pauses: steps of more than {PAUSE} medians, and what they took beyond the median. "
        "Searches: choices in the log, and one more if the training ended amid a search.\n",
        "| repeat | DDP, s | DataParallel, s | ratio | median steps, ms | searches | steps beside the kept layout "
        "| DDP's pauses | DataParallel's pauses | kept |\n|---|---|---|---|---|---|---|---|---|---|",
    ]
    for index, row in enumerate(results):
        pauses = [f"{row[key]['pauses']}, {row[key]['pauses_s']:.1f} s" for key in ("ddp", "ours")]
        lines.append(
            f"| {index + 1} | {row['ddp']['total_s']:.1f} | {row['ours']['total_s']:.1f} | {row['ratio']:.3f} | "
            f"{row['ddp']['median_ms']:.1f}, {row['ours']['median_ms']:.1f} | {row['searches']} | {row['beside']} | "
            f"{' | '.join(pauses)} | {row['kept']} |"
        )
    lines.append(f"\nRatio: {spread([row['ratio'] for row in results])}.")
    return results, lines


def taking_turns(workload: Workload, options: argparse.Namespace, choices: "Choices", repeat: int) -> dict[str, Any]:
    """One repeat: who begins a pair of turns alternates."""
    ddp = Training(DDP, workload, DistributedDataParallel)
    ours = Training("DataParallel", workload, ab.DataParallel, watched=False)
    assert isinstance(ours.parallel, ab.DataParallel)
    chosen_before, begun, told = len(choices.seen), perf_counter(), perf_counter()
    plans: list[ab.Plan | None] = []
    while (done := len(ddp.seconds)) < options.steps:
        turn = min(options.turn, options.steps - done)
        for training in (ours, ddp) if (done // options.turn) % 2 else (ddp, ours):
            dist.barrier()
            for _ in range(turn):
                training.steps(1)
                if training is ours:
                    plans.append(ours.parallel.plan)
        if perf_counter() - told > TELL_EVERY_S:
            told = perf_counter()
            ratio = sum(ours.seconds) / sum(ddp.seconds)
            stage = first_line(ours.parallel)
            say(f"repeat {repeat + 1}: step {len(ddp.seconds)} of {options.steps}, {ratio:.3f} of DDP's time; {stage}")
        if from_rank_0(perf_counter() - begun > 2 * options.limit_s, ddp.device):
            break
    kept = first_line(ours.parallel)
    searches = len(choices.seen) - chosen_before + (not kept.startswith(SETTLED))
    beside = sum(plan != ours.parallel.plan for plan in plans)
    row = {
        "ddp": totals_of(ddp),
        "ours": totals_of(ours),
        "ratio": (ours.setup_s + sum(ours.seconds)) / (ddp.setup_s + sum(ddp.seconds)),
        "searches": searches,
        "beside": beside,
        "kept": kept,
        "choices": choices.seen[chosen_before:],
        "explanation": ours.parallel.explain(),
    }
    ddp.close()
    ours.close()
    return row


def totals_of(training: Training) -> dict[str, float]:
    """The sum of a training's steps with its wrapping, their median, and its pauses."""
    usual_s = median(training.seconds)
    long = [seconds - usual_s for seconds in training.seconds if seconds > PAUSE * usual_s]
    total_s = training.setup_s + sum(training.seconds)
    return {"total_s": total_s, "median_ms": usual_s * 1e3, "pauses": len(long), "pauses_s": sum(long)}


def first_line(parallel: ab.DataParallel) -> str:
    """The stage, as ``explain()`` says it."""
    return parallel.explain().splitlines()[0].removeprefix("anabranch: ").removesuffix(".")


class Choices(logging.Handler):
    """Keeps what rank 0's log says was chosen."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []
        logger = logging.getLogger("anabranch")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("anabranch: ")
        if text.startswith(SETTLED):
            self.seen.append(text)


@contextmanager
def background(count: int, seed: int) -> Iterator[None]:
    """So many processes that load this machine, started by its first rank."""
    count = count if os.environ.get("LOCAL_RANK", "0") == "0" else 0
    rng = random.Random(seed)
    processes = [subprocess.Popen([sys.executable, "-c", BURST, str(rng.getrandbits(31))]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def restart(options: argparse.Namespace, device: torch.device) -> tuple[list[Any], list[str]]:
    """Start, end, start again; the last start is the one that counts."""
    if "cache" not in signature(ab.DataParallel.__init__).parameters:
        raise SystemExit("this anabranch has no DataParallel(cache=FOLDER) yet, so there is nothing to start from")
    workload = layers(options.width, options.batch, device)
    steps = max(options.steps, 2 * FIRST_STEPS)
    ddp = Training(DDP, workload, DistributedDataParallel)
    ddp.run(FIRST_STEPS, options.limit_s)
    ddp_s = median(ddp.seconds)
    ddp.close()
    results = []
    lines = [
        f"{workload.name}, batch {options.batch}, {steps} steps a start; oktopk: density {options.density}, "
        f"{options.warmup_steps} dense steps first. Median step of DDP: {ddp_s * 1e3:.1f} ms. Ratio: the mean of the "
        f"first {FIRST_STEPS} steps to the median of the later ones.\n",
        "| variant | start | wrapping, s | mean of the first, ms | median of the later, ms | ratio "
        "| first choice after | kept |\n|---|---|---|---|---|---|---|---|",
    ]
    for name in wraps(options):
        folder = Path(options.folder or shared_folder()) / name
        wrap = wraps(options, cache=folder)[name]
        for start in range(options.starts):
            training = Training(name, workload, wrap)
            training.run(steps, options.limit_s)
            training.close()
            if dist.get_rank():
                continue
            early, late = mean(training.seconds[:FIRST_STEPS]), median(training.seconds[FIRST_STEPS:])
            search = searched(training, ddp_s)
            say(f"{name}, start {start + 1}: first steps {early * 1e3:.1f} ms, later {late * 1e3:.1f} ms")
            row = {"variant": name, "start": start + 1, "setup_s": training.setup_s, "ratio": early / late}
            results.append({**row, "first_s": early, "later_s": late, "search": asdict(search)})
            lines.append(
                f"| {name} | {start + 1} | {training.setup_s:.2f} | {early * 1e3:.1f} | {late * 1e3:.1f} | "
                f"{early / late:.3f} | {search.steps} steps | {search.kept} |"
            )
    return results, lines


def shared_folder() -> str:
    """A new folder, whose name every rank knows."""
    name: list[Any] = [mkdtemp(prefix="search_cost.") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return str(name[0])


def first(options: argparse.Namespace, device: torch.device) -> tuple[list[Any], list[str]]:
    """DDP for some steps, then DataParallel until some steps after its first choice."""
    workloads = [zoo_workload(name, device, options.batch_size) for name in options.model]
    workloads += [replay_workload(name, arguments.trace(name), options.slower) for name in options.trace]
    results: list[Any] = []
    notes: list[str] = []
    lines = [
        f"Median of {options.ddp_steps} steps of DDP, then DataParallel until {options.after} steps after its first "
        "choice. Lost: beyond as many steps of the faster of DDP and the kept layout.\n",
        "| model | parameters | variant | DDP's step, ms | steps to the first choice | seconds | lost, s "
        "| beyond DDP, s | kept layout's step, ms | kept |\n|---|---|---|---|---|---|---|---|---|---|",
    ]
    for workload in workloads or [layers(options.width, options.batch, device)]:
        ddp = Training(f"{workload.name}, {DDP}", workload, DistributedDataParallel)
        ddp.run(options.ddp_steps + 5, options.limit_s)
        ddp_s, numel = median(ddp.seconds[5:]), sum(p.numel() for p in ddp.parallel.parameters())
        ddp.close()
        say(f"{workload.name}: DDP's step takes {ddp_s * 1e3:.1f} ms")
        for name, wrap in wraps(options).items():
            training = Training(f"{workload.name}, {name}", workload, wrap)
            training.run(options.steps, options.limit_s, until_chosen=True)
            training.run(len(training.seconds) + options.after, options.limit_s + 60)
            training.close()
            if dist.get_rank():
                continue
            search = searched(training, ddp_s)
            results.append({"model": workload.name, "variant": name, "ddp_s": ddp_s, **asdict(search)})
            lines.append(
                f"| {workload.name} | {numel:,} | {name} | {ddp_s * 1e3:.1f} | {search.steps} | "
                f"{number(search.seconds)} | {number(search.lost_s)} | {number(search.beyond_ddp_s)} | "
                f"{search.kept_s * 1e3:.1f} | {search.kept} |"
            )
            notes.append(in_words(training.name, search))
    return results, lines + notes


# Where, when, with what.


def described(device: torch.device) -> dict[str, str]:
    """Date, hardware, network and versions."""
    cuda = device.type == "cuda"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, anabranch {ab.__version__}"
    return {
        "date": datetime.now(UTC).isoformat(" ", "minutes"),
        "device": torch.cuda.get_device_name(device) if cuda else f"{processor()}, {os.cpu_count()} cores",
        "load": f"load average at the end {os.getloadavg()[0]:.1f}",
        "network": f"{dist.get_world_size()} ranks, {dist.get_backend()}, {os.environ.get(LAB, 'no lab')}",
        "versions": versions,
    }


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def say(text: str) -> None:
    """A line of progress."""
    if dist.get_rank() == 0:
        print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
