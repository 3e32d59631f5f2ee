"""Does it learn as well when gradients travel sparsely? Trains contestants in turn and notes their curves.

    anabranch lab --hosts 4 --rate unshaped -- python -m benchmarks.convergence --task char \\
        --contestant oktopk:0.01,warmup=200 --seed 0 --steps 3000 --output curves.jsonl
    anabranch lab --hosts 4 --rate 100mbit -- python -m benchmarks.convergence --timed --task char \\
        --contestant dense --contestant oktopk:0.1 --output curves.jsonl
    python -m benchmarks.convergence_report curves.jsonl

Contestants: ``dense`` (DDP), ``compute`` (nothing is sent), and ``oktopk:DENSITY`` with ``,warmup=STEPS``,
``,start=DENSITY``, ``,decay=STEPS``, ``,buckets=tensor`` (a budget per tensor), ``,lr=RATE``, ``,clip=NORM``
and ``,momentum=SHARE`` (each rank's own, before it sends; the optimizer then has none).
Without ``--timed`` the sparse plan is given, so that every step after warm-up is sparse however fast the network is;
with it, DataParallel takes its own course and chooses once by itself, and the clock, which stands still during
validation, counts.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.convergence_tasks import TASKS, Task, anneal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab

WARMUP = 100  # OkTopk's own default


@dataclass(frozen=True)
class Contestant:
    """How gradients travel; ``density`` is None where they travel dense."""

    name: str
    density: float | str | None = None
    warmup: int = WARMUP
    start: float | None = None
    decay: int = 300
    buckets: str = "one"
    lr: float | None = None
    clip: float | None = None
    momentum: float = 0.0

    @classmethod
    def parsed(cls, text: str) -> "Contestant":
        """From a text such as "oktopk:0.01,warmup=200"."""
        kind, *settings = text.split(",")
        name, _, density = kind.partition(":")
        if name not in ("dense", "compute", "oktopk") or (name == "oktopk") != bool(density):
            raise ValueError(f"contestant is {text!r}: expected dense, compute or oktopk:DENSITY, then settings")
        read = {"warmup": int, "start": float, "decay": int, "buckets": str, "lr": float, "clip": float,
                "momentum": float}  # fmt: skip
        given: dict[str, Any] = {key: read[key](value) for key, _, value in (s.partition("=") for s in settings)}
        return cls(text, None if name != "oktopk" else density if density == "auto" else float(density), **given)

    def options(self, warmup: int) -> ab.OkTopk:
        """For DataParallel."""
        assert self.density is not None
        return ab.OkTopk(density=self.density, warmup_steps=warmup, start_density=self.start,  # type: ignore[arg-type]
                         decay_steps=self.decay, momentum=self.momentum)  # fmt: skip

    def plan(self, model: nn.Module) -> ab.Plan:
        """Vectors dense, as DataParallel has it; all else sparse in one bucket, or in one per tensor."""
        names = [name for name, _ in reversed(list(model.named_parameters()))]
        vectors = [name for name in names if model.get_parameter(name).dim() < 2]
        rest = [name for name in names if name not in set(vectors)]
        kind = f"oktopk:{self.density:g}"
        parts = [(name,) for name in rest] if self.buckets == "tensor" else [tuple(rest)]
        return ab.Plan((*(ab.Bucket(part, collective=kind) for part in parts), ab.Bucket(tuple(vectors))))


class ResidualMonitor:
    """The residual on this rank in a given plan: its norm, and for how long its elements were not sent.

    Exact, place by place: what was sent and applied leaves a zero behind (values travel as float32 here).
    """

    def __init__(self) -> None:
        self._ages: dict[str, torch.Tensor] = {}
        self._residuals: dict[str, torch.Tensor] = {}

    def step(self, parallel: nn.Module) -> None:
        """To be called after every step."""
        if isinstance(parallel, ab.DataParallel) and parallel._tuner is not None:
            pieces = parallel._tuner.collectives.residuals._states.residuals()
            self._residuals = {name: piece.values for name, piece in pieces.items()}
        for name, piece in self._residuals.items():
            age = self._ages.setdefault(name, torch.zeros_like(piece))
            age.add_(1.0).mul_(piece != 0)

    def told(self) -> dict[str, float]:
        """Means over the ranks: the norm, and the age weighted by magnitude."""
        square = sum(float(piece.square().sum()) for piece in self._residuals.values())
        mass = sum(float(piece.abs().sum()) for piece in self._residuals.values())
        aged = sum(float((self._ages[name] * piece.abs()).sum()) for name, piece in self._residuals.items())
        means = torch.tensor([square**0.5, aged / mass if mass else 0.0]) / dist.get_world_size()
        dist.all_reduce(means)
        return {"residual_norm": float(means[0]), "age_steps": float(means[1])}


class Run:
    """One contestant on one task with one seed."""

    def __init__(self, task: Task, contestant: Contestant, timed: bool) -> None:
        self.task, self.contestant, self._timed = task, contestant, timed
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._residual_monitor, self.parallel = ResidualMonitor(), task.model
        self._device = next(task.model.parameters()).device
        self._loss = torch.zeros((), device=self._device)
        self._norm, self._held = 0.0, False
        if contestant.momentum:
            for group in task.optimizer.param_groups:
                group.update({"betas": (0.0, group["betas"][1])} if "betas" in group else {"momentum": 0.0})

    def curve(self, steps: int) -> Iterator[dict[str, Any]]:
        """Points every few steps; ``time_s`` does not count what is measured in between."""
        time_s, nbytes, first_lr = 0.0, 0, self.task.optimizer.param_groups[0]["lr"]
        self.parallel = self._wrapped()
        for first in range(0, steps + 1, self.task.every):
            yield {"step": first, "time_s": time_s, "sent_nbytes": nbytes, **self._measured()}
            if first == steps:
                return
            dist.barrier()
            begun, before = perf_counter(), sent_nbytes()
            for step in range(first, first + self.task.every):
                anneal(self.task, first_lr, step, steps)
                self._step(step)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            time_s, nbytes = time_s + perf_counter() - begun, nbytes + sent_nbytes() - before

    def _wrapped(self) -> nn.Module:
        """As the run begins. A given plan knows no warm-up, so then DDP trains the first steps."""
        contestant, model = self.contestant, self.task.model
        if contestant.name.startswith("compute"):
            return model
        if contestant.density is None:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if not self._timed:
            return ab.DataParallel(model, profile_steps=0, gradient_as_bucket_view=True)
        compress = contestant.options(contestant.warmup)  # no cache: the cost of the search is part of the time
        return ab.DataParallel(model, compress=compress, cache=False, gradient_as_bucket_view=True)

    def _step(self, step: int) -> None:
        contestant, task = self.contestant, self.task
        if contestant.density is not None and not self._timed and step == contestant.warmup:
            assert isinstance(self.parallel, ab.DataParallel)
            self.parallel.close()
            plan, options = contestant.plan(task.model), contestant.options(0)
            self.parallel = ab.DataParallel(
                task.model, plan=plan, compress=options, profile_steps=0, gradient_as_bucket_view=True
            )
        loss = task.loss(self.parallel, task.batch(step, self._rank, self._ranks))
        task.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if not self._timed:
            self._residual_monitor.step(self.parallel)
        if contestant.clip is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), contestant.clip)
        if not self._timed and (step + 1) % task.every == 0:
            squares = sum(float(p.grad.square().sum()) for p in task.model.parameters() if p.grad is not None)
            self._norm = squares**0.5
        task.optimizer.step()
        self._loss += loss.detach()
        if isinstance(self.parallel, ab.DataParallel) and self._timed and not self._held:
            self._held = self.parallel.timeline is not None  # it has chosen, on every rank in the same step
            if self._held:
                self.parallel.hold()  # others use this machine: drifting step times would make it plan again and again

    def _measured(self) -> dict[str, float]:
        found = self.task.validated(self._rank, self._ranks)
        rows = [*found.values(), (float(self._loss), float(self.task.every))]
        sums = torch.tensor(rows, dtype=torch.float64, device=self._device)
        self._loss = torch.zeros_like(self._loss)
        dist.all_reduce(sums)
        names = [*(f"validation_{name}" for name in found), "train_loss"]
        told = {name: float(total / count) for name, (total, count) in zip(names, sums, strict=True)}
        if not self._timed:
            told |= self._residual_monitor.told() | {"gradient_norm": self._norm}
        return told


def sent_nbytes() -> int:
    """What this host's card has sent; in a lab a host has its own, elsewhere the number means nothing."""
    card = Path("/proc/net/dev").read_text(encoding="ascii").partition("eth0:")[2].split()
    return int(card[8]) if card else 0


def main() -> None:
    """Train the contestants in turn, from point to point, and on rank 0 append the points to a file as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--contestant", type=Contestant.parsed, required=True, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--longer", type=int, default=0, help="steps that contestants other than dense may add")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    tasks = [TASKS[options.task](options.seed, each.lr, options.device) for each in options.contestant]
    runs = [Run(task, each, options.timed) for task, each in zip(tasks, options.contestant, strict=True)]
    about = {"task": options.task, "seed": options.seed, "timed": options.timed}
    going = {run: run.curve(options.steps + (0 if run.contestant.density is None else options.longer)) for run in runs}
    while going:
        for run, curve in list(going.items()):
            if (point := next(curve, None)) is None:
                del going[run]
            elif dist.get_rank() == 0:
                line = json.dumps(about | {"contestant": run.contestant.name} | point)
                print(line, flush=True)
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    for run in runs:
        if isinstance(run.parallel, ab.DataParallel):
            if dist.get_rank() == 0:
                print(run.parallel.explain())
            run.parallel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
