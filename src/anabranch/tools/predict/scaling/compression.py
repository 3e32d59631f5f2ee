"""Strategies with compressed buckets: their planners, the cost of their buckets at any world size, the assumptions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from anabranch.planning.ladder import least_lossy
from anabranch.planning.merge import compressed_if_faster
from anabranch.planning.prices import Exchange, quantised_exchange, sparse_exchange, with_nodes
from anabranch.tools.predict.scaling.result import Kind
from anabranch.values.kinds.fidelity import error_of, ladder
from anabranch.values.kinds.formats import ENTRY_NBYTES
from anabranch.values.kinds.names import (
    AUTO,
    COMPRESSED,
    DENSE,
    DENSITIES,
    NODES,
    OKTOPK,
    Wire,
    between_nodes,
    density_of,
    given_density,
    is_dense,
    is_two_level,
    kind_of,
    split_wire,
    two_level,
    with_wire,
)
from anabranch.values.kinds.options import OkTopk
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import TensorSpec, Trace

AS_FP32 = (
    "Sparse buckets are taken to send 8 bytes an entry, as fp32: a plan does not say OkTopk's wire. Where they were "
    "not measured, they cost that."
)
Planner = Callable[[Trace, Network], Plan]
LEAN = "lean"  # sends the messages of Ok-Topk, or of the kind behind the colon, from an engine that holds less memory


class Compression(NamedTuple):
    """What the name of a strategy says, such as "int8", "oktopk:0.01:bf16", "dense@nodes" or "lean:int4".

    kinds           the exchanges that it chooses from: one, all densities of Ok-Topk, or those of "auto"
    lean            whether the Lean engine runs them
    between_nodes   whether they run between nodes, after exact sums inside them
    wire            how sparse ones send values
    """

    kinds: tuple[str, ...]
    lean: bool = False
    between_nodes: bool = False
    wire: Wire = "fp32"

    @classmethod
    def named(cls, name: str) -> "Compression":
        """The compression of this name; ValueError if there is none."""
        what = name.removesuffix(NODES)
        lean, between_nodes = what.partition(":")[0] == LEAN, what != name
        exchange = what.removeprefix(f"{LEAN}:")  # "lean:int8" runs int8, "lean:0.01" Ok-Topk
        if exchange in COMPRESSED or (what == DENSE and between_nodes):
            return cls((exchange,), lean, between_nodes)
        family, colon, at_least = exchange.partition(":")
        if family == AUTO and bool(colon) == bool(at_least) and (chosen := _ladder(at_least)):
            return cls(chosen, lean, between_nodes)
        plain, wire = split_wire(what)
        if family != OKTOPK and plain != LEAN and not (lean and family[:1] in "0123456789."):
            raise ValueError(
                f"--compress is {name!r}: expected {AUTO} (as faithful as is hidden, down to int4), "
                f"{AUTO}:{OKTOPK}:0.01 (down to 1 % sparse), {', '.join(COMPRESSED)}, {OKTOPK} "
                f"(as dense as is hidden), {OKTOPK}:0.01 or {OKTOPK}:0.01:bf16 (with packed values); on Lean "
                f"{LEAN}:int8, {LEAN}:{AUTO}, {LEAN} or {LEAN}:0.01; between nodes, after exact sums inside them, "
                f"int8{NODES} and its like, and dense{NODES}"
            )
        densities = DENSITIES if plain in (OKTOPK, LEAN) else [given_density(what)]
        return cls(tuple(map(kind_of, densities)), lean, between_nodes, wire)

    @property
    def strategy_kind(self) -> Kind:
        """The kind of strategy that this is in a result."""
        if self.lean:
            return "lean"
        if self.kinds == (DENSE,):
            return "dense"
        return "quantised" if all(kind in COMPRESSED for kind in self.kinds) else "sparse"

    @property
    def planner_name(self) -> str:
        """The planner that ``planner`` returns, by its name in ``planners``."""
        return "optimal" if len(self.kinds) == 1 else "least_lossy"

    @property
    def collectives(self) -> list[str]:
        """The names of ``kinds`` in the buckets of a plan and in the costs of a network."""
        names = [with_wire(kind, self.wire) for kind in self.kinds]
        return list(map(two_level, names)) if self.between_nodes else names

    def planner(self, dense: Sequence[str]) -> Planner:
        """The planner that chooses among these kinds; gradients in ``dense`` are sent dense."""
        names = self.collectives
        if len(names) == 1:
            return partial(compressed_if_faster, collective=names[0], dense=() if is_dense(names[0]) else dense)
        exact = [DENSE, two_level(DENSE)] if self.between_nodes else [DENSE]
        errors = {**dict.fromkeys(exact, 0), **dict(zip(names, map(error_of, self.kinds), strict=True))}
        return partial(least_lossy, errors=errors, excluded=dict.fromkeys(names, dense))


def _ladder(at_least: str) -> tuple[str, ...]:
    """The kinds of "auto" down to this one, its own limit if none is named; empty if there is no such kind."""
    try:
        return ladder(at_least) if at_least else ladder()
    except ValueError:
        return ()


@dataclass(frozen=True, slots=True)
class CompressedStrategies:
    """Planners by the name of their strategy, such as "oktopk:0.01", and what their predictions assume.

    ``priced`` gives a network of any world size a cost for every exchange that these planners may choose.
    """

    planners: Mapping[str, Planner]
    priced: Callable[[Network], Network]
    assumptions: Sequence[str]


def compressed_strategies(names: Sequence[str], trace: Trace, network: Network) -> CompressedStrategies:
    """A strategy for each name. What exchanges compute is taken from ``network`` where they were measured there."""
    dense = dense_only(trace)
    wanted = {name: Compression.named(name) for name in names}
    planners = {name: compression.planner(dense) for name, compression in wanted.items()}
    kinds = [kind for compression in wanted.values() for kind in compression.collectives]
    assumptions = _assumptions(wanted.values(), exchanges_on(network, kinds), network)
    return CompressedStrategies(planners, partial(priced, kinds=kinds, measured=network), assumptions)


def exchanges_on(network: Network, kinds: Iterable[str]) -> list[Exchange]:
    """The exchanges that buckets name by these kinds, but for those that have no model, such as "dense"."""
    return [found for kind in dict.fromkeys(kinds) if (found := _exchange(kind, network)) is not None]


def priced(network: Network, kinds: Iterable[str], measured: Network | None = None) -> Network:
    """``network`` with a cost for those of these kinds that have a model and were not measured.

    A two-level kind brings dense messages on two levels, and what nodes cost inside. What exchanges compute is taken
    from ``measured``, by default ``network`` itself, where they were measured there.
    """
    kinds = list(kinds)
    if any(map(is_two_level, kinds)):
        network = with_nodes(network)
    for exchange in exchanges_on(measured or network, kinds):
        network = exchange.priced(network)
    return network


def kind_of_bucket(collective: str) -> str:
    """The kind that a bucket of a live plan names, which has not the wire of a price."""
    kind = split_wire(between_nodes(collective))[0]
    return two_level(kind) if is_two_level(collective) else kind


def as_sent(plan: Plan) -> Plan:
    """The plan as a live one names its kinds: ``kind_of_bucket`` of every bucket."""
    return replace(plan, buckets=tuple(replace(b, collective=kind_of_bucket(b.collective)) for b in plan.buckets))


def sent_nbytes(kind: str, tensors: Sequence[TensorSpec], ranks: int) -> int | None:
    """Bytes that one rank sends for a bucket of these gradients; None if there is no model of this kind.

    Ok-Topk sends float32 values unless the kind names a wire, which kinds of a live plan do not.
    """
    if kind == DENSE:  # a ring all-reduce
        return 2 * (ranks - 1) * sum(tensor.nbytes for tensor in tensors) // ranks
    exchange = None if kind.endswith(NODES) else _exchange(kind)  # which depends on how many nodes there are
    return None if exchange is None else exchange.sent_nbytes(sum(tensor.numel for tensor in tensors), ranks)


def about_sent(kinds: Iterable[str]) -> str:
    """What ``sent_nbytes`` assumes of these kinds, of a plan; empty if nothing."""
    return AS_FP32 if any(density_of(kind) is not None for kind in kinds) else ""


def dense_only(trace: Trace) -> list[str]:
    """Names of the gradients that always travel dense: those that are not float32, bfloat16 or float16."""
    known = {("", 4), ("float32", 4), ("bfloat16", 2), ("float16", 2)}
    return [tensor.name for tensor in trace.tensors if tensor.kind not in known]


def _exchange(collective: str, network: Network | None = None) -> Exchange | None:
    """The exchange of this name; its computing time is taken from ``network`` where it was measured there."""
    kind = between_nodes(collective)
    plain, wire = split_wire(kind)
    density = density_of(plain)
    if kind in COMPRESSED:
        found = quantised_exchange(kind, network)
    elif density is not None:
        found = sparse_exchange(density, network, OkTopk(wire=wire))
    else:
        return None
    return found if kind == collective else found.between_nodes()


def _assumptions(wanted: Iterable[Compression], exchanges: Sequence[Exchange], network: Network) -> list[str]:
    """What the costs of these strategies assume, in sentences."""
    wanted = list(wanted)
    if not wanted:
        return []
    rounded = {kind: found for found in exchanges if (kind := between_nodes(found.kind)) in COMPRESSED}
    sparsely = [found for found in exchanges if density_of(kind_of_bucket(found.kind)) is not None]
    said = []
    if rounded:
        said.append(
            f"{', '.join(rounded)} buckets cost an all-to-all and an all-gather, 2(P-1) messages of 1/P of the "
            "values one behind the other, scales included"
        )
        said += [f"{kind} computes for {found.computing.source}" for kind, found in rounded.items()]
    if sparsely:
        sources = " and ".join(dict.fromkeys(found.computing.source for found in sparsely))
        wires = dict.fromkeys(split_wire(between_nodes(found.kind))[1] for found in sparsely)
        sizes = " or ".join(f"{ENTRY_NBYTES[wire]} bytes as {wire}" for wire in wires)
        said += [
            "sparse buckets cost the messages that virtual ranks count for Ok-Topk's fixed-size exchange, 2(P-1) of "
            f"1.25 k/P pairs one behind the other, {sizes}, and new regions every 64 steps",
            f"selecting takes {sources}",
        ]
    if measured := [found.kind for found in exchanges if found.kind in network.curves]:
        said.append(f"at {network.world_size} ranks {', '.join(measured)} buckets cost what was measured there")
    if any(compression.between_nodes for compression in wanted):
        said.append(
            f"{NODES}: exact sums inside each node, and the exchange between nodes; stages of successive buckets "
            "overlap, and dense buckets are sent so where that is faster; on a network without nodes it is the plain "
            "exchange"
        )
    return [
        *said,
        "what compressed buckets compute does not slow the backward pass",
        "any gradient of float32, bfloat16 or float16 may travel compressed, and does where that is predicted to gain",
    ]
