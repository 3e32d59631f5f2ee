"""Subject: what is trained in a benchmark, a well-known model with a synthetic batch or the replay of a trace."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.bench import zoo
from anabranch.bench.replay import ReplayedModel
from anabranch.trace import Trace


@dataclass(frozen=True, slots=True)
class Subject:
    """``build`` gives a fresh model, and a function that runs one forward and backward of it through a wrapper.

    ``batch`` counts ``unit`` per rank and step.
    """

    name: str
    batch: int
    unit: str
    device: torch.device
    build: Callable[[], tuple[nn.Module, zoo.Step]]


def from_zoo(name: str, device: torch.device, batch: int | None = None) -> Subject:
    """A model of torchvision or transformers by name."""
    if name not in zoo.MODELS:
        raise ValueError(f"--model is {name!r}: expected one of {', '.join(zoo.MODELS)}; or replay a trace by --trace")
    images = name in zoo.IMAGES
    batch = batch or (zoo.IMAGES[name] if images else zoo.SEQUENCES[name][0])
    return Subject(name, batch, "img" if images else "seq", device, lambda: zoo.build(name, device, None, batch))


def from_trace(name: str, trace: Trace, slower: float = 1.0) -> Subject:
    """A trace replayed on the CPU, ``slower`` times as slowly as it was recorded."""
    replayed = trace.scaled(slower)
    noted = trace.meta.get("batch", 1)
    batch = noted if isinstance(noted, int) else 1

    def build() -> tuple[nn.Module, zoo.Step]:
        model = ReplayedModel(replayed)

        def step(wrapped: nn.Module | None = None) -> None:
            model.zero_grad(set_to_none=True)
            (wrapped or model)().backward()

        return model, step

    label = f"{name} (replayed" + (f", {slower:g} times slower)" if slower != 1 else ")")
    return Subject(label, batch, "img" if "sequence_length" not in trace.meta else "seq", torch.device("cpu"), build)
