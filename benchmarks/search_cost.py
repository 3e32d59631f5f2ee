"""What searching costs: whole trainings under DataParallel beside stock DDP in the same run; prints Markdown.

    anabranch lab --hosts 4 --rate 100mbit -- python -m benchmarks.search_cost short
    torchrun --standalone --nproc-per-node 2 -m benchmarks.search_cost noisy --load 2
    anabranch lab --hosts 4 --rate 100mbit -- python -m benchmarks.search_cost restart
    anabranch lab --hosts 4 --rate 25gbit --backend nccl -- python -m benchmarks.search_cost first --model resnet50

short     240 steps on a slow link, one training after the other, in reversed order in every other repeat
noisy     3,000 steps of a small model while other processes load the machine; both trainings take turns on the same
          ranks, so that both meet the same noise
restart   the same training started twice with a plan cache: the first steps of the second start beside its later ones
first     the first search alone, in steps and seconds, for models of ``anabranch bench`` or replayed traces

Stages come from the metrics of each step. Only in ``noisy``, whose steps are short and whose target is 2 %, choices are
counted in the log instead, which costs nothing. Every training ends after ``--limit-s``. Progress goes to stderr.
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
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from inspect import signature
from math import sqrt
from pathlib import Path
from shutil import rmtree
from statistics import mean, median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.search_cost_training import (
    PAUSE,
    TELL_EVERY_S,
    Training,
    Wrap,
    from_rank_0,
    is_settled,
    layers,
    say,
    searched,
)
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.observe.environment import lab_note
from anabranch.tools.bench.workload import Workload, replay_workload, zoo_workload
from anabranch.tools.bench.zoo import MODELS
from anabranch.tools.cli import arguments
from anabranch.tools.cli.ranks import join

DDP = "DDP"
VARIANTS = ("dense", "bf16", "oktopk")  # of DataParallel
FIRST_STEPS = 50  # of a second start
CACHES = "cache" in signature(ab.DataParallel.__init__).parameters
NO_CACHE: dict[str, Any] = (
    {"cache": False} if CACHES else {}
)  # a choice of an earlier run would be found, and nothing searched
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


class Report(NamedTuple):
    """What a scenario found: how it was measured, a table (its first row is the header), what was seen beside it.

    ``data`` is for --json.
    """

    how: str
    table: list[Sequence[object]]
    notes: list[str]
    data: list[dict[str, Any]]

    def __str__(self) -> str:
        rows = [f"| {' | '.join(map(str, row))} |" for row in self.table]
        return "\n".join([self.how, "", rows[0], "|" + "---|" * len(self.table[0]), *rows[1:], "", *self.notes])


def main() -> None:
    """Run one scenario and print its table, or JSON, on rank 0."""
    options = parsed()
    torch.set_num_threads(1)
    device = join(None, on_gpu=not getattr(options, "trace", None))
    if dist.get_world_size() == 1:
        raise SystemExit("search_cost needs at least two ranks: use anabranch lab, or torchrun")
    report = options.scenario(options, device)
    if dist.get_rank() == 0:
        facts = described(device)
        if options.json:
            print(json.dumps({"scenario": options.name, **facts, "how": report.how, "results": report.data}, indent=1))
        else:
            print(f"\n## {options.name}\n\n{', '.join(facts.values())}.\n\n{report}")
    dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    """The options of the scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scenarios = parser.add_subparsers(dest="name", required=True)

    def scenario(name: str, run: Callable[..., Report], steps: int, width: int, batch: int) -> argparse.ArgumentParser:
        sub = scenarios.add_parser(name)
        sub.set_defaults(scenario=run)
        sub.add_argument("--steps", type=int, default=steps)
        sub.add_argument("--width", type=int, default=width, help="of the 8 layers of the network that is trained")
        sub.add_argument("--batch", type=int, default=batch, help="per rank")
        sub.add_argument("--limit-s", type=float, default=600.0, help="end each training after so many seconds")
        sub.add_argument("--json", action="store_true")
        return sub

    def compressible(sub: argparse.ArgumentParser, variants: str, warmup_steps: int) -> None:
        sub.add_argument("--variants", default=variants, help=f"of {', '.join(VARIANTS)}")
        sub.add_argument("--density", type=float, default=0.01)
        sub.add_argument("--warmup-steps", type=int, default=warmup_steps, help="first steps that oktopk sends dense")

    sub = scenario("short", short, 240, 304, 32)
    compressible(sub, ",".join(VARIANTS), ab.OkTopk().warmup_steps)
    sub.add_argument("--repeat", type=int, default=1)
    sub = scenario("noisy", noisy, 3000, 256, 128)
    sub.add_argument("--load", type=int, default=2, help="background processes")
    sub.add_argument("--turn", type=int, default=10, help="steps of a turn; long ones meet different noise")
    sub.add_argument("--repeat", type=int, default=5)
    sub.add_argument("--seed", type=int, default=0, help="of the background processes")
    sub.add_argument("--control", action="store_true", help="never plan: shows how far noise alone moves the ratio")
    sub = scenario("restart", restart, 240, 304, 32)
    compressible(sub, ",".join(VARIANTS), 0)
    sub.add_argument("--folder", help="of the cache, the same on every rank; by default a new one")
    sub.add_argument("--starts", type=int, default=2, help="1: start once, and run this program twice")
    sub = scenario("first", first, 400, 304, 32)
    compressible(sub, "dense", 0)
    sub.add_argument("--model", action="append", default=[], choices=MODELS)
    sub.add_argument("--trace", action="append", default=[], help="a file or a bundled name, replayed on the CPU")
    sub.add_argument("--slower", type=float, default=1.0, help="replay traces so many times more slowly")
    sub.add_argument("--batch-size", type=int, help="per rank, for --model")
    sub.add_argument("--ddp-steps", type=int, default=30)
    sub.add_argument("--after", type=int, default=30, help="steps after the first choice")
    return parser.parse_args()


