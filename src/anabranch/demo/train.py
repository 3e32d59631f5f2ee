"""One worker of ``anabranch demo``: the same training twice, under DistributedDataParallel and under DataParallel.

Both start from the same weights and see the same batches. After DataParallel has finished tuning, they take turns, so
that their steps can be compared. Rank 0 shows progress on stderr and writes the results.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.demo.text import CharTransformer, StandardLibrary
from anabranch.files import dumps, save
from anabranch.observe.loggers import JsonLines
from anabranch.observe.measure import noise_note
from anabranch.parallel import DataParallel

TRIAL_STEPS = 6  # a short training has no time for longer trials
ROUNDS, ROUND_STEPS = 20, 2  # side by side, in turn: what slows the machine for a while slows both


def main(output: str, steps: int) -> None:
    """Train twice; rank 0 writes both runs to ``output`` as JSON, and the model's trace, network and plan beside it."""
    dist.init_process_group("gloo")
    ddp = _Training(DistributedDataParallel(_model()))
    # No cache: the demo shows the search, and what it finds on this machine today.
    ours = _Training(model := DataParallel(_model(), profile_steps=TRIAL_STEPS, cache=False))
    model.log_to(JsonLines(Path(output).with_name("run.jsonl")))
    for title, training in (("DistributedDataParallel", ddp), ("DataParallel", ours)):
        for _ in _progress(steps, title):
            training.step()
    model.hold()  # no new plan during the comparison
    for turn in _progress(ROUNDS, "both, in turn"):
        for training in (ddp, ours) if turn % 2 else (ours, ddp):
            training.rounds_s.append(sum(training.step() for _ in range(ROUND_STEPS)) / ROUND_STEPS)
    if dist.get_rank() == 0:
        result = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "ddp": {"losses": ddp.losses, "rounds_s": ddp.rounds_s},
            "anabranch": {"losses": ours.losses, "rounds_s": ours.rounds_s},
            "plan": json.loads(dumps(model.plan)) if model.plan is not None else None,
            "explanation": model.explain(),
            "notes": [note for note in [noise_note(model.network) if model.network is not None else ""] if note],
        }
        known = {"trace": model.trace, "network": model.network, "plan": model.plan, "timeline": model.timeline}
        for name, noun in known.items():
            if noun is not None:
                save(noun, Path(output).with_name(f"{name}.json"))
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    model.close()
    dist.destroy_process_group()


class _Training:
    """One training; ``losses`` are averages over the ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._text = model, StandardLibrary()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.losses: list[float] = []
        self.rounds_s: list[float] = []  # mean step of each round

    def step(self) -> float:
        """Seconds from the batch to the update."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        begun = perf_counter()
        loss = self._model(self._text.batch(len(self.losses), rank, ranks))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        seconds = perf_counter() - begun
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        self.losses.append(mean.item())
        return seconds


def _model() -> CharTransformer:
    torch.manual_seed(0)
    return CharTransformer()


def _progress(count: int, title: str) -> Iterable[int]:
    quiet = dist.get_rank() != 0 or not sys.stderr.isatty()
    return track(range(count), title.ljust(23), console=Console(stderr=True), disable=quiet)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
