"""A training whose steps are timed from outside, under DDP or DataParallel, and what its search cost."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import anabranch as ab
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step

SETTLED = ("running", "no longer planning", "not planning", "stopped planning", "No plan")
WARMING_UP = "while training warms up"  # the choice is still to come
ASK_EVERY = 10  # steps after which rank 0 says whether to go on
TELL_EVERY_S = 10.0
PAUSE = 5  # a step so many times longer than the median is a pause

Wrap = Callable[[nn.Module], nn.Module]


def is_settled(stage: str) -> bool:
    """Whether a choice was made, and nothing is searched in this stage."""
    return stage.startswith(SETTLED) and WARMING_UP not in stage


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

        def step(called: nn.Module) -> None:
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(called(inputs), labels).backward()
            optimizer.step()

        return model, step

    return Workload(f"8 layers of {width}, batch {batch}", batch, "samples", device, build)


class Stages:
    """A logger that keeps the stage and the plan of every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []

    def log(self, metrics: ab.Metrics) -> None:
        self.seen.append((metrics.stage, metrics.plan))

    def close(self) -> None:
        pass


class Training:
    """A training and the wall time of each of its steps; ``setup_s`` is what wrapping took.

    ``watched``: keep the stages of DataParallel, too, which costs some tens of microseconds a step.
    """

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

    def step(self) -> None:
        """Run and time one step."""
        begun = perf_counter()
        self._step(self.parallel)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(perf_counter() - begun)

    def run(self, count: int, limit_s: float, until_chosen: bool = False) -> float:
        """Run up to so many steps, or only to a choice; the seconds since wrapping began."""
        told = perf_counter()
        while (done := len(self.seconds)) < count:
            for _ in range(min(ASK_EVERY, count - done)):
                self.step()
            if perf_counter() - told > TELL_EVERY_S:
                told = perf_counter()
                say(f"{self.name}: step {len(self.seconds)} of {count}, {told - self.begun:.0f} s, {self.stage}")
            enough = until_chosen and is_settled(self.stage)
            if from_rank_0(enough or perf_counter() - self.begun > limit_s, self.device):
                break
        dist.barrier()
        return perf_counter() - self.begun

    @property
    def total_s(self) -> float:
        """Wrapping and all steps, without what was between them."""
        return self.setup_s + sum(self.seconds)

    @property
    def pauses_s(self) -> list[float]:
        """What each unusually long step took beyond the median."""
        usual_s = median(self.seconds)
        return [seconds - usual_s for seconds in self.seconds if seconds > PAUSE * usual_s]

    @property
    def stage(self) -> str:
        """Of the last step that is known; only rank 0 knows."""
        return self.stages.seen[-1][0] if self.stages.seen else "training"

    def close(self) -> None:
        """Release the model; for DDP, dropping it is enough."""
        if isinstance(self.parallel, ab.DataParallel):
            self.parallel.close()
        del self.parallel, self._step


@dataclass(frozen=True, slots=True)
class Search:
    """What a training under DataParallel spent on searching, seen from outside.

    steps, seconds   until the first choice; of the whole training if there was none
    chosen           whether there was one
    lost_s           beyond as many steps of the faster of DDP and the kept layout
    beyond_ddp_s     beyond as many steps of DDP
    searches         episodes of steps in which something was searched
    ended            the stage in the end
    kept_steps       steps that ran the kept layout: that of the last step in which nothing was searched
    kept_s           the median of those after the first choice
    stages           stage, steps and seconds, in order
    """

    steps: int
    seconds: float
    chosen: bool
    lost_s: float
    beyond_ddp_s: float
    searches: int
    ended: str
    kept_steps: int
    kept_s: float
    stages: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        return "; ".join(f"{stage} {steps} ({seconds:.1f} s)" for stage, steps, seconds in self.stages)


def searched(training: Training, ddp_s: float) -> Search:
    """What rank 0 saw of a training's search; ``ddp_s`` is a step of DDP."""
    seen, seconds = training.stages.seen, training.seconds
    assert len(seen) >= len(seconds), f"{training.name}: metrics of {len(seen)} of {len(seconds)} steps"
    settled = [is_settled(stage) for stage, _ in seen]
    chosen = True in settled
    steps = settled.index(True) if chosen else len(seconds)
    plans = [plan for _, plan in seen]
    kept_plan = plans[max((step for step, idle in enumerate(settled) if idle), default=-1)]
    kept_s = median(
        [s for s, plan in zip(seconds[steps:], plans[steps:], strict=False) if plan == kept_plan] or seconds
    )
    stages = []
    for stage, group in groupby(zip(seen, seconds, strict=False), key=lambda entry: entry[0][0]):
        part_s = [s for _, s in group]
        stages.append((stage, len(part_s), sum(part_s)))
    search_s = sum(seconds[:steps])
    return Search(
        steps=steps,
        seconds=search_s,
        chosen=chosen,
        lost_s=search_s - steps * min(ddp_s, kept_s),
        beyond_ddp_s=search_s - steps * ddp_s,
        searches=sum(not idle for idle, _ in groupby(settled)),
        ended=training.stage,
        kept_steps=plans.count(kept_plan),
        kept_s=kept_s,
        stages=tuple(stages),
    )


def from_rank_0(flag: bool, device: torch.device) -> bool:
    """Rank 0's flag on every rank."""
    sent = torch.tensor([flag], dtype=torch.uint8, device=device)
    dist.broadcast(sent, 0)
    return bool(sent.item())


def say(text: str) -> None:
    """A line of progress."""
    if dist.get_rank() == 0:
        print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)