def wraps(options: argparse.Namespace, **more: Any) -> dict[str, Wrap]:
    """The variants of DataParallel that were asked for; without a cache unless ``more`` has one."""
    sparse = ab.OkTopk(density=options.density, warmup_steps=options.warmup_steps)
    known: dict[str, Any] = dict(zip(VARIANTS, (None, "bf16", sparse), strict=True))
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--variants names {unknown[0]!r}: expected some of {', '.join(VARIANTS)}")
    return {name: partial(ab.DataParallel, compress=known[name], **{**NO_CACHE, **more}) for name in names}


# The scenarios.


def short(options: argparse.Namespace, device: torch.device) -> Report:
    """Whole trainings, one after the other."""
    workload = layers(options.width, options.batch, device)
    wanted: dict[str, Wrap] = {DDP: DistributedDataParallel, **wraps(options)}
    totals: dict[str, list[float]] = {name: [] for name in wanted}
    ended: dict[str, list[Training]] = {name: [] for name in wanted}
    for turn in range(options.repeat):
        for name in reversed(wanted) if turn % 2 else wanted:
            training = Training(name, workload, wanted[name])
            totals[name].append(training.run(options.steps, options.limit_s))
            training.close()
            ended[name].append(training)
            say(f"{name}: {totals[name][-1]:.1f} s for {len(training.seconds)} steps; {training.stage}")
    how = (
        f"{workload.name}, {options.steps} steps, {options.repeat} time(s) each; oktopk: density {options.density}, "
        f"the first {options.warmup_steps} steps dense. Median step of DDP: {median(ended[DDP][0].seconds) * 1e3:.0f} "
        "ms. Totals include wrapping. Lost: until the first choice, beyond as many steps of the faster of DDP and the "
        "kept layout. Columns from the first choice on: of the last repeat."
    )
    return short_report(how, totals, ended) if dist.get_rank() == 0 else Report(how, [], [], [])


