"""What --within does to a sweep: every strategy at the largest batch that fits, by the account of memory."""

from collections.abc import Mapping
from typing import NamedTuple

from anabranch.cli.memory import FRAGMENTED, Account, Activations, Optimizer
from anabranch.report.formatting import count, size
from anabranch.scaling.compression import density_of
from anabranch.scaling.result import Kind
from anabranch.trace import Trace

OPTIMIZER = Optimizer.momentum


class Fitting(NamedTuple):
    """The batch of each rank by strategy (0: not even one sample fits), and what that rests on."""

    batches: Mapping[str, int]
    words: list[str]


def largest_batches(trace: Trace, kinds: Mapping[str, Kind], limit_nbytes: int, ranks: int) -> Fitting:
    """A model that anabranch knows by name is run on tensors without data: a trace says nothing of activations."""
    from anabranch.bench import zoo
    from anabranch.estimate.account import DDP, LEAN, OKTOPK, Setting

    model = trace.meta.get("model")
    if not isinstance(model, str) or model not in zoo.MODELS:
        raise ValueError(
            f"--within: a trace holds no activations, and its model ({model!r}) is none that anabranch can build "
            f"({', '.join(zoo.MODELS)}): leave --within out, or give the batch by --batch"
        )
    mode_of: Mapping[Kind, str] = {"dense": DDP, "sparse": OKTOPK, "lean": LEAN}
    batches: dict[str, int] = {}
    found: dict[tuple[str, float], int] = {}
    account = Account(model, OPTIMIZER, Activations.keep)
    for name, kind in kinds.items():
        where = (mode_of[kind], density_of(name))
        if where not in found:
            found[where] = account.largest(where[0], Setting(ranks=ranks, density=where[1]), limit_nbytes)
        batches[name] = found[where]
    words = [
        f"every strategy at the largest batch per rank that fits in {size(limit_nbytes)} at {count(ranks, 'rank')}"
    ]
    words += [f"memory: {said}" for said in (*account.assumptions, f"{OPTIMIZER.value} as the optimizer")]
    return Fitting(batches, [*words, f"memory: {FRAGMENTED:.0%} of it is lost between torch's blocks"])
