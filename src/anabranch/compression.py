"""What ``compress=`` may be, and the exchanges that it stands for."""

from collections.abc import Callable, Mapping, Sequence

import torch

from anabranch.auto import Auto
from anabranch.comm.collectives import Collectives
from anabranch.comm.dense import COLLECTIVES, DenseExchanges
from anabranch.comm.exchange import Collective, Group
from anabranch.kinds import BF16, COMPRESSED
from anabranch.quantised.block_format import FORMATS
from anabranch.quantised.exchanges import DTYPES, WITH_RESIDUAL, QuantisedExchanges
from anabranch.sparse.exchanges import OkTopkExchanges
from anabranch.sparse.memory import NO_PARAMETERS, ResidualMemory
from anabranch.sparse.momentum import Momentum
from anabranch.sparse.naming import LADDER as DENSITIES
from anabranch.sparse.naming import density_of, kind_of
from anabranch.sparse.options import OkTopk
from anabranch.sparse.residual_flush import Applied

Compress = str | Sequence[str] | OkTopk | Auto | None  # what a user may give
Settings = str | OkTopk | Auto | None  # the same, with "auto" and lists spelt out


def checked_compress(compress: object) -> Settings:
    """What ``DataParallel(compress=...)`` was given; ValueError if it is nothing of that kind."""
    if compress == "auto":
        return Auto()
    if isinstance(compress, list | tuple):
        return Auto(kinds=compress)
    if compress is None or isinstance(compress, OkTopk | Auto) or compress in COMPRESSED:
        return compress
    raise ValueError(
        f"compress is {compress!r}: expected one of {', '.join(COMPRESSED)}, auto, a list of kinds, Auto(...), "
        "OkTopk(...), or None"
    )


def keeps_residuals(compress: Settings) -> bool:
    """Whether what is not sent in a step is kept for the next one."""
    return any(keeps_residual(kind) for kind in kinds_of(compress))


def keeps_residual(kind: str) -> bool:
    """Whether a bucket of this kind has a residual."""
    return kind in WITH_RESIDUAL or density_of(kind) is not None


def kinds_of(compress: Settings) -> tuple[str, ...]:
    """The kinds of exchange that plans may choose from, beside dense ones."""
    if compress is None:
        return ()
    if isinstance(compress, Auto):
        return tuple(compress.kinds)
    if isinstance(compress, OkTopk):
        densities = DENSITIES if compress.density == "auto" else [compress.density]
        return tuple(kind_of(float(density)) for density in densities)
    return (compress,)


def probe_of(kind: str) -> Collective:
    """An exchange for timing, of a kind that sends every element."""
    return COLLECTIVES[kind] if kind in COLLECTIVES else QuantisedExchanges((kind,)).probe(kind)


def collectives_for(
    compress: Settings,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    averaged: Callable[[], bool],
    applied: Applied | None = None,
    frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Collectives:
    """All exchanges of a model, by the ``compress`` that the user gave; the rest as in ``ResidualMemory``."""
    kinds = kinds_of(compress)
    sparse = tuple(kind for kind in kinds if density_of(kind) is not None)
    rounded = tuple(kind for kind in kinds if kind in FORMATS)
    dense = DenseExchanges(tuple(kind for kind in kinds if kind == BF16))
    others = [name for name, parameter in parameters.items() if parameter.dtype not in DTYPES]
    # Vectors (biases, norms) never travel sparse: they are few, and delay hurts them most.
    vectors = [name for name, p in parameters.items() if p.dim() < 2 or p.dtype != torch.float32]
    excluded = {kind: vectors if kind in sparse else others for kind in kinds}
    if not keeps_residuals(compress):
        return Collectives(QuantisedExchanges(rounded), dense, excluded=excluded)
    options = compress.oktopk if isinstance(compress, Auto) else compress if isinstance(compress, OkTopk) else OkTopk()
    memory = ResidualMemory(
        keeps_residual,
        parameters,
        group,
        averaged,
        applied,
        frozen,
        warmup_steps=options.warmup_steps if sparse else 0,
        momentum=Momentum(options.momentum, rounds=options.wire != "fp32"),
        sample_period=options.region_period,
    )
    quantised = QuantisedExchanges(rounded, memory.begin_exchange)
    return Collectives(quantised, OkTopkExchanges(sparse, options, memory), dense, memory=memory, excluded=excluded)
