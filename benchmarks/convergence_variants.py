"""Variants of sparse training that the library does not have, on virtual ranks in one process: what would help?

    python -m benchmarks.convergence_variants --task char --contestant oktopk:0.01,via=update --steps 1000 \\
        --output variants.jsonl

The exchange is the library's own (``anabranch.exchange.sparse``), on ranks that share one process; every rank's
gradient is computed by itself. Contestants are those of ``convergence.py`` and may add:

via=gradient   what is sent is the gradient, and the optimizer sees the averages: the library's way
via=update     each rank's own Adam makes an update of its gradient, and the updates are sent
via=scaled     gradients are divided by the root of the rank's own second moment, sent, and then get their momentum
via=momentum   momentum before sending, cleared where it was sent (DGC); the optimizer has none
weigh=tensor   selected by magnitude over the root mean square of the optimizer's second moment in the same tensor
weigh=element  … over the root of its second moment at the same place: what would change the model most
keep=SHARE     the residual shrinks by this factor in every step
beta1=SHARE    momentum of the optimizer
stored=KIND    the residual is rounded after every step, as by ``Lean(residuals=KIND)``; nearest: to the nearest bf16
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.convergence import Contestant
from benchmarks.convergence_tasks import TASKS, Task, anneal
from benchmarks.virtual import VirtualWorld

import anabranch as ab
from anabranch.exchange.residuals.bucket_states import BucketState, PackedResidual
from anabranch.exchange.sparse.oktopk import exchange
from anabranch.values.kinds.formats import STORED

RANKS = 4
BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01  # AdamW's


@dataclass(frozen=True)
class Variant:
    """What a contestant of ``convergence.py`` cannot say."""

    via: str = "gradient"
    weigh: str = ""
    keep: float = 1.0
    beta1: float = BETA1
    stored: str = ""


def parsed(text: str) -> tuple[Contestant, Variant]:
    """A contestant that keeps its whole name, and its variant."""
    own = {"via": str, "weigh": str, "keep": float, "beta1": float, "stored": str}
    parts = text.split(",")
    given: dict[str, Any] = {k: own[k](v) for k, _, v in (part.partition("=") for part in parts) if k in own}
    plain = Contestant.parsed(",".join(part for part in parts if part.partition("=")[0] not in own))
    return plain, Variant(**given)


class Bucket:
    """One bucket on all virtual ranks: its parameters, and what each rank makes of its gradients before it sends."""

    def __init__(self, parameters: list[torch.nn.Parameter], density: float | None, variant: Variant) -> None:
        self.parameters, self._density, self._variant = parameters, density, variant
        self._numels = [p.numel() for p in parameters]
        blank = torch.zeros(RANKS, sum(self._numels))
        self.states = [BucketState.of(row, RANKS) for row in blank]
        if (form := STORED.get(variant.stored)) is not None:
            for rank, state in enumerate(self.states):
                state.packed = PackedResidual.zeros(blank.shape[1], form, rank, None)
        self.ages = torch.zeros_like(blank)
        self._first, self._second = torch.zeros_like(blank), torch.zeros_like(blank)
        self._momentum = torch.zeros(sum(self._numels))
        self._weights = torch.ones(sum(self._numels))

    def sent(self, gradients: torch.Tensor, step: int) -> torch.Tensor:
        """What the ranks send in place of their gradients, one a row."""
        if self._density is None or self._variant.via == "gradient":
            return gradients
        self._first.mul_(BETA1).add_(gradients, alpha=1 - BETA1)
        if self._variant.via == "momentum":
            return self._first.clone()
        self._second.mul_(BETA2).addcmul_(gradients, gradients, value=1 - BETA2)
        root = (self._second / (1 - BETA2 ** (step + 1))).sqrt_().add_(EPS)
        return (self._first / (1 - BETA1 ** (step + 1)) if self._variant.via == "update" else gradients) / root

    def weigh(self, optimizer: torch.optim.Optimizer) -> None:
        """By what the optimizer, alike on every rank, divides: the residual is kept in these units."""
        if self._density is None or not self._variant.weigh:
            return
        moments = [optimizer.state[p]["exp_avg_sq"].flatten() for p in self.parameters]
        means = [moment.mean().expand_as(moment) for moment in moments]
        if self._variant.weigh == "element":  # bounded: a place without any gradient yet must not come first
            means = [torch.maximum(moment, 0.01 * mean) for moment, mean in zip(moments, means, strict=True)]
        new = 1 / torch.cat(means).sqrt().clamp(min=EPS)
        for state in self.states:
            state.residual.mul_(new / self._weights)
        self._weights = new

    def average(self, sent: torch.Tensor, world: VirtualWorld, options: ab.OkTopk | None) -> torch.Tensor:
        """What everyone applies; without options, everything."""
        if options is None or self._density is None:
            return sent.mean(dim=0)
        sent *= self._weights
        for state in self.states:
            state.residual.mul_(self._variant.keep)
        world.run([
            exchange(row, state, comm, RANKS, self._density, options)
            for row, state, comm in zip(sent, self.states, world.comms, strict=True)
        ])  # fmt: skip
        for state in self.states:
            residual = state.residual
            if state.packed is not None:
                state.pack()
                state.unpack(residual)
            elif self._variant.stored == "nearest":
                residual.copy_(residual.bfloat16())
        waiting = torch.stack([state.residual for state in self.states]) != 0
        self.ages.add_(1.0).mul_(waiting)
        if self._variant.via == "momentum":
            self._first.mul_(waiting)
        return sent[0] / self._weights

    @torch.no_grad()
    def applied(self, average: torch.Tensor, lr: float, step: int) -> None:
        """As gradients for the optimizer, or, where updates are sent, to the parameters at once."""
        pieces = average.split(self._numels)
        if self._density is None or self._variant.via in ("gradient", "momentum"):
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter).clone()
            return
        if self._variant.via == "scaled":
            self._momentum.mul_(BETA1).add_(average, alpha=1 - BETA1)
            pieces = (self._momentum / (1 - BETA1 ** (step + 1))).split(self._numels)
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = None  # so that the optimizer leaves it alone
            parameter.mul_(1 - lr * DECAY).sub_(piece.view_as(parameter), alpha=lr)


def curve(task: Task, contestant: Contestant, variant: Variant, steps: int) -> Iterator[dict[str, Any]]:
    """Points every few steps, as those of ``convergence.Run.curve``."""
    model, world, first_lr = task.model, VirtualWorld(RANKS), task.optimizer.param_groups[0]["lr"]
    if variant.via == "momentum" or variant.beta1 != BETA1:
        task.optimizer.param_groups[0]["betas"] = (0.0 if variant.via == "momentum" else variant.beta1, BETA2)
    plan = contestant.plan(model) if contestant.density is not None else None
    named = [(part.names, part.collective) for part in plan.buckets] if plan else [
        (tuple(name for name, _ in model.named_parameters()), "dense")
    ]  # fmt: skip
    buckets = [
        Bucket([model.get_parameter(n) for n in names], None if kind == "dense" else float(kind[7:]), variant)
        for names, kind in named
    ]
    options = contestant.options(0) if plan else None
    begun, train_loss = perf_counter(), 0.0
    for step in range(steps + 1):
        if step % task.every == 0:
            nbytes = float(world.byte_counts.sent().max(initial=0.0))  # of the sparse part
            yield {"step": step, "time_s": perf_counter() - begun, "train_loss": train_loss / task.every,
                   "sent_nbytes": nbytes, **measured(task, buckets)}  # fmt: skip
            train_loss = 0.0
        anneal(task, first_lr, step, steps)
        lr = task.optimizer.param_groups[0]["lr"]
        rows: list[list[torch.Tensor]] = [[] for _ in buckets]
        batches = [task.batch(step, rank, RANKS) for rank in range(RANKS)]
        if plan is None:  # the gradient of the mean over all ranks' batches is the mean of the ranks' gradients
            batches = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
        for batch in batches:
            task.optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            train_loss += loss.item() / len(batches)
            for row, bucket in zip(rows, buckets, strict=True):
                row.append(torch.cat([p.grad.flatten() for p in bucket.parameters if p.grad is not None]))
        for row, bucket in zip(rows, buckets, strict=True):
            if step >= contestant.warmup:
                bucket.weigh(task.optimizer)
            sent = bucket.sent(torch.stack(row), step)
            average = bucket.average(sent, world, options if step >= contestant.warmup else None)
            bucket.applied(average, lr, step)
        if contestant.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), contestant.clip)
        task.optimizer.step()


def measured(task: Task, buckets: list[Bucket]) -> dict[str, float]:
    """Validation, and the residual: means over the ranks."""
    found = task.validated(0, 1)
    residuals = torch.cat([torch.stack([state.residual for state in bucket.states]) for bucket in buckets], dim=1)
    ages, mass = torch.cat([bucket.ages for bucket in buckets], dim=1), residuals.abs().sum(dim=1)
    old = ((ages * residuals.abs()).sum(dim=1) / mass.clamp(min=1e-30)).mean()
    told = {f"validation_{name}": total / count for name, (total, count) in found.items()}
    return told | {"residual_norm": float(residuals.norm(dim=1).mean()), "age_steps": float(old)}


def main() -> None:
    """Train, and append the points to a file as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contestant, variant = parsed(arguments.contestant)
    task = TASKS[arguments.task](arguments.seed, contestant.lr, "cpu")
    about = {"task": arguments.task, "contestant": arguments.contestant, "seed": arguments.seed, "virtual": True}
    for point in curve(task, contestant, variant, arguments.steps):
        line = json.dumps(about | point)
        print(line, flush=True)
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if point["step"] == arguments.steps:
            break


if __name__ == "__main__":
    main()
