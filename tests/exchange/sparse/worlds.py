"""Gradients as training gives them, steps of many virtual ranks, and the conservation that every step must keep."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from benchmarks.rival_exchanges import RIVALS, ExchangeFunction
from benchmarks.virtual import ByteCounts, VirtualWorld

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.interface import Steps
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.exact_exchange import exact_exchange
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.exchange.sparse.oktopk import round_averages
from anabranch.values.kinds.options import OkTopk

SOON = OkTopk(threshold_period=3, region_period=2)  # so that few steps see refreshes and steps without
EXCHANGES: dict[str, ExchangeFunction] = {
    "exact": partial(exact_exchange, options=SOON),
    "exact bf16": partial(exact_exchange, options=OkTopk(threshold_period=3, region_period=2, wire="bf16")),
    "exact int8": partial(exact_exchange, options=OkTopk(threshold_period=3, region_period=2, wire="int8")),
    "fixed": partial(fixed_exchange, options=SOON),
    "fixed bf16": partial(fixed_exchange, options=OkTopk(region_period=2, wire="bf16")),
    "fixed int8": partial(fixed_exchange, options=OkTopk(region_period=2, wire="int8")),
    "fixed in order": partial(fixed_exchange, options=OkTopk(region_period=2, deterministic=True)),
    "fixed and roomy": partial(fixed_exchange, options=OkTopk(region_period=2, capacity_factor=3.0)),
    **RIVALS,
}
OK_TOPK = [name for name in EXCHANGES if name not in RIVALS]
WHOLE = [name for name in OK_TOPK if "bf16" not in name and "int8" not in name]

NUMEL, DENSITY = 40_000, 0.01  # of worlds whose bytes are counted

Gradients = list[torch.Tensor]


def gradients(ranks: int, numel: int, seed: int, scale: float = 1.0) -> Gradients:
    """Heavy-tailed and correlated: coordinates of very different size, a common signal, noise of each rank's own."""
    chance = torch.Generator().manual_seed(seed)
    size = (1.5 * torch.randn(numel, generator=torch.Generator().manual_seed(numel))).exp() * scale
    signal = torch.randn(numel, generator=chance)
    return [size * (0.5 * signal + torch.randn(numel, generator=chance)) for _ in range(ranks)]


def states(ranks: int, numel: int) -> list[BucketState]:
    """A fresh bucket on every rank."""
    return [BucketState.of(torch.zeros(numel), ranks) for _ in range(ranks)]


def step(
    exchange: ExchangeFunction, given: Gradients, held: Sequence[BucketState], world: VirtualWorld, density: float
) -> None:
    """One step of all ranks; every rank's gradient becomes the average."""
    world.run(
        [
            exchange(gradient, state, comm, float(world.size), density)
            for gradient, state, comm in zip(given, held, world.comms, strict=True)
        ]
    )


def check_step(
    exchange: ExchangeFunction, given: Gradients, held: Sequence[BucketState], world: VirtualWorld, density: float
) -> None:
    """A step that ends with the same bits everywhere and loses nothing, element by element."""
    accumulated = [gradient + state.residual for gradient, state in zip(given, held, strict=True)]
    step(exchange, given, held, world, density)
    for gradient in given:
        assert torch.equal(gradient.view(torch.int32), given[0].view(torch.int32)), "ranks must end with the same bits"
    total = sum((a.double() for a in accumulated), torch.zeros_like(given[0], dtype=torch.float64))
    size = sum((a.double().abs() for a in accumulated), torch.zeros_like(total))
    applied = given[0].double() * world.size
    residual = sum((state.residual.double() for state in held), torch.zeros_like(total))
    # float32 sums of at most P values, one division, one product: each rounds once
    allowed = 2.0**-24 * (world.size + 3) * size + 1e-44 * world.size
    lost = (total - applied - residual).abs()
    assert bool((lost <= allowed).all()), f"lost up to {float((lost / size.clamp(min=1e-30)).max()):.2e} of an element"


