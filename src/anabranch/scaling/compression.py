"""Strategies with sparse buckets: their planners, the cost of their buckets at any world size, and the assumptions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.network import Network
from anabranch.planners.sparse import sparse_if_faster
from anabranch.scaling.result import Kind
from anabranch.scaling.sweep import Planner
from anabranch.sparse.cost_model import Selection, priced, selection_on
from anabranch.sparse.naming import KIND, LADDER, given_density, kind_of
from anabranch.trace import Trace

LEAN = "lean"  # sends the messages of Ok-Topk from an engine that holds less memory


@dataclass(frozen=True, slots=True)
class SparseStrategies:
    """Planners by the name of their strategy, such as "oktopk:0.01", and what their predictions assume.

    ``selections`` is what selecting the values costs, by density.
    """

    planners: Mapping[str, Planner]
    selections: Mapping[float, Selection]
    assumptions: Sequence[str]

    def priced(self, network: Network) -> Network:
        """``network`` with a cost for every density that these planners may choose."""
        for density, selection in self.selections.items():
            network = priced(network, density, selection)
        return network


def sparse_strategies(names: Sequence[str], trace: Trace, network: Network) -> SparseStrategies:
    """A strategy for each name. What selection costs is taken from ``network`` where that was measured there."""
    if not names:
        return SparseStrategies({}, {}, [])
    densities = {name: _densities(name) for name in names}
    dense = dense_only(trace)
    selections = {density: selection_on(network, density) for row in densities.values() for density in row}
    planners = {
        name: partial(sparse_if_faster, collectives=[kind_of(density) for density in row], dense=dense)
        for name, row in densities.items()
    }
    sources = " and ".join(dict.fromkeys(selection.source for selection in selections.values()))
    return SparseStrategies(planners, selections, [
        "sparse buckets cost the messages that virtual ranks count for Ok-Topk's fixed-size exchange, 2(P-1) of "
        "1.25 k/P pairs one behind the other, and new regions every 64 steps",
        f"selecting takes {sources}, and does not slow the backward pass",
        "any float32 gradient may travel sparsely, and does where that is predicted to gain",
    ])  # fmt: skip


def compression_kind(name: str) -> Kind:
    """Whether a strategy with sparse buckets runs on DDP ("sparse") or on the Lean engine ("lean")."""
    return "lean" if name.partition(":")[0] == LEAN else "sparse"


def dense_only(trace: Trace) -> list[str]:
    """Names of the gradients that are not float32: they always travel dense."""
    return [tensor.name for tensor in trace.tensors if tensor.dtype not in ("", "float32") or tensor.itemsize != 4]


def highest_density(name: str) -> float:
    """The highest density that a strategy may choose, which its messages need memory for; 1 for a dense planner."""
    return max(_densities(name)) if name.partition(":")[0] in (KIND, LEAN) else 1.0


def _densities(name: str) -> list[float]:
    """The one density in the name, or the ladder that "auto" chooses from."""
    family, _, density = name.partition(":")
    if family not in (KIND, LEAN):
        raise ValueError(
            f"--compress is {name!r}: scale prices {KIND} (as dense as is hidden) and {KIND}:0.01, and {LEAN} alike"
        )
    return [given_density(name)] if density else list(LADDER)
