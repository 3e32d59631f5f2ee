"""Steps of many virtual ranks through the quantised exchange, and values of every sort."""

from collections.abc import Sequence

import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.quantised.exchange import exchange
from anabranch.values.kinds.formats import BlockFormat

Gradients = list[torch.Tensor]


def gradients(ranks: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Gradients:
    """Of very different magnitudes, with blocks of zeros, of denormal numbers, of equal values and of huge ones."""
    chance = torch.Generator().manual_seed(seed)
    made, filled = [], min(280, numel // 5)  # so that also a few values are not all zeros
    for _ in range(ranks):
        scale = torch.randint(-12, 12, (numel,), generator=chance).float().exp2()
        values = torch.randn(numel, generator=chance) * scale
        for number, filling in enumerate((0.0, 1e-40, -3.5, 1e37)):
            values[number * (filled + 20) :][:filled] = filling
        made.append(values[torch.randint(0, numel, (numel,), generator=chance)] if seed % 2 else values)
    return [values.to(dtype) for values in made]


def step(
    given: Gradients,
    residuals: Sequence[torch.Tensor] | None,
    form: BlockFormat,
    divisor: float | None = None,
) -> VirtualWorld:
    """One exchange of all ranks; every rank's gradient becomes the average."""
    world = VirtualWorld(len(given))
    held = residuals if residuals is not None else [None] * len(given)
    world.run(
        [
            exchange(gradient, residual, comm, divisor or float(world.size), form)
            for gradient, residual, comm in zip(given, held, world.comms, strict=True)
        ]
    )
    return world
