"""What a batch size does to throughput on a network: a recorded trace at another batch, by mode."""

from dataclasses import replace
from functools import partial

from anabranch.alpha_beta import AlphaBeta
from anabranch.network import Network
from anabranch.planners import by_bytes
from anabranch.planners.sparse import where_it_gains
from anabranch.scaling.compression import never_sparse
from anabranch.sim import finish_s
from anabranch.trace import Trace

# What naive sparsification takes beside its messages: ResNet-152's step on an H200 took 198 ms with it and 136 without.
NAIVE_S_PER_ELEMENT = (0.198 - 0.136) / 60.2e6
PAIR_NBYTES = 8

ASSUMPTIONS = (
    "computing takes as long as in the bundled trace, in proportion to the batch",
    "naive sparse selects for 1.03 ns per element after backward, as on an H200, and then gathers, hiding nothing",
    "oktopk and lean travel by the exact sparse plan; lean's copies of what waits, to host memory and back, are hidden",
)


def samples_per_s(
    trace: Trace, network: Network, mode: str, batch: int, density: float, recomputed: bool = False
) -> float:
    """Predicted samples per second of all ranks together; the trace's meta says for which batch it was recorded.

    ``recomputed``: backward computes the forward once more, as it goes.
    """
    from anabranch.estimate.account import DDP, NAIVE

    here = trace.scaled(batch / recorded_batch(trace))
    if recomputed:
        here = replace(here.scaled(1 + here.forward_s / here.backward_s), forward_s=here.forward_s)
    alone_s = here.forward_s + here.backward_s
    if mode == DDP:
        step_s = here.forward_s + finish_s(here, by_bytes(here, network), network)
    elif mode == NAIVE:
        step_s = alone_s + naive_s(sum(tensor.numel for tensor in here.tensors), network, density)
    else:
        step_s = here.forward_s + _sparse_s(here, network, density)
    return network.world_size * batch / step_s


def recorded_batch(trace: Trace) -> int:
    """For how many samples per rank the trace was recorded; ValueError if it does not say."""
    batch = known_batch(trace)
    if batch is None:
        found = trace.meta.get("batch")
        raise ValueError(f"the trace's meta has batch {found!r}: expected for how many samples it was recorded")
    return batch


def known_batch(trace: Trace) -> int | None:
    """The same; None if it does not say."""
    batch = trace.meta.get("batch")
    return batch if isinstance(batch, int) and batch > 0 else None


def naive_s(numel: int, network: Network, density: float) -> float:
    """Selection, and everyone's pairs once around the ring."""
    ranks = network.world_size
    if ranks == 1:
        return 0.0
    links = network.model if isinstance(network.model, AlphaBeta) else None
    links = links or AlphaBeta.ring_like(ranks, *network.curve("dense").line())
    part_nbytes = PAIR_NBYTES * density * numel
    return NAIVE_S_PER_ELEMENT * numel + (ranks - 1) * (links.alpha_s + part_nbytes * links.beta_s_per_byte)


def _sparse_s(trace: Trace, network: Network, density: float) -> float:
    from anabranch.sparse.cost_model import priced, selection_on
    from anabranch.sparse.naming import kind_of

    here = priced(network, density, selection_on(network, density))
    planner = partial(where_it_gains, collectives=[kind_of(density)], dense=never_sparse(trace))
    return finish_s(trace, planner(trace, here), here)
