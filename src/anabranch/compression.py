"""What ``compress=`` may be, and the exchanges that it stands for."""

from collections.abc import Callable, Iterable, Mapping

import torch

from anabranch.comm.collectives import Collectives
from anabranch.comm.dense import DenseExchanges, dense
from anabranch.comm.exchange import Collective, Group
from anabranch.kinds import COMPRESSED, DENSE
from anabranch.quantised.exchanges import DTYPES, QuantisedExchanges, options_by_kind, sent_dense
from anabranch.quantised.options import Quantised
from anabranch.sparse.exchanges import OkTopkExchanges
from anabranch.sparse.memory import NO_PARAMETERS, ResidualMemory
from anabranch.sparse.momentum import Momentum
from anabranch.sparse.naming import density_of
from anabranch.sparse.options import OkTopk
from anabranch.sparse.residual_flush import Applied

Compress = str | Quantised | OkTopk | None


def check_compress(compress: object) -> None:
    """ValueError unless ``DataParallel(compress=...)`` can take this."""
    if compress is not None and not isinstance(compress, Quantised | OkTopk) and compress not in COMPRESSED:
        kinds = ", ".join(COMPRESSED)
        raise ValueError(f"compress is {compress!r}: expected one of {kinds}, Quantised(...), OkTopk(...), or None")


def keeps_residuals(compress: Compress) -> bool:
    """Whether what is not sent in a step is kept for the next one."""
    return isinstance(compress, OkTopk) or any(one.keeps_residual for one in _quantised(compress))


def probe_of(kind: str) -> Collective:
    """An exchange for timing, of a kind that sends every element."""
    return dense if kind == DENSE else QuantisedExchanges().probe(kind)


def collectives_for(
    compress: Compress,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    averaged: Callable[[], bool],
    applied: Applied | None = None,
    frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Collectives:
    """All exchanges of a model, by the ``compress`` that the user gave; the rest as in ``ResidualMemory``.

    Whatever it is, a given plan may name bf16 and int8, which need no memory; so may a search while Ok-Topk warms up.
    """
    if isinstance(compress, OkTopk):
        # Vectors (biases, norms) always travel dense: they are few, and delay hurts them most. So do gradients that
        # are not float32, since residuals are.
        memory = ResidualMemory(
            lambda kind: density_of(kind) is not None,
            parameters,
            group,
            averaged,
            applied,
            frozen,
            dense_names=[name for name, p in parameters.items() if p.dim() < 2 or p.dtype != torch.float32],
            warmup_steps=compress.warmup_steps,
            momentum=Momentum(compress.momentum, rounds=compress.wire != "fp32"),
            sample_period=compress.region_period,
        )
        return Collectives(OkTopkExchanges(compress, memory), QuantisedExchanges(), DenseExchanges(), memory=memory)
    given = _quantised(compress)
    others = [name for name, parameter in parameters.items() if parameter.dtype not in DTYPES]
    if not keeps_residuals(compress):
        return Collectives(QuantisedExchanges(given), DenseExchanges(), dense_names=others)
    _check_residual_dtypes(given, parameters)
    options = options_by_kind(given)
    memory = ResidualMemory(
        lambda kind: kind in options and options[kind].keeps_residual, parameters, group, averaged, applied, frozen
    )
    quantised = QuantisedExchanges(given, memory.begin_exchange)
    return Collectives(quantised, DenseExchanges(), memory=memory, dense_names=others)


def _quantised(compress: Compress) -> tuple[Quantised, ...]:
    """The options of the kind that ``compress`` quantises to; "int8" is short for Quantised("int8")."""
    if compress is None or isinstance(compress, OkTopk):
        return ()
    return (compress if isinstance(compress, Quantised) else Quantised(compress),)


def _check_residual_dtypes(given: Iterable[Quantised], parameters: Mapping[str, torch.Tensor]) -> None:
    """ValueError if a kind with a residual would send a gradient dense, and so never send its residual."""
    for one in given:
        for name, parameter in parameters.items():
            if one.keeps_residual and sent_dense(one.kind, parameter.dtype):
                raise ValueError(
                    f"Quantised {one.kind} with a residual, and {name} is {parameter.dtype}, which {one.kind} sends "
                    "dense: expected float32 or bfloat16: leave the residual out, or use int8"
                )
