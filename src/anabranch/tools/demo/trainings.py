"""The trainings that ``anabranch demo`` compares, each with the code that a user would write for it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.exchange.agreement import true_on_all_ranks
from anabranch.exchange.compression import Compress
from anabranch.observe.loggers import JsonLines
from anabranch.parallel import DataParallel
from anabranch.tools.bench.contestants import Contestant
from anabranch.tools.demo.text import CharTransformer, StandardLibrary
from anabranch.tools.report.documents import BASELINE, OURS, DemoTraining
from anabranch.tuning.explain import in_short
from anabranch.tuning.predictions import prediction_s
from anabranch.values.files import save
from anabranch.values.kinds.options import OkTopk

WARMUP_STEPS = 5  # of Ok-Topk, whose default of 100 is more than the whole demo
LAYERS = 2  # with more of them, the demo takes longer than a newcomer waits
BATCH = 4
MOST_STEPS_TO_SETTLE = 40
TRACED_STEPS = 3


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
INT8, OKTOPK_1, AUTO = _ours("int8", "int8", '"int8"'), _oktopk(0.01), _ours("auto", "auto", '"auto"')
ON_SLOW_LINKS = (DDP, _ours(OURS), INT8, _oktopk(0.1), OKTOPK_1, AUTO)
ON_FAST_LINKS = (DDP, INT8, OKTOPK_1, AUTO)


class Training:
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
        memory = {
            "parameters": _nbytes(parameters),
            "gradients": _nbytes([parameter.grad for parameter in parameters]),
            "optimizer": _nbytes(list(self._optimizer.state.values())),
            "residuals": _nbytes(model.comm_state_dict() if model is not None else {}),
        }
        return DemoTraining(
            name=self.setup.name,
            code=self.setup.code,
            losses=tuple(self._losses),
            elapsed_s=tuple(self._elapsed_s),
            memory=memory,
            chosen=in_short(tuner.findings()) if tuner is not None else "",
            explanation=model.explain() if model is not None else "",
        )

    def close(self) -> None:
        """Release the groups and threads of a DataParallel."""
        if self.ours is not None:
            self.ours.close()


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


def _nbytes(held: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences."""
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    parts = list(held.values()) if isinstance(held, Mapping) else held
    return sum(map(_nbytes, parts)) if isinstance(parts, Sequence) and not isinstance(parts, str) else 0
