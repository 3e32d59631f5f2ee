"""The errors of kinds of exchange, and their order from exact to lossy: of one step's average, and of a whole plan.

The error of a kind is the expected squared error of the averages of one step, relative to the squared averages, for
gradients that are normally distributed; in millionths, and whole numbers, so that sums of them compare exactly:

    dense              0
    bf16               6   measured (four ranks, two roundings), as the next two
    int8              81
    int4          22,500
    oktopk:0.1   560,714   what the largest 10 % of normal values leave out of the sum of squares
    oktopk:0.01  915,508

What a kind with residuals leaves out of one step comes in a later one. It is delayed, not lost; but the longer the
delay, the more it costs in learning, and a lower density delays longer. So this number also orders those kinds.
"""

from collections.abc import Sequence
from statistics import NormalDist

from anabranch.values.kinds.names import (
    BF16,
    DENSE,
    EVERY_ELEMENT,
    INT4,
    INT8,
    between_nodes,
    density_of,
    is_dense,
    kind_of,
)
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

MILLION = 10**6
ERRORS = {DENSE: 0, BF16: 6, INT8: 81, INT4: 22_500}
LADDER = (*EVERY_ELEMENT, *(kind_of(density) for density in (0.1, 0.05, 0.02, 0.01)))  # the most faithful first
LEAST = INT4  # the bound of "auto", unless one asks for less: what comes after it has cost 3 % of the loss and more


def error_of(kind: str) -> int:
    """The relative squared error of a kind, in millionths; ValueError if there is no such kind."""
    if (between := between_nodes(kind)) in ERRORS:  # sums inside nodes are exact
        return ERRORS[between]
    density = density_of(kind)
    if density is None:
        raise ValueError(f"no kind of exchange is called {kind!r}: expected one of {', '.join(LADDER)}")
    return 0 if density == 1 else round(MILLION * (1 - _share_of_largest(density)))


def is_compressed(kind: str) -> bool:
    """Whether this is the name of a kind of exchange, and not of dense ones."""
    return not is_dense(kind) and (between_nodes(kind) in ERRORS or density_of(kind) is not None)


def ladder(at_least: str = LEAST) -> tuple[str, ...]:
    """The compressed kinds from which "auto" chooses: those that are no less faithful than this one."""
    return tuple(kind for kind in LADDER if 0 < error_of(kind) <= error_of(at_least))


def by_fidelity(kinds: Sequence[str]) -> list[str]:
    """These kinds, the most faithful first."""
    return sorted(kinds, key=error_of)


def error_of_plan(trace: Trace, plan: Plan) -> float:
    """The relative squared error of all averages under this plan, if all elements have the same variance.

    A gradient that the trace does not have, such as a frozen one, counts nothing.
    """
    numels = {tensor.name: tensor.numel for tensor in trace.tensors}
    errors = (error_of(bucket.collective) * numels.get(name, 0) for bucket in plan.buckets for name in bucket.names)
    return sum(errors) / MILLION / max(1, sum(numels.values()))


def _share_of_largest(density: float) -> float:
    """The share that the largest ``density`` of normal values have in the sum of all squares."""
    normal = NormalDist()
    least = normal.inv_cdf(1 - density / 2)  # the smallest magnitude that is sent
    return 2 * least * normal.pdf(least) + density