def narrow_step(
    exchange: Callable[..., Steps], given: Gradients, held: Sequence[BucketState], world: VirtualWorld, divisor: float
) -> None:
    """One step of all ranks at a density of 5 %, with gradients of 16 bits."""

    def of(gradient: torch.Tensor, state: BucketState, comm: Communicator) -> Steps:
        wide = gradient.float()
        yield from exchange(wide, state, comm, divisor, 0.05)
        round_averages(wide, gradient, state, comm.rank, divisor)

    world.run([of(*rank) for rank in zip(given, held, world.comms, strict=True)])


def check_narrow_steps(exchange: Callable[..., Steps], dtype: torch.dtype, device: torch.device) -> None:
    """Steps of 16-bit gradients that lose nothing but the rounding of the average, which is the nearest number."""
    ranks, numel = 3, 1003
    held, world = [BucketState.of(torch.zeros(numel, device=device), ranks) for _ in range(ranks)], VirtualWorld(ranks)
    for number in range(4):
        given = [gradient.to(device, dtype) for gradient in gradients(ranks, numel, number, scale=0.1)]
        accumulated = [gradient.float() + state.residual for gradient, state in zip(given, held, strict=True)]
        narrow_step(exchange, given, held, world, float(ranks))
        assert all(torch.equal(gradient.view(torch.int16), given[0].view(torch.int16)) for gradient in given)
        applied = sum((a - s.residual).double() for a, s in zip(accumulated, held, strict=True)) / ranks
        assert isinstance(applied, torch.Tensor) and applied.any()
        half = torch.finfo(dtype).eps * applied.abs() + torch.finfo(dtype).smallest_normal
        assert bool(((given[0].double() - applied).abs() <= half).all())


def check_overflow(exchange: Callable[..., Steps], device: torch.device) -> None:
    """Averages of finite float16 values that float16 cannot hold: it gets what it can hold, and the rest later."""
    held, world = [BucketState.of(torch.zeros(400, device=device), 2) for _ in range(2)], VirtualWorld(2)
    large = (40_960 + 32.0 * torch.arange(400)).to(device, torch.float16)
    made = [large, large.clone()]
    narrow_step(exchange, [made[0].clone(), made[1].clone()], held, world, 2.0)  # a twentieth is sent, the rest waits
    before = sum(state.residual.double() for state in held) + 2 * large.double()
    assert isinstance(before, torch.Tensor)
    given = [gradient.clone() for gradient in made]
    narrow_step(exchange, given, held, world, 2.0)  # twice as much on each rank
    assert float(given[0].max()) == torch.finfo(torch.float16).max and bool(given[0].isfinite().all())
    for _ in range(60):
        applied, left = 2 * given[0].double(), sum(state.residual.double() for state in held)
        # what is lost is the rounding of averages, half of the last of 11 bits
        assert bool(((applied + left - before).abs() <= 2.0**-11 * applied.abs()).all())
        assert torch.equal(given[0], given[1])
        before = torch.as_tensor(left)
        given = [torch.zeros_like(gradient) for gradient in made]
        narrow_step(exchange, given, held, world, 2.0)
    assert float(before.abs().max()) < 2 * 40_960  # the rest was sent, too


def check_steps(
    exchange: ExchangeFunction, ranks: int, numel: int, density: float, count: int, make: Callable[[int], Gradients]
) -> list[BucketState]:
    """Several such steps from nothing; the states after them."""
    held, world = states(ranks, numel), VirtualWorld(ranks)
    for number in range(count):
        check_step(exchange, make(number), held, world, density)
    return held


def settled(name: str, ranks: int, numel: int = NUMEL, density: float = DENSITY, before: int = 2) -> VirtualWorld:
    """A world after one counted step without refreshes, which follows a few that are not counted."""
    held, world = states(ranks, numel), VirtualWorld(ranks)
    for number in range(before + 1):
        world.byte_counts.clear()
        for state in held:
            state.step += state.step == 2  # 2 is a step of new regions, 1 and 4 … are none
        step(EXCHANGES[name], gradients(ranks, numel, number), held, world, density)
    return world


def imbalance(counts: ByteCounts, phases: Iterable[str] | None = None) -> float:
    """The busiest rank's volume over the mean; 1 when all ranks have the same."""
    chosen = None if phases is None else list(phases)
    each = np.maximum(counts.sent(chosen), counts.received(chosen))
    return float(each.max() / each.mean())
