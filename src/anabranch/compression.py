"""What ``compress=`` may be, and the exchanges that it stands for."""

from collections.abc import Callable, Mapping

import torch

from anabranch.comm.collectives import Collectives
from anabranch.comm.dense import COLLECTIVES, DenseExchanges
from anabranch.comm.exchange import Collective, Group
from anabranch.kinds import BF16, COMPRESSED
from anabranch.quantised.exchanges import DTYPES, WITH_RESIDUAL, QuantisedExchanges
from anabranch.sparse.exchanges import OkTopkExchanges
from anabranch.sparse.memory import NO_PARAMETERS, ResidualMemory
from anabranch.sparse.momentum import Momentum
from anabranch.sparse.naming import density_of
from anabranch.sparse.options import OkTopk
from anabranch.sparse.residual_flush import Applied


def check_compress(compress: object) -> None:
    """ValueError unless ``DataParallel(compress=...)`` can take this."""
    if compress is not None and not isinstance(compress, OkTopk) and compress not in COMPRESSED:
        raise ValueError(f"compress is {compress!r}: expected one of {', '.join(COMPRESSED)}, OkTopk(...), or None")


def keeps_residuals(compress: str | OkTopk | None) -> bool:
    """Whether what is not sent in a step is kept for the next one."""
    return isinstance(compress, OkTopk) or compress in WITH_RESIDUAL


def probe_of(kind: str) -> Collective:
    """An exchange for timing, of a kind that sends every element."""
    return COLLECTIVES[kind] if kind in COLLECTIVES else QuantisedExchanges((kind,)).probe(kind)


def collectives_for(
    compress: str | OkTopk | None,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    averaged: Callable[[], bool],
    applied: Applied | None = None,
    frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Collectives:
    """All exchanges of a model, by the ``compress`` that the user gave; the rest as in ``ResidualMemory``."""
    if compress is None or compress == BF16:
        return Collectives(DenseExchanges(() if compress is None else (BF16,)))
    if isinstance(compress, OkTopk):
        # Vectors (biases, norms) always travel dense: they are few, and delay hurts them most. So do gradients of
        # more precision than residuals have.
        memory = ResidualMemory(
            lambda kind: density_of(kind) is not None,
            parameters,
            group,
            averaged,
            applied,
            frozen,
            dense_names=[name for name, p in parameters.items() if p.dim() < 2 or p.dtype not in DTYPES],
            warmup_steps=compress.warmup_steps,
            momentum=Momentum(compress.momentum, rounds=compress.wire != "fp32"),
            sample_period=compress.region_period,
        )
        return Collectives(OkTopkExchanges(compress, memory), DenseExchanges(), memory=memory)
    others = [name for name, parameter in parameters.items() if parameter.dtype not in DTYPES]
    if compress not in WITH_RESIDUAL:
        return Collectives(QuantisedExchanges((compress,)), DenseExchanges(), dense_names=others)
    memory = ResidualMemory(WITH_RESIDUAL.__contains__, parameters, group, averaged, applied, frozen)
    quantised = QuantisedExchanges((compress,), memory.begin_exchange)
    return Collectives(quantised, DenseExchanges(), memory=memory, dense_names=others)
