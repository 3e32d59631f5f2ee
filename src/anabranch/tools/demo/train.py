"""One rank of ``anabranch demo``: the same small training in several ways, one after the other, and then in turns.

All start from the same weights and see the same batches. When each has trained, and chosen what it runs, they take
turns, so that whatever slows the machine slows all of them. Rank 0 shows progress on stderr and writes the results.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from anabranch.exchange.agree import true_on_all_ranks
from anabranch.tools.bench.contestants import reference_contestants
from anabranch.tools.bench.race import RaceSettings, race_all
from anabranch.tools.demo.replay import NAME, replay
from anabranch.tools.demo.training import Training, workload
from anabranch.tools.demo.ways import AUTO, ON_FAST_LINKS, ON_SLOW_LINKS
from anabranch.tools.report.documents import BASELINE, Benchmark
from anabranch.tuning.candidates import prediction_s

SLOW, FAST = "slow", "fast"  # the demo's two parts
LONGER = 2  # how many times as many steps compressed trainings have, so that all end at about the same time
RACE = RaceSettings(iters=8, batches=1, warmup=1)
SHORT_RACE = RaceSettings(iters=8, batches=5, warmup=1)  # for steps so short that single ones show noise only
SHORT_S = 0.06  # of a step


def main(part: str, folder: Path, steps: int) -> None:
    """Run one part of the demo; rank 0 writes its results to ``folder``."""
    dist.init_process_group("gloo")
    results = slow_links(folder, steps) if part == SLOW else fast_links(steps)
    if dist.get_rank() == 0:
        (folder / f"{part}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # a rank that left now would end the others
    dist.destroy_process_group()


def slow_links(folder: Path, steps: int) -> dict[str, Any]:
    """Every way to train, compared by its losses and its steps."""
    trainings = [Training(way, folder if way is AUTO else None) for way in ON_SLOW_LINKS]
    for training in trainings:
        _train(training, LONGER * steps if training.way.compressed else steps)
    benchmark = _compared(trainings)
    results = [asdict(training.result()) for training in trainings]
    parameters = trainings[0].parameters
    for training in trainings:
        training.close()
    return {"parameters": parameters, "benchmark": asdict(benchmark), "trainings": results}


def fast_links(steps: int) -> dict[str, Any]:
    """Some of the ways where the network is no limit, and DDP and DataParallel where it just about keeps up."""
    trainings = [Training(way) for way in ON_FAST_LINKS]
    for training in trainings:
        _train(training, steps)
    benchmark = _compared(trainings)
    for training in trainings:
        training.close()
    _say(f"{NAME}, replayed, as DDP and by a plan, in turns")
    return {"benchmark": asdict(benchmark), "replayed": asdict(_named(replay()))}


def _train(training: Training, steps: int) -> None:
    training.run(steps)
    result = training.result()
    _say(f"{result.name}: {steps} steps in {result.elapsed_s[-1]:.1f} s, loss {result.losses[-1]:.3f}")


def _compared(trainings: Sequence[Training]) -> Benchmark:
    """All of them and computing alone, in turns."""
    _say("all of them in turns")
    first, group = trainings[0].result(), dist.group.WORLD
    assert first.name == BASELINE and group is not None
    is_short = true_on_all_ranks(median(after - before for before, after in pairwise(first.elapsed_s)) < SHORT_S, group)
    race = SHORT_RACE if is_short else RACE
    models = [training.ours for training in trainings if training.ours is not None]
    model = next((model for model in models if model.network is not None), models[0])
    assert model.trace is not None  # it has trained longer than it records
    contestants = [training.contestant(race.warmup) for training in trainings]
    if model.network is not None:  # which it has measured beside DDP's own buckets
        own_s = prediction_s(model.trace, None, model.network)
        contestants = [replace(one, predicted_s=own_s) if one.name == BASELINE else one for one in contestants]
    work = workload()
    compute_only, *_ = reference_contestants(*work.build(), work.device)
    contestants = [replace(compute_only, warmup=race.warmup), *contestants]
    return _named(race_all(work, race, contestants, model.trace, lambda _: None))


def _named(benchmark: Benchmark) -> Benchmark:
    """With the command that a user would repeat it by, instead of this rank's own."""
    return replace(benchmark, facts={**benchmark.facts, "command": "anabranch demo"})


def _say(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
