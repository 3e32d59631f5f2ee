"""Training: one training of the demo's model in one way, what it leaves behind, and its turns in a comparison."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from anabranch.exchange.agree import true_on_all_ranks
from anabranch.observe.loggers import JsonLines
from anabranch.parallel import DataParallel
from anabranch.tools.bench.contestants import Contestant
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.demo.text import CharTransformer, StandardLibrary
from anabranch.tools.demo.ways import Way
from anabranch.tools.report.documents import DemoTraining
from anabranch.tuning.explain import in_short
from anabranch.tuning.predictions import prediction_s
from anabranch.values.files import save

LAYERS = 2  # with more of them, the demo takes longer than a newcomer waits
BATCH = 4
MOST_STEPS_TO_SETTLE = 40
TRACED_STEPS = 3


class Training:
    """A training; with ``folder``, rank 0 writes there what ``anabranch report`` draws of it."""

    def __init__(self, way: Way, folder: Path | None = None) -> None:
        self.way = way
        self._folder = folder
        self._model = way.wrap(new_model())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._losses: list[float] = []
        self._elapsed_s: list[float] = []
        if folder is not None and self.ours is not None:
            self.ours.log_to(JsonLines(folder / f"{way.name}.jsonl"))

    @property
    def ours(self) -> DataParallel | None:
        """The model as a DataParallel; None under stock DDP."""
        return self._model if isinstance(self._model, DataParallel) else None

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def run(self, steps: int) -> None:
        """Train, then end the search for a plan. Collective."""
        dist.barrier()
        begun_s = perf_counter()
        for step in _progress(steps, self.way.name):
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
            path = self._folder / f"{self.way.name}_steps.json"
            model.trace_steps(done + 1, done + TRACED_STEPS, path)
            for _ in range(TRACED_STEPS):
                step()
            if dist.get_rank() == 0:
                self._save(model, self._folder)

    def _save(self, model: DataParallel, folder: Path) -> None:
        for name in ("trace", "network", "plan", "timeline"):
            if (noun := getattr(model, name)) is not None:
                save(noun, folder / f"{self.way.name}_{name}.json")
        with (folder / f"{self.way.name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": n, "loss": loss}) + "\n" for n, loss in enumerate(self._losses, 1))

    def contestant(self, warmup: int) -> Contestant:
        """Its turns in a race, in which nothing is learned any more."""
        step = partial(forward_backward, self._model, batch_of(0))
        plan = self.ours.plan if self.ours is not None else None
        return Contestant(self.way.name, lambda: nullcontext(step), plan, self._predicted_s(), warmup)

    def _predicted_s(self) -> float | None:
        model = self.ours
        if model is None or model.trace is None or model.network is None:
            return None
        return prediction_s(model.trace, model.plan, model.network)

    def result(self) -> DemoTraining:
        """What it has learned and when, what it keeps in memory, and what it runs and why."""
        tuner = self.ours._tuner if self.ours is not None else None
        return DemoTraining(
            name=self.way.name,
            code=self.way.code,
            losses=tuple(self._losses),
            elapsed_s=tuple(self._elapsed_s),
            memory=self._memory(),
            chosen=in_short(tuner.findings()) if tuner is not None else "",
            explanation=self.ours.explain() if self.ours is not None else "",
        )

    def _memory(self) -> dict[str, int]:
        """Bytes of the tensors that a rank keeps from step to step, beside the buckets of DDP and its like."""
        parameters = list(self._model.parameters())
        state = self.ours.comm_state_dict() if self.ours is not None else {}
        return {
            "parameters": _nbytes(parameters),
            "gradients": _nbytes([parameter.grad for parameter in parameters]),
            "optimizer": _nbytes(list(self._optimizer.state.values())),
            "residuals": _nbytes(state),
        }

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


def workload() -> Workload:
    """The demo's model for a race."""

    def build() -> tuple[nn.Module, Step]:
        return new_model(), partial(forward_backward, batch=batch_of(0))

    return Workload("character transformer", BATCH, "seq", torch.device("cpu"), build)


def _nbytes(held: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(held))


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping):
        yield from _tensors(list(held.values()))
    elif isinstance(held, list | tuple):
        for part in held:
            yield from _tensors(part)


def _progress(count: int, title: str) -> Iterable[int]:
    quiet = dist.get_rank() != 0 or not sys.stderr.isatty()
    return track(range(count), title.ljust(12), console=Console(stderr=True), disable=quiet, transient=True)