def short_report(how: str, totals: dict[str, list[float]], ended: dict[str, list[Training]]) -> Report:
    """Totals as shares of DDP's in the same repeat, and the searches."""
    ddp_s = median(s for training in ended[DDP] for s in training.seconds)
    report = Report(how, [], [], [])
    report.table.append((
        "variant", "total, s", "ratio to DDP", "first choice after steps", "seconds", "lost, s", "beyond DDP, s",
        "searches", "steps of the kept layout", "its step, ms", "in the end",
    ))  # fmt: skip
    for name, trainings in ended.items():
        ratios = [s / ddp for s, ddp in zip(totals[name], totals[DDP], strict=True)]
        searches = [searched(training, ddp_s) for training in trainings] if name != DDP else []
        cells: list[object] = ["-"] * 8
        if searches:
            last = searches[-1]
            cells = [
                last.steps if last.chosen else "none", f"{last.seconds:.1f}", f"{last.lost_s:.1f}",
                f"{last.beyond_ddp_s:.1f}", last.searches, last.kept_steps, f"{last.kept_s * 1e3:.1f}", last.ended,
            ]  # fmt: skip
            report.notes.append(f"{name}, steps (seconds) by stage: {last}.\n")
        report.table.append((name, spread(totals[name], 1), spread(ratios), *cells))
        report.data.append({
            "variant": name, "totals_s": totals[name], "ratios": ratios, "searches": list(map(asdict, searches)),
            "steps_s": [training.seconds for training in trainings],
        })  # fmt: skip
    return report


def noisy(options: argparse.Namespace, device: torch.device) -> Report:
    """Both trainings in turns on the same ranks."""
    workload = layers(options.width, options.batch, device)
    how = (
        f"{workload.name}, {options.steps} steps of each, in turns of {options.turn}; {options.load} background "
        f"processes, each spinning half of the time in bursts of 10 ms to 1 s, seed {options.seed}. Totals include "
        f"wrapping. Pauses: steps of more than {PAUSE} medians, and what they took beyond the median. Searches: "
        "choices in the log, and one more if the training ended amid a search."
        + (" Control: DataParallel(profile_steps=0) never plans." if options.control else "")
    )
    header = (
        "repeat", "DDP, s", "DataParallel, s", "ratio", "median steps, ms", "searches", "steps beside the kept layout",
        "DDP's pauses", "DataParallel's pauses", "in the end",
    )  # fmt: skip
    report = Report(how, [header], [], [])
    choices = Choices()
    for repeat in range(options.repeat):
        with background(options.load, options.seed + repeat):
            row = taking_turns(workload, options, choices, f"repeat {repeat + 1} of {options.repeat}")
        ddp, ours = row["ddp"], row["ours"]
        say(f"repeat {repeat + 1} of {options.repeat}: {ours['total_s']:.1f} s, DDP {ddp['total_s']:.1f} s")
        report.table.append((
            repeat + 1, f"{ddp['total_s']:.1f}", f"{ours['total_s']:.1f}", f"{row['ratio']:.3f} ± {row['error']:.3f}",
            f"{ddp['median_s'] * 1e3:.1f}, {ours['median_s'] * 1e3:.1f}", row["searches"], row["beside"],
            *(f"{len(of['pauses_s'])}, {sum(of['pauses_s']):.1f} s" for of in (ddp, ours)), row["ended"],
        ))  # fmt: skip
        report.data.append(row)
    pooled = sum(row["ours"]["total_s"] for row in report.data) / sum(row["ddp"]["total_s"] for row in report.data)
    ratios = spread([row["ratio"] for row in report.data])
    report.notes.append(
        f"Ratio: {ratios}; of all seconds together {pooled:.3f}. ±: standard error, from pairs of turns."
    )
    return report


