"""One rank of ``anabranch demo``: the same small training under several setups, one after the other, then in turns.

All start from the same weights and see the same batches. When each has trained, and chosen what it runs, they take
turns, so that whatever slows the machine slows all of them. Rank 0 shows progress on stderr and writes the results.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from anabranch.exchange.agreement import true_on_all_ranks
from anabranch.exchange.compression import Compress
from anabranch.observe.metrics import JsonLines
from anabranch.parallel import DataParallel
from anabranch.tools.bench.contestants import Contestant, reference_contestants
from anabranch.tools.bench.race import RaceSettings, race_all
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.demo import RESULTS
from anabranch.tools.demo.text import CharTransformer, StandardLibrary
from anabranch.tools.report.documents import BASELINE, OURS, Benchmark, DemoTraining
from anabranch.tuning.explain import in_short
from anabranch.tuning.trial import prediction_s
from anabranch.values.files import save
from anabranch.values.kinds.options import OkTopk

WARMUP_STEPS = 5  # of Ok-Topk, whose default of 100 is more than the whole demo
LAYERS = 2  # with more of them, the demo takes longer than a newcomer waits
BATCH = 4
LONGER = 2  # how many times as many steps compressed trainings have, so that all end at about the same time
MOST_STEPS_TO_SETTLE = 40
TRACED_STEPS = 3
RACE = RaceSettings(iters=8, batches=1, warmup=1)
SHORT_RACE = RaceSettings(iters=8, batches=5, warmup=1)  # for steps so short that single ones show noise only
SHORT_S = 0.06  # of a step


@dataclass(frozen=True, slots=True)
class Setup:
    """A name, the line of code that wraps the model, and the same as a function.

    ``compressed``: whether it may send less than all values.
    """

    name: str
    code: str
    wrap: Callable[[nn.Module], DistributedDataParallel]
    compressed: bool = False


def _ours(name: str, compress: Compress = None, written: str = "") -> Setup:
    """A DataParallel without a cache, because the demo shows what is found on this machine today."""
    code = f"ab.DataParallel(model, compress={written})" if written else "ab.DataParallel(model)"
    return Setup(name, code, lambda model: DataParallel(model, compress=compress, cache=False), bool(written))


def _oktopk(density: float) -> Setup:
    options = OkTopk(density=density, warmup_steps=WARMUP_STEPS)
    written = f"ab.OkTopk(density={density}, warmup_steps={WARMUP_STEPS})"
    return _ours(f"Ok-Topk {density:.0%}".replace("%", " %"), options, written)


DDP = Setup(BASELINE, "DistributedDataParallel(model)", DistributedDataParallel)
AUTO = _ours("auto", "auto", '"auto"')
SETUPS = (DDP, _ours(OURS), _ours("int8", "int8", '"int8"'), _oktopk(0.1), _oktopk(0.01), AUTO)


def main(folder: Path, steps: int) -> None:
    """Compare every setup by its losses and its steps; rank 0 writes the results to ``folder``."""
    dist.init_process_group("gloo")
    trainings = [LiveTraining(setup, folder if setup is AUTO else None) for setup in SETUPS]
    benchmark = _train_and_race(trainings, steps)
    results = {
        "parameters": sum(parameter.numel() for parameter in new_model().parameters()),
        "benchmark": asdict(benchmark),
        "trainings": [asdict(training.result()) for training in trainings],
    }
    for training in trainings:
        if training.ours is not None:
            training.ours.close()
    if dist.get_rank() == 0:
        (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # a rank that left now would end the others
    dist.destroy_process_group()


class LiveTraining:
    """A training; with ``folder``, rank 0 writes there what ``anabranch report`` draws of it."""

    def __init__(self, setup: Setup, folder: Path | None = None) -> None:
        self.setup = setup
        self._folder = folder
        self._model = setup.wrap(new_model())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._losses: list[float] = []
        self._elapsed_s: list[float] = []
        if folder is not None and self.ours is not None:
            self.ours.log_to(JsonLines(folder / f"{setup.name}.jsonl"))

    @property
    def ours(self) -> DataParallel | None:
        """The model as a DataParallel; None under stock DDP."""
        return self._model if isinstance(self._model, DataParallel) else None

    def run(self, steps: int) -> None:
        """Train, then end the search for a plan. Collective."""
        dist.barrier()
        quiet = dist.get_rank() != 0 or not sys.stderr.isatty()
        title, console = self.setup.name.ljust(12), Console(stderr=True)
        begun_s = perf_counter()
        for step in track(range(steps), title, console=console, disable=quiet, transient=True):
            loss = self._model(batch_of(step))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._losses.append(loss.item())
            self._elapsed_s.append(perf_counter() - begun_s)
        means = torch.tensor(self._losses, dtype=torch.float64)
        dist.all_reduce(means)
        self._losses = (means / dist.get_world_size()).tolist()
        if self.ours is not None:
            self._settle(self.ours)

    def _settle(self, model: DataParallel) -> None:
        """End the search, so that turns compare its result, and trace some steps after it."""
        model.hold()
        step = partial(forward_backward, model, batch_of(0))
        done = len(self._losses)
        most = done + MOST_STEPS_TO_SETTLE
        while done < most and not true_on_all_ranks(model.timeline is not None, model.process_group):
            step()
            done += 1
        if self._folder is not None:
            path = self._folder / f"{self.setup.name}_steps.json"
            model.trace_steps(done + 1, done + TRACED_STEPS, path)
            for _ in range(TRACED_STEPS):
                step()
            if dist.get_rank() == 0:
                self._save(model, self._folder)

    def _save(self, model: DataParallel, folder: Path) -> None:
        for name in ("trace", "network", "plan", "timeline"):
            if (noun := getattr(model, name)) is not None:
                save(noun, folder / f"{self.setup.name}_{name}.json")
        with (folder / f"{self.setup.name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": n, "loss": loss}) + "\n" for n, loss in enumerate(self._losses, 1))

    def contestant(self, warmup: int) -> Contestant:
        """Its turns in a race, in which nothing is learned any more."""
        step, model = partial(forward_backward, self._model, batch_of(0)), self.ours
        plan, predicted_s = (model.plan if model is not None else None), None
        if model is not None and model.trace is not None and model.network is not None:
            predicted_s = prediction_s(model.trace, plan, model.network)
        return Contestant(self.setup.name, lambda: nullcontext(step), plan, predicted_s, warmup)

    def result(self) -> DemoTraining:
        """What it has learned and when, what it keeps from step to step, and what it runs and why."""
        model, parameters = self.ours, list(self._model.parameters())
        tuner = model._tuner if model is not None else None
        held = {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": list(self._optimizer.state.values()),
            "residuals": model.comm_state_dict() if model is not None else {},
        }
        return DemoTraining(
            name=self.setup.name,
            code=self.setup.code,
            losses=tuple(self._losses),
            elapsed_s=tuple(self._elapsed_s),
            memory={
                what: sum(tensor.nbytes for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor))
                for what, tensors in held.items()
            },
            chosen=in_short(tuner.findings()) if tuner is not None else "",
            explanation=model.explain() if model is not None else "",
        )


def _train_and_race(trainings: Sequence[LiveTraining], steps: int) -> Benchmark:
    """Train one after the other, then let all and computing alone take turns."""
    for training in trainings:
        training.run(LONGER * steps if training.setup.compressed else steps)
        result = training.result()
        _say(f"{result.name}: {len(result.losses)} steps in {result.elapsed_s[-1]:.1f} s, loss {result.losses[-1]:.3f}")
    _say("all of them in turns")
    first, group = trainings[0].result(), dist.group.WORLD
    assert first.name == BASELINE and group is not None
    is_short = true_on_all_ranks(median(after - before for before, after in pairwise(first.elapsed_s)) < SHORT_S, group)
    settings = SHORT_RACE if is_short else RACE
    models = [training.ours for training in trainings if training.ours is not None]
    model = next((model for model in models if model.network is not None), models[0])
    assert model.trace is not None  # it has trained longer than it records
    contestants = [training.contestant(settings.warmup) for training in trainings]
    if model.network is not None:  # which it has measured with DDP's own buckets in use
        own_s = prediction_s(model.trace, None, model.network)
        contestants = [replace(one, predicted_s=own_s) if one.name == BASELINE else one for one in contestants]
    work = Workload("character transformer", BATCH, "seq", torch.device("cpu"), _build)
    compute_only, *_ = reference_contestants(*work.build(), work.device)
    contestants = [replace(compute_only, warmup=settings.warmup), *contestants]
    benchmark = race_all(work, settings, contestants, model.trace, lambda _: None)
    # With the command that a user would repeat it by, instead of this rank's own.
    return replace(benchmark, facts={**benchmark.facts, "command": "anabranch demo"})


def _build() -> tuple[nn.Module, Step]:
    return new_model(), partial(forward_backward, batch=batch_of(0))


def new_model() -> CharTransformer:
    """The demo's model, with the same weights every time."""
    torch.manual_seed(0)
    return CharTransformer(layers=LAYERS)


def batch_of(step: int) -> torch.Tensor:
    """This rank's batch."""
    return _text().batch(step, dist.get_rank(), dist.get_world_size())


@cache
def _text() -> StandardLibrary:
    return StandardLibrary(batch=BATCH)


def forward_backward(model: nn.Module, batch: torch.Tensor) -> None:
    """From the start of forward to averaged gradients: what predictions are about. The optimizer has no part in it."""
    model.zero_grad(set_to_none=True)
    model(batch).backward()


def _say(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
