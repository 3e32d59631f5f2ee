"""One rank of ``anabranch demo``: the same small training under several setups, one after the other, then in turns.

All start from the same weights and see the same batches. When each has trained, and chosen what it runs, they take
turns, so that whatever slows the machine slows all of them. Rank 0 shows progress on stderr and writes the results.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import planning as planners
from anabranch.exchange.agreement import true_on_all_ranks
from anabranch.observe.measure import measure
from anabranch.parallel import DataParallel
from anabranch.tools.bench.contestants import DDP_OPTIONS, PLAN_WARMUP_STEPS, Contestant, reference_contestants
from anabranch.tools.bench.race import RaceSettings, race_all
from anabranch.tools.bench.workload import Workload, replay_workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.demo.trainings import (
    AUTO,
    BATCH,
    ON_FAST_LINKS,
    ON_SLOW_LINKS,
    Training,
    batch_of,
    forward_backward,
    new_model,
)
from anabranch.tools.report.documents import BASELINE, OURS, Benchmark
from anabranch.tuning.predictions import predicted_s, prediction_s
from anabranch.values.files import load_bundled_trace
from anabranch.values.plan import Plan

SLOW, FAST = "slow", "fast"  # the demo's two parts
LONGER = 2  # how many times as many steps compressed trainings have, so that all end at about the same time
RACE = RaceSettings(iters=8, batches=1, warmup=1)
SHORT_RACE = RaceSettings(iters=8, batches=5, warmup=1)  # for steps so short that single ones show noise only
SHORT_S = 0.06  # of a step
# A plan that sends everything gains most where the network takes about as long as backward. At the demo's fast links
# that is so for GoogLeNet as recorded on an H200, ten times slower: replayed, so that any machine can.
REPLAYED, SLOWER = "googlenet", 10.0
REPLAY_RACE = RaceSettings(iters=7, batches=1, warmup=1)
MEASURE_S = 2.0


def main(part: str, folder: Path, steps: int) -> None:
    """Run one part of the demo; rank 0 writes its results to ``folder``."""
    dist.init_process_group("gloo")
    results = slow_links(folder, steps) if part == SLOW else fast_links(steps)
    if dist.get_rank() == 0:
        (folder / f"{part}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # a rank that left now would end the others
    dist.destroy_process_group()


def slow_links(folder: Path, steps: int) -> dict[str, Any]:
    """Every setup, compared by its losses and its steps."""
    trainings = [Training(setup, folder if setup is AUTO else None) for setup in ON_SLOW_LINKS]
    benchmark = _train_and_race(trainings, steps, LONGER * steps)
    results = [asdict(training.result()) for training in trainings]
    parameters = sum(parameter.numel() for parameter in new_model().parameters())
    for training in trainings:
        training.close()
    return {"parameters": parameters, "benchmark": asdict(benchmark), "trainings": results}


def fast_links(steps: int) -> dict[str, Any]:
    """Some setups where the network is no limit, and DDP and DataParallel where it just about keeps up."""
    trainings = [Training(setup) for setup in ON_FAST_LINKS]
    benchmark = _train_and_race(trainings, steps, steps)
    for training in trainings:
        training.close()
    _say(f"{REPLAYED}, replayed, as DDP and by a plan, in turns")
    return {"benchmark": asdict(benchmark), "replayed": asdict(_named(replay()))}


def _train_and_race(trainings: Sequence[Training], steps: int, compressed_steps: int) -> Benchmark:
    """Train one after the other, then let all and computing alone take turns."""
    for training in trainings:
        training.run(compressed_steps if training.setup.compressed else steps)
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
    return _named(race_all(work, settings, contestants, model.trace, lambda _: None))


def _build() -> tuple[nn.Module, Step]:
    return new_model(), partial(forward_backward, batch=batch_of(0))


def replay() -> Benchmark:
    """Steps of DDP and of DataParallel with the exact plan for a replayed trace, in turns, and the predictions.

    Collective.
    """
    recorded, device, group = load_bundled_trace(REPLAYED), torch.device("cpu"), dist.group.WORLD
    work, trace = replay_workload(REPLAYED, recorded, SLOWER), recorded.scaled(SLOWER)
    assert group is not None
    network = measure([group], device, trace.nbytes, MEASURE_S)
    plan = planners.optimal(trace, network)
    compute_only, *_ = reference_contestants(*work.build(), device)
    model, ddp_step = work.build()
    ddp = DistributedDataParallel(model, **DDP_OPTIONS)
    model, our_step = work.build()
    ours = DataParallel(model, plan=plan, profile_steps=0, cache=False, **DDP_OPTIONS)
    for _ in range(PLAN_WARMUP_STEPS):
        ddp_step(ddp)
        our_step(ours)

    def contestant(name: str, step: partial[None], its_plan: Plan) -> Contestant:
        expected_s = predicted_s(trace, its_plan, network)
        return Contestant(name, lambda: nullcontext(step), its_plan, expected_s, REPLAY_RACE.warmup)

    contestants = [
        replace(compute_only, warmup=REPLAY_RACE.warmup),
        contestant(BASELINE, partial(ddp_step, ddp), planners.by_bytes(trace, network)),
        contestant(OURS, partial(our_step, ours), plan),
    ]
    benchmark = race_all(work, REPLAY_RACE, contestants, trace, lambda _: None)
    benchmark = replace(benchmark, explanation=ours.explain())
    ours.close()
    return benchmark


def _named(benchmark: Benchmark) -> Benchmark:
    """With the command that a user would repeat it by, instead of this rank's own."""
    return replace(benchmark, facts={**benchmark.facts, "command": "anabranch demo"})


def _say(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