def taking_turns(workload: Workload, options: argparse.Namespace, choices: "Choices", title: str) -> dict[str, Any]:
    """One repeat; who begins a pair of turns alternates."""
    ddp = Training(DDP, workload, DistributedDataParallel)
    wrap = partial(ab.DataParallel, **({"profile_steps": 0} if options.control else NO_CACHE))
    ours = Training("DataParallel", workload, wrap, watched=False)
    assert isinstance(ours.parallel, ab.DataParallel)
    begun = told = perf_counter()
    plans: list[ab.Plan | None] = []
    kept: ab.Plan | None = None
    choices.seen.clear()
    while (done := len(ddp.seconds)) < options.steps:
        for training in (ours, ddp) if (done // options.turn) % 2 else (ddp, ours):
            dist.barrier()
            for _ in range(min(options.turn, options.steps - done)):
                training.step()
                if training is ours:
                    plans.append(ours.parallel.plan)
        stage = first_line(ours.parallel)
        kept = ours.parallel.plan if is_settled(stage) else kept
        if perf_counter() - told > TELL_EVERY_S:
            told = perf_counter()
            so_far = f"{ours.total_s / ddp.total_s:.3f} of DDP's time, {len(choices.seen)} choices"
            say(f"{title}: step {len(ddp.seconds)} of {options.steps}, {so_far}; {stage}")
        if from_rank_0(perf_counter() - begun > 2 * options.limit_s, ddp.device):
            break
    row = {
        "ratio": ours.total_s / ddp.total_s,
        "error": standard_error(ours.seconds, ddp.seconds, options.turn),
        "searches": len(choices.seen) + (not is_settled(stage)),
        "beside": sum(plan != kept for plan in plans),
        "ended": stage,
        "choices": list(choices.seen),
        "explanation": ours.parallel.explain(),
    }
    for name, training in (("ddp", ddp), ("ours", ours)):
        found = {"total_s": training.total_s, "median_s": median(training.seconds), "pauses_s": training.pauses_s}
        row[name] = {**found, "steps_s": training.seconds}
        training.close()
    return row


def standard_error(ours: Sequence[float], ddp: Sequence[float], turn: int) -> float:
    """Of the ratio of two sums, from how much pairs of turns differ."""
    pairs = [(sum(ours[i : i + turn]), sum(ddp[i : i + turn])) for i in range(0, len(ddp), turn)]
    ratio = sum(ours) / sum(ddp)
    return sqrt(sum((a - ratio * b) ** 2 for a, b in pairs)) / sum(ddp)


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
        if is_settled(text):
            self.seen.append(text)


@contextmanager
def background(count: int, seed: int) -> Iterator[None]:
    """So many processes that load this machine, started by its first rank."""
    rng = random.Random(seed)
    seeds = [str(rng.getrandbits(31)) for _ in range(count)] if os.environ.get("LOCAL_RANK", "0") == "0" else []
    processes = [subprocess.Popen([sys.executable, "-c", BURST, text]) for text in seeds]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def restart(options: argparse.Namespace, device: torch.device) -> Report:
    """Start, end, start again; the last start is the one that counts."""
    if not CACHES:
        raise SystemExit("this anabranch has no DataParallel(cache=FOLDER), so there is nothing to start from")
    workload, steps = layers(options.width, options.batch, device), max(options.steps, 2 * FIRST_STEPS)
    ddp_s = ddp_step_s(workload, FIRST_STEPS, options.limit_s)
    how = (
        f"{workload.name}, {steps} steps a start; oktopk: density {options.density}, the first {options.warmup_steps} "
        f"steps dense. Median step of DDP: {ddp_s * 1e3:.1f} ms. Ratio: the mean of the first {FIRST_STEPS} steps to "
        "the median of the later ones."
    )
    report = Report(how, [], [], [])
    report.table.append((
        "variant", "start", "wrapping, s", "mean of the first, ms", "median of the later, ms", "ratio",
        "first choice after steps", "in the end",
    ))  # fmt: skip
    folder = options.folder or shared_folder()
    for name in wraps(options):
        wrap = wraps(options, cache=Path(folder, name))[name]
        for start in range(1, options.starts + 1):
            training = Training(f"{name}, start {start}", workload, wrap)
            training.run(steps, options.limit_s)
            training.close()
            if dist.get_rank() == 0:
                add_start(report, name, start, training, ddp_s)
    if not options.folder and dist.get_rank() == 0:
        rmtree(folder)
    return report


def add_start(report: Report, name: str, start: int, training: Training, ddp_s: float) -> None:
    """Add what a start took to the report."""
    first_s, later_s = mean(training.seconds[:FIRST_STEPS]), median(training.seconds[FIRST_STEPS:])
    search = searched(training, ddp_s)
    say(f"{training.name}: first steps {first_s * 1e3:.1f} ms, later {later_s * 1e3:.1f} ms")
    report.table.append((
        name, start, f"{training.setup_s:.2f}", f"{first_s * 1e3:.1f}", f"{later_s * 1e3:.1f}",
        f"{first_s / later_s:.3f}", search.steps if search.chosen else "none", search.ended,
    ))  # fmt: skip
    report.notes.append(f"{training.name}, steps (seconds) by stage: {search}.\n")
    report.data.append({
        "variant": name, "start": start, "setup_s": training.setup_s, "first_s": first_s, "later_s": later_s,
        "ratio": first_s / later_s, "search": asdict(search), "steps_s": training.seconds,
    })  # fmt: skip


def shared_folder() -> str:
    """A new folder, whose name every rank knows."""
    name: list[Any] = [mkdtemp(prefix="search_cost.") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return str(name[0])


def first(options: argparse.Namespace, device: torch.device) -> Report:
    """DDP for some steps, then DataParallel until some steps after its first choice."""
    workloads = [
        zoo_workload(f"{name}:{options.batch_size}" if options.batch_size else name, device) for name in options.model
    ]
    workloads += [replay_workload(name, arguments.trace(name), options.slower) for name in options.trace]
    how = (
        f"The median of {options.ddp_steps} steps of DDP, then DataParallel until {options.after} steps after its "
        "first choice. Lost: beyond as many steps of the faster of DDP and the kept layout."
    )
    report = Report(how, [], [], [])
    report.table.append((
        "model", "variant", "DDP's step, ms", "first choice after steps", "seconds", "lost, s", "beyond DDP, s",
        "kept layout's step, ms", "in the end",
    ))  # fmt: skip
    for workload in workloads or [layers(options.width, options.batch, device)]:
        ddp_s = ddp_step_s(workload, options.ddp_steps, options.limit_s)
        for name, wrap in wraps(options).items():
            training = Training(f"{workload.name}, {name}", workload, wrap)
            training.run(options.steps, options.limit_s, until_chosen=True)
            training.run(len(training.seconds) + options.after, 1.5 * options.limit_s)
            training.close()
            if dist.get_rank() == 0:
                search = searched(training, ddp_s)
                report.table.append((
                    workload.name, name, f"{ddp_s * 1e3:.1f}", search.steps if search.chosen else "none",
                    f"{search.seconds:.1f}", f"{search.lost_s:.1f}", f"{search.beyond_ddp_s:.1f}",
                    f"{search.kept_s * 1e3:.1f}", search.ended,
                ))  # fmt: skip
                report.notes.append(f"{training.name}, steps (seconds) by stage: {search}.\n")
                report.data.append({"model": workload.name, "variant": name, "ddp_s": ddp_s, **asdict(search)})
    return report


def ddp_step_s(workload: Workload, steps: int, limit_s: float) -> float:
    """The median step of stock DDP, after five steps that do not count."""
    ddp = Training(f"{workload.name}, {DDP}", workload, DistributedDataParallel)
    ddp.run(steps + 5, limit_s)
    ddp.close()
    step_s = median(ddp.seconds[5:])
    say(f"{ddp.name}: a step takes {step_s * 1e3:.1f} ms")
    return step_s


# How it is shown.


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, and the extremes where there are several."""
    text = f"{median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def described(device: torch.device) -> dict[str, str]:
    """Date, hardware, network and versions."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(" ", "minutes"),
        "device": torch.cuda.get_device_name(device) if cuda else f"{processor()}, {os.cpu_count()} cores",
        "load": f"load average at the end {os.getloadavg()[0]:.1f}",
        "network": f"{dist.get_world_size()} ranks, {dist.get_backend()}, {lab_note() or 'no lab'}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, anabranch {ab.__version__}",
    }


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
