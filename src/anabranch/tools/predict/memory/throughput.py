"""Predicted samples per second of each mode of training on a network, at a batch other than the recorded one."""

from collections.abc import Mapping
from dataclasses import replace

from anabranch.planning import by_bytes
from anabranch.planning.simulator import finish_s
from anabranch.tools.predict.memory.training_modes import DDP, LEAN_DENSE, NAIVE, OUR_MODES, is_sharded
from anabranch.tools.predict.scaling.compression import compressed_strategies
from anabranch.tools.predict.scaling.sharding import Sharding
from anabranch.tools.predict.scaling.sweep import recorded_batch
from anabranch.values.kinds.names import OKTOPK, Wire, kind_of
from anabranch.values.links import AlphaBeta
from anabranch.values.network import Network
from anabranch.values.trace import Trace

# Naive sparsification without its messages: ResNet-152's step on an H200 took 198 ms with it and 136 ms without.
NAIVE_S_PER_ELEMENT = (0.198 - 0.136) / 60.2e6
PAIR_NBYTES = 8

ASSUMPTIONS = (
    "computing takes as long as in the bundled trace, in proportion to the batch",
    "naive sparse selects for 1.03 ns per element after backward, as on an H200, and then gathers, hiding nothing",
    "compressed buckets travel by the exact plan for their kind, under auto by the least lossy one",
)


def throughputs(
    trace: Trace,
    network: Network,
    batches: Mapping[str, int],
    density: float,
    activations: Mapping[str, str],
    wire: Wire = "fp32",
) -> dict[str, float]:
    """Samples per second of each mode at its batch, with activations as ``activations`` says by mode.

    Ok-Topk sends a share of ``density``, its values as ``wire`` says. A mode whose batch is 0 is left out.
    """
    return {
        mode: samples_per_s(trace, network, mode, batch, density, activations[mode] == "recompute", wire)
        for mode, batch in batches.items()
        if batch
    }


def samples_per_s(
    trace: Trace,
    network: Network,
    mode: str,
    batch: int,
    density: float,
    recompute: bool = False,
    wire: Wire = "fp32",
) -> float:
    """Samples per second of all ranks together; with ``recompute``, backward runs the forward a second time.

    ValueError if the trace's meta does not say for which batch it was recorded.
    """
    recorded = recorded_batch(trace)
    if recorded is None:
        found = trace.meta.get("batch")
        raise ValueError(f"the trace's meta has batch {found!r}: expected for how many samples it was recorded")
    here = trace.scaled(batch / recorded)
    if recompute:
        here = replace(here.scaled(1 + here.forward_s / here.backward_s), forward_s=here.forward_s)
    if mode in (DDP, LEAN_DENSE):
        step_s = here.forward_s + finish_s(here, by_bytes(here, network), network)
    elif mode == NAIVE:
        numel = sum(tensor.numel for tensor in here.tensors)
        step_s = here.forward_s + here.backward_s + naive_s(numel, network, density)
    elif is_sharded(mode):
        (step_s,) = Sharding.named(mode)(here, here, [network]).steps_s
    else:
        kind = OUR_MODES[mode].exchange
        step_s = here.forward_s + _compressed_s(here, network, kind_of(density, wire) if kind == OKTOPK else kind)
    return network.world_size * batch / step_s


def naive_s(numel: int, network: Network, density: float) -> float:
    """Seconds of naive sparsification after backward: selection, then an all-gather of every rank's pairs on a ring."""
    ranks = network.world_size
    if ranks == 1:
        return 0.0
    links = network.model if isinstance(network.model, AlphaBeta) else None
    links = links or AlphaBeta.ring_like(ranks, *network.curve("dense").line())
    pairs_nbytes = PAIR_NBYTES * density * numel
    return NAIVE_S_PER_ELEMENT * numel + (ranks - 1) * (links.alpha_s + pairs_nbytes * links.beta_s_per_byte)


def _compressed_s(trace: Trace, network: Network, name: str) -> float:
    strategies = compressed_strategies([name], trace, network)
    here = strategies.priced(network)
    return finish_s(trace, strategies.planners[name](trace, here), here)
