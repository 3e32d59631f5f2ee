"""How long a step of the tasks of ``fidelity.py`` takes on a real network, and what compress="auto" chooses there.

    anabranch lab --hosts 4 --rate 10gbit --backend nccl -- python -m benchmarks.fidelity_times --task code \\
        --contestant dense --contestant int8 --contestant auto --output times.jsonl --plans plans

Real ranks train each contestant in turn: stock DDP for dense, DataParallel for all others, until it has chosen its
layout; then steps are timed. One line of JSON each. The plan of "auto" is saved under its name and the rate, for
``fidelity.py --contestant plan:FILE``.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.fidelity_tasks import TASKS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.tools.lab.rank_environment import LAB_BIT_S
from anabranch.tuning.options import TuningPolicy

MOST_STEPS = 400  # of a search
TIMED_STEPS = 30
THOROUGH = TuningPolicy(search_share=1e9)


class Loss(nn.Module):
    """A task's model with its loss as the output, so that a wrapper sees one forward."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.model, self._loss = task.model, task.loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self._loss(*batch))


def compress_of(contestant: str) -> Any:
    """What DataParallel(compress=...) is given."""
    kind, *settings = contestant.split(",")
    given = dict(setting.split("=") for setting in settings)
    if kind.startswith("auto:"):
        return ab.Auto(at_least=kind.removeprefix("auto:"), oktopk=ab.OkTopk(warmup_steps=0))
    if kind.startswith("oktopk:"):
        density, momentum = float(kind.partition(":")[2]), float(given.get("momentum", 0.0))
        return ab.OkTopk(density=density, warmup_steps=0, momentum=momentum)
    return kind


def timed(name: str, contestant: str, seed: int, device: str) -> tuple[float, ab.Plan | None]:
    """The median step in ms, and the plan that was chosen."""
    task = TASKS[name](seed, device)
    module = Loss(task)
    if contestant == "dense":
        parallel: Any = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        compress = compress_of(contestant)
        parallel = ab.DataParallel(
            module, compress=compress, cache=False, policy=THOROUGH, gradient_as_bucket_view=True
        )
    optimizer = task.optimizer(has_momentum="momentum" not in contestant)
    seconds = []
    chosen_at = 0 if contestant == "dense" else None
    for step in range(MOST_STEPS):
        batch = task.batch(step, dist.get_rank(), dist.get_world_size())
        begun = perf_counter()
        parallel(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begun)
        if chosen_at is None and parallel.timeline is not None:
            chosen_at = step
            parallel.hold()
        if chosen_at is not None and step >= chosen_at + 5 + TIMED_STEPS:
            break
    plan = None if contestant == "dense" else parallel.plan
    if contestant != "dense":
        if dist.get_rank() == 0:
            print(parallel.explain(), flush=True)
        parallel.close()
    return 1e3 * median(seconds[-TIMED_STEPS:]), plan


def main() -> None:
    """Time the contestants in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--contestant", required=True, action="append")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plans", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    bit_s = os.environ.get(LAB_BIT_S)
    rate = f"{float(bit_s) / 1e9:g}gbit" if bit_s else "unshaped"
    for contestant in options.contestant:
        step_ms, plan = timed(options.task, contestant, 0, options.device)
        if dist.get_rank() != 0:
            continue
        line = {"task": options.task, "contestant": contestant, "rate": rate, "step_ms": step_ms}
        print(json.dumps(line), flush=True)
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if plan is not None and options.plans is not None and contestant.startswith("auto"):
            options.plans.mkdir(parents=True, exist_ok=True)
            own = ab.Plan(tuple(
                ab.Bucket(tuple(name.removeprefix("model.") for name in bucket.names), 0, bucket.collective)
                for bucket in plan.buckets
            ))  # fmt: skip
            ab.save(own, options.plans / f"{contestant.replace(':', '-')}-{options.task}-{rate}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
