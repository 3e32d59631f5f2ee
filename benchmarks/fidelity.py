"""Does it learn as well at every rung of the ladder? Virtual ranks on one device train with the library's exchanges.

    python -m benchmarks.fidelity --task code --contestant int8 --seed 0 --device cuda --output curves.jsonl
    python -m benchmarks.fidelity_report curves.jsonl --times times.jsonl --output benchmarks/fidelity_...

Every rank's gradient is computed by itself, on its own batch; then the buckets of a plan are exchanged by the same
kernels and the same steps as between real ranks (``benchmarks.virtual``), and one optimizer applies the
averages that all ranks have. Contestants:

    dense                       float32
    bf16, int8, int4            the quantised exchanges; int4 keeps its rounding errors
    int4,residual=no            … and drops them
    oktopk:0.01                 Ok-Topk; the first 100 steps dense
    oktopk:0.01,momentum=0.9    … with momentum before it is sent; the optimizer has none
    oktopk:0.01,start=0.25      … with a density that falls from this one over the next 1000 steps, or over=2000
    oktopk:0.01,lr=2            … with twice the learning rate
    oktopk:0.01,dense=300       … with so many dense steps before it, in place of 100
    oktopk:0.01,momentum=0.9,optimizer=yes
                                … and the optimizer has momentum for what travels dense: vectors, and the first steps
    plan:FILE                   the plan in a file, such as one that compress="auto" chose; its name is the file's

A learning rate rises over the first 100 steps and falls along a cosine to a tenth.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.fidelity_tasks import TASKS, Task
from benchmarks.virtual import VirtualWorld

import anabranch as ab
from anabranch.exchange.quantised.exchange import exchange as quantised_exchange
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.residuals.momentum import Velocity, share_momentum
from anabranch.exchange.sparse.oktopk import exchange as sparse_exchange
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import density_of

RANKS = 4
WARMUP_STEPS = 100  # of the learning rate, and of OkTopk
DECAY_STEPS = 1000  # of a density that starts higher, unless a contestant says otherwise
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Contestant:
    """A plan of one kind for everything, or a plan in a file."""

    name: str
    kind: str
    residual: bool = True
    momentum: float = 0.0
    start: float | None = None
    decay_steps: int = DECAY_STEPS
    lr: float = 1.0  # times the task's
    dense_steps: int = WARMUP_STEPS
    keeps_momentum: bool = False  # the optimizer, as by share_momentum()
    plan: ab.Plan | None = None

    @classmethod
    def parsed(cls, text: str) -> "Contestant":
        """From a text such as "oktopk:0.01,momentum=0.9"."""
        kind, *settings = text.split(",")
        given = dict(setting.split("=") for setting in settings)
        if kind.startswith("plan:"):
            path = Path(kind.removeprefix("plan:"))
            plan = ab.load(path)
            assert isinstance(plan, ab.Plan)
            return cls(path.stem, "", plan=plan)
        if kind != "dense" and kind not in FORMATS and density_of(kind) is None:
            raise ValueError(f"contestant is {text!r}: expected dense, {', '.join(FORMATS)}, oktopk:DENSITY, plan:FILE")
        if given.get("optimizer") == "yes" and "momentum" not in given:
            raise ValueError(f"contestant is {text!r}: optimizer=yes needs momentum=, or sparse gradients have none")
        start = float(given["start"]) if "start" in given else None
        return cls(
            text,
            kind,
            residual=given.get("residual") != "no",
            momentum=float(given.get("momentum", 0.0)),
            start=start,
            decay_steps=int(given.get("over", DECAY_STEPS)),
            lr=float(given.get("lr", 1.0)),
            dense_steps=int(given.get("dense", WARMUP_STEPS)),
            keeps_momentum=given.get("optimizer") == "yes",
        )

    def buckets(self, model: torch.nn.Module) -> list[tuple[tuple[str, ...], str]]:
        """Names and kind of each bucket. Vectors never travel sparse."""
        if self.plan is not None:
            return [(bucket.names, bucket.collective) for bucket in self.plan.buckets]
        names = [name for name, _ in reversed(list(model.named_parameters()))]
        if density_of(self.kind) is None:
            return [(tuple(names), self.kind)]
        vectors = {name for name in names if model.get_parameter(name).dim() < 2}
        return [(tuple(n for n in names if n not in vectors), self.kind), (tuple(vectors), "dense")]


class Bucket:
    """One bucket on all virtual ranks: a row of gradients for each, and what each keeps."""

    def __init__(self, contestant: Contestant, rows: torch.Tensor, kind: str) -> None:
        self._contestant, self._rows, self._kind = contestant, rows, kind
        residuals = torch.zeros_like(rows)
        self._states = [BucketState.of(residual, RANKS) for residual in residuals]

    def average(self, world: VirtualWorld, step: int) -> torch.Tensor:
        """What every rank applies."""
        density = density_of(self._kind)
        if self._kind == "dense" or (density is not None and step < self._contestant.dense_steps):
            return self._rows.mean(dim=0)
        if density is None:
            form = FORMATS[self._kind]
            keeps = self._contestant.residual and self._kind == "int4"
            world.run([
                quantised_exchange(row, state.residual if keeps else None, comm, float(RANKS), form)
                for row, state, comm in zip(self._rows, self._states, world.comms, strict=True)
            ])  # fmt: skip
            return self._rows[0]
        start, decay_steps = self._contestant.start, self._contestant.decay_steps
        options = ab.OkTopk(warmup_steps=0, start_density=start, decay_steps=decay_steps)
        decay = self._contestant.momentum
        velocities = [Velocity(state.sent_velocity(), decay) if decay else None for state in self._states]
        world.run([
            sparse_exchange(row, state, comm, float(RANKS), density, options, velocity)
            for row, state, comm, velocity in zip(self._rows, self._states, world.comms, velocities, strict=True)
        ])  # fmt: skip
        return self._rows[0]


class Gradients:
    """The gradient of a batch, by a CUDA graph where there is a GPU: a small model is bound by launches otherwise."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._parameters = list(task.model.parameters())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = [tensor.clone() for tensor in task.batch(0, 0, RANKS)]
        if self._inputs[0].is_cuda:
            self._capture()

    def _capture(self) -> None:
        buffers = {name: buffer.clone() for name, buffer in self._task.model.named_buffers()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._backward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._backward()
        for name, buffer in self._task.model.named_buffers():
            buffer.copy_(buffers[name])

    def _backward(self) -> torch.Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._task.loss(*self._inputs)
        loss.backward()
        return loss.detach()

    @staticmethod
    def found(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of these parameters."""
        return [p.grad for p in parameters if p.grad is not None]

    def of(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The loss; gradients are in the parameters."""
        for into, tensor in zip(self._inputs, batch, strict=True):
            into.copy_(tensor)
        if self._graph is None:
            return self._backward()
        self._graph.replay()
        return self._loss


def curve(task: Task, contestant: Contestant, steps: int) -> Iterator[dict[str, Any]]:
    """Points every few steps."""
    model, world = task.model, VirtualWorld(RANKS)
    optimizer = task.optimizer(has_momentum=not contestant.momentum or contestant.keeps_momentum)
    first_lr = optimizer.param_groups[0]["lr"] * contestant.lr
    named = contestant.buckets(model)
    order = [model.get_parameter(name) for names, _ in named for name in names]
    assert len(order) == len(list(model.parameters()))
    rows = torch.zeros(RANKS, sum(p.numel() for p in order), device=order[0].device)
    views = [list(row.split([p.numel() for p in order])) for row in rows]
    views = [[view.view_as(p) for view, p in zip(row, order, strict=True)] for row in views]
    sizes = [sum(model.get_parameter(name).numel() for name in names) for names, _ in named]
    buckets = [Bucket(contestant, part, kind) for part, (_, kind) in zip(rows.split(sizes, 1), named, strict=True)]
    gradients = Gradients(task)
    if contestant.keeps_momentum:
        sparse = [model.get_parameter(name) for names, kind in named if density_of(kind) is not None for name in names]
        share_momentum(optimizer, lambda: sparse if step >= contestant.dense_steps else [])
    begun, train_loss = perf_counter(), torch.zeros((), device=rows.device)
    for step in range(steps + 1):
        if step % task.every == 0:
            told = {f"validation_{name}": value for name, value in task.validated().items()}
            yield {"step": step, "wall_s": perf_counter() - begun, "train_loss": float(train_loss) / task.every, **told}
            train_loss.zero_()
        if step == steps:
            return
        for rank in range(RANKS):
            train_loss += gradients.of(task.batch(step, rank, RANKS)) / RANKS
            torch._foreach_copy_(views[rank], gradients.found(order))
        averages = torch.cat([bucket.average(world, step) for bucket in buckets])
        with torch.no_grad():
            torch._foreach_copy_(gradients.found(order), [
                part.view_as(p) for part, p in zip(averages.split([p.numel() for p in order]), order, strict=True)
            ])  # fmt: skip
        torch.nn.utils.clip_grad_norm_(order, CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = first_lr * share_of_lr(step, steps)
        optimizer.step()


def share_of_lr(step: int, steps: int) -> float:
    """Rises over the first steps, then falls along a cosine to a tenth."""
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * falling


def main() -> None:
    """Train one contestant, and append the points to a file as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--contestant", type=Contestant.parsed, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="the task's own number, if not given")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[options.task](options.seed, options.device)
    about = {"task": options.task, "seed": options.seed, "contestant": options.contestant.name}
    for point in curve(task, options.contestant, options.steps or task.steps):
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | point) + "\n")
    print(json.dumps(about | point), flush=True)


if __name__ == "__main__":
    main()
