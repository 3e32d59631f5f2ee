"""What --compress means to scale: rows with sparse buckets, their price at any size, and what that rests on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.planners.sparse import where_it_gains
from anabranch.trace import Trace

LEAN = "lean"  # Ok-Topk's messages, from an engine that holds less


class SparseRows(NamedTuple):
    """Planners by the text that asked for them, what prices their buckets, and what is assumed."""

    planners: Mapping[str, Callable[[Trace, Network], Plan]]
    pricing: Callable[[Network], Network]
    assumptions: list[str]


def sparse_rows(texts: Sequence[str], trace: Trace, network: Network) -> SparseRows:
    """A row for each of ``texts``, such as "oktopk:0.01", on networks that were carried from ``network``."""
    if not texts:
        return SparseRows({}, lambda here: here, [])
    from anabranch.sparse.cost_model import priced, selection_on
    from anabranch.sparse.naming import kind_of

    densities = {text: _densities(text) for text in texts}
    dense = never_sparse(trace)
    selections = {density: selection_on(network, density) for row in densities.values() for density in row}

    def pricing(here: Network) -> Network:
        for density, selection in selections.items():
            here = priced(here, density, selection)
        return here

    planners = {
        text: partial(where_it_gains, collectives=[kind_of(density) for density in row], dense=dense)
        for text, row in densities.items()
    }
    sources = " and ".join(dict.fromkeys(selection.source for selection in selections.values()))
    return SparseRows(planners, pricing, [
        "sparse buckets cost the messages that virtual ranks count for Ok-Topk's fixed-size exchange, 2(P-1) of "
        "1.25 k/P pairs one behind the other, and new regions every 64 steps",
        f"selecting takes {sources}, and does not slow the backward pass",
        "any float32 gradient may travel sparsely, and does where that is predicted to gain",
    ])  # fmt: skip


def never_sparse(trace: Trace) -> list[str]:
    """Gradients that are not float32, which never travel sparsely."""
    return [tensor.name for tensor in trace.tensors if tensor.dtype not in ("", "float32") or tensor.itemsize != 4]


def density_of(text: str) -> float:
    """The greatest density that a way may choose, for which its messages need room; 1 for what is no such way."""
    return max(_densities(text)) if text.partition(":")[0] in ("oktopk", LEAN) else 1.0


def _densities(text: str) -> list[float]:
    """One density, or the ladder from which "auto" chooses."""
    from anabranch.sparse.naming import KIND, LADDER, given_density

    name, _, density = text.partition(":")
    if name not in (KIND, LEAN):
        raise ValueError(
            f"--compress is {text!r}: scale prices {KIND} (as dense as is hidden) and {KIND}:0.01, and {LEAN} alike"
        )
    return [given_density(text)] if density else list(LADDER)
