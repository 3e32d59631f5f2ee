"""Counts the words that sparse exchanges send, on virtual ranks."""

from collections.abc import Iterator

import torch
from benchmarks.rival_exchanges import RIVALS, ExchangeFunction
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.exact_exchange import exact_exchange
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange

RANKS, NUMEL, DENSITY = 16, 50_000, 0.01
LAYERS = 50
WORD_NBYTES = 4  # the paper counts words


EXACT, FIXED = "Ok-Topk, exact", "Ok-Topk, fixed"

COUNTED: dict[str, ExchangeFunction] = {
    EXACT: exact_exchange,
    FIXED: fixed_exchange,
    "Dense": RIVALS["dense"],
    "TopkA": RIVALS["topk"],
    "TopkDSA": RIVALS["dsa"],
    "gTopk": RIVALS["gtopk"],
    "Gaussiank": RIVALS["gaussian"],
}


def selected_count(numel: int) -> int:
    """How many values a step selects at ``DENSITY``."""
    return round(DENSITY * numel)


def words_sent() -> dict[str, float]:
    """Words per scheme in a second step: over its phases, the sum of the busiest rank's sent or received words."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for many small operations
    try:
        return {name: _counted(exchange) for name, exchange in COUNTED.items()}
    finally:
        torch.set_num_threads(threads)


def _counted(exchange: ExchangeFunction) -> float:
    world = VirtualWorld(RANKS)
    states = [BucketState.of(torch.zeros(NUMEL), RANKS) for _ in range(RANKS)]
    for _, given in zip(range(2), _gradients(), strict=False):
        world.byte_counts.clear()
        ranks = zip(given, states, world.comms, strict=True)
        world.run([exchange(gradient, state, comm, float(RANKS), DENSITY) for gradient, state, comm in ranks])
    return sum(world.byte_counts.volume([phase]) for phase in world.byte_counts.phases) / WORD_NBYTES


def _gradients() -> Iterator[list[torch.Tensor]]:
    """Gradients of each rank: heavy-tailed, layers of different magnitude, half a shared signal per own noise."""
    chance = torch.Generator().manual_seed(0)
    layers = torch.randn(LAYERS, generator=chance).repeat_interleave(NUMEL // LAYERS)
    magnitude = (layers + 1.5 * torch.randn(NUMEL, generator=chance)).exp()
    while True:
        signal = 0.5 * torch.randn(NUMEL, generator=chance)
        yield [(signal + torch.randn(NUMEL, generator=chance)) * magnitude for _ in range(RANKS)]
