"""Record trainings for ``test_recorded.py``: ``python -m tuning.record FOLDER [cpu|cuda [NAME ...]]``, a file for each.

Two ranks train, on Gloo or on a GPU with NCCL. Replay recordings before they are kept:
``choices`` are those of the live training, and rounding may have moved one.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anabranch as ab
from anabranch import DataParallel, TuningPolicy
from ddp.compiled.models import Log, Net
from parallel.twins import ring, scatter, scattered
from ranks import on_ranks
from tuning.recorded import Recording, save

WIDTH = 48
QUICK = TuningPolicy(warmup_steps=2, trial_steps=2, drift_check_steps=5)
EAGER = replace(QUICK, min_predicted_gain=-1e9, search_share=1e9)  # tries whatever is planned
STAYS = replace(EAGER, min_gain=-1e9)  # and keeps it
# By name: the arguments of DataParallel and how long it is trained. ``calls``: hold() or replan(), by step.
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "dense wins": {"bucket_cap_mb": 0.0005, "planner": "single", "lanes": 1, "policy": EAGER, "steps": 45},
    "dense loses": {"planner": "per_tensor", "policy": EAGER, "steps": 60},
    "nothing to gain": {"network": "ring", "policy": replace(QUICK, min_predicted_gain=0.99), "steps": 15},
    "int8 stays": {"compress": "int8", "policy": STAYS, "steps": 60},
    "auto stays": {"compress": "auto", "policy": STAYS, "steps": 60},
    "two lanes": {"lanes": 2, "bucket_cap_mb": 0.01, "policy": EAGER, "steps": 60},
    "OkTopk waits": {"compress": ab.OkTopk(density=0.1, warmup_steps=40), "policy": EAGER, "steps": 80},
    "OkTopk stays": {"compress": ab.OkTopk(density=0.1, warmup_steps=20), "policy": STAYS, "steps": 60},
    "compiled": {"compiled": True, "policy": EAGER, "steps": 50},
    "compiled again": {"compiled": True, "policy": replace(STAYS, cut_share=1e6, recompilations=3), "steps": 60},
    "drift": {"policy": replace(EAGER, confidence=1.0, max_drift=0.5), "slow_from": 50, "steps": 100},
    "no budget": {"policy": replace(EAGER, search_share=0.0, first_search_steps=1), "steps": 30},
    "few search steps": {"bucket_cap_mb": 0.01, "policy": replace(EAGER, max_search_steps=8), "steps": 30},
    "a given plan": {"plan": "scattered", "policy": QUICK, "calls": {20: "hold"}, "steps": 30},
    "held in a search": {"bucket_cap_mb": 0.01, "policy": EAGER, "calls": {14: "hold"}, "steps": 35},
    "replanned": {"planner": "scattered", "network": "ring", "policy": EAGER, "calls": {40: "replan"}, "steps": 80},
    "always again": {"planner": "scattered", "policy": replace(STAYS, max_drift=-1e9), "steps": 80},
    "cached": {"planner": "per_tensor", "policy": replace(STAYS, max_drift=1e9), "cached": 60, "steps": 20},
    "cached and slower": {
        "planner": "per_tensor", "policy": replace(STAYS, max_drift=0.5), "cached": 60, "slow_from": 0, "steps": 50,
    },
}  # fmt: skip


class Model(nn.Module):
    """Some layers; a test may let each forward take longer."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers)
        self.pause_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        out: torch.Tensor = self.layers(x)
        return out


def recorded(rank: int, name: str, device: str) -> str:
    """One training, on every rank; as text."""
    torch.manual_seed(7)
    options = dict(TRAININGS[name])
    count, calls, slow_from = options.pop("steps"), options.pop("calls", {}), options.pop("slow_from", sys.maxsize)
    is_compiled, cached = options.pop("compiled", False), options.pop("cached", 0)
    if options.get("network") == "ring":
        options["network"] = ring()
    if options.get("planner") == "scattered":
        options["planner"] = scattered
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["process_group"] = torch.distributed.new_group(backend="nccl")
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)
        options |= {"cache": folder[0] if cached else False, "profile_steps": 3}
        if cached:
            _train(rank, _made(options, device, False), device, cached, None, {}, sys.maxsize)
        with Recording() as recording:
            model = _made(options, device, is_compiled)
            recording.watch(model)
            _train(rank, model, device, count, recording, calls, slow_from, is_compiled)
        torch.distributed.barrier()
    return json.dumps(recording.training)


def _made(options: dict[str, Any], device: str, is_compiled: bool) -> DataParallel:
    torch.manual_seed(7)
    net: nn.Module = (Net() if is_compiled else Model()).to(device)
    if options.get("plan") == "scattered":
        options = {**options, "plan": scatter({name: str(p.dtype) for name, p in net.named_parameters()})}
    return DataParallel(net, **options)


def _train(
    rank: int, model: DataParallel, device: str, count: int, recording: Recording | None, calls: Mapping[int, str],
    slow_from: int, is_compiled: bool = False,
) -> None:  # fmt: skip
    called: Any = torch.compile(model, backend=Log()) if is_compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = 160 if is_compiled else WIDTH
    for step in range(count):
        if recording is not None and step in calls:
            recording.call(calls[step])
        if step == slow_from:
            model.module.pause_s = 0.1
        optimizer.zero_grad()
        called(torch.randn(8, rows, device=device)).square().mean().backward()
        optimizer.step()
        if recording is not None:
            recording.after_step(step)


def main(folder: str, device: str = "cpu", *names: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names or TRAININGS:
        text = on_ranks(recorded, 2, name, device, timeout_s=120)[0]
        path = Path(folder) / f"{device} {name}.json".replace(" ", "_").replace(",", "")
        save(json.loads(text), path)
        print(path.name, path.stat().st_size, json.loads(text)["choices"][-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
