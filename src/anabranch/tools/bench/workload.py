"""What a benchmark trains: a well-known model with a synthetic batch, or the replay of a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from anabranch.tools.bench import zoo
from anabranch.tools.bench.replay import ReplayedModel
from anabranch.values.trace import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to train. ``build`` makes a new one, with its step, which takes the model or a wrapper around it.

    ``batch`` is the number of images or sequences (``unit``) per rank and step.
    """

    name: str
    batch: int
    unit: str
    device: torch.device
    build: Callable[[], tuple[nn.Module, zoo.Step]]


def zoo_workload(text: str, device: torch.device, batch: int | None = None) -> Workload:
    """A model of torchvision or transformers by name, with a batch of its own where the text has one: "gpt2:4"."""
    name, _, own = text.partition(":")
    zoo.check_model(name)
    if own and not (own.isascii() and own.isdigit() and int(own)):
        raise ValueError(f"--model is {text!r}: expected a batch from 1 on after the colon, such as {name}:8")
    unit, default_batch = ("img", zoo.IMAGES[name]) if name in zoo.IMAGES else ("seq", zoo.SEQUENCES[name][0])
    batch = int(own or 0) or batch or default_batch
    return Workload(name, batch, unit, device, partial(zoo.model_and_step, name, device, None, batch))


def replay_workload(name: str, trace: Trace, slower: float = 1.0) -> Workload:
    """A trace replayed on the CPU, ``slower`` times as slowly as it was recorded."""
    replayed = trace.scaled(slower)
    recorded_batch = trace.meta.get("batch", 1)
    batch = recorded_batch if isinstance(recorded_batch, int) else 1

    def build() -> tuple[nn.Module, zoo.Step]:
        def step(called: nn.Module) -> None:
            called.zero_grad(set_to_none=True)
            called().backward()

        return ReplayedModel(replayed), step

    label = f"{name} (replayed" + (f", {slower:g} times slower)" if slower != 1 else ")")
    return Workload(label, batch, "img" if "sequence_length" not in trace.meta else "seq", torch.device("cpu"), build)
