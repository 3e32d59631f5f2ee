"""What ``compress=`` may be, and the exchanges that it stands for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch

from anabranch.exchange.collectives import Collectives
from anabranch.exchange.communicator import Communicators
from anabranch.exchange.dense import DenseExchanges, dense
from anabranch.exchange.interface import DTYPES, Collective, Group
from anabranch.exchange.quantised.exchange import QuantisedExchanges, options_by_kind, sent_dense
from anabranch.exchange.residuals.store import NO_PARAMETERS, Applied, Residuals
from anabranch.exchange.sparse.oktopk import OkTopkExchanges
from anabranch.exchange.sparse.oktopk import probe_of as sparse_probe_of
from anabranch.exchange.two_level import supports as supports_two_levels
from anabranch.values.kinds.formats import BlockFormat
from anabranch.values.kinds.names import (
    COMPRESSED,
    DENSE,
    DENSITIES,
    between_nodes,
    density_of,
    kind_of,
    split_wire,
    two_level,
)
from anabranch.values.kinds.options import Auto, OkTopk, Quantised

Compress = str | Sequence[str] | Quantised | OkTopk | Auto | None  # what a user may give
Settings = Quantised | OkTopk | Auto | None  # the same, with names and lists spelt out


def settings_of(compress: object) -> Settings:
    """What ``DataParallel(compress=...)`` was given, spelt out; ValueError if it is none of these."""
    if compress is None or isinstance(compress, Quantised | OkTopk | Auto):
        return compress
    if isinstance(compress, list | tuple):
        return Auto(kinds=compress)
    if compress == "auto":
        return Auto()
    if isinstance(compress, str) and compress in COMPRESSED:
        return Quantised(compress)
    raise ValueError(
        f"compress is {compress!r}: expected one of {', '.join(COMPRESSED)}, auto, a list of kinds, Quantised(...), "
        "OkTopk(...), Auto(...), or None"
    )


def name_of(settings: Settings) -> str:
    """What a user would write, without details."""
    return repr(settings.kind) if _is_plain(settings) else f"{type(settings).__name__}(...)"


def described(settings: Settings) -> str:
    """A line that must be the same on all ranks, and in the key of a cached plan."""
    return f"compress {settings.kind if _is_plain(settings) else settings}"


def keeps_residuals(settings: Settings) -> bool:
    """Whether what is not sent in a step is kept for the next one."""
    return any(keeps_residual(settings, kind) for kind in kinds_of(settings))


def keeps_residual(settings: Settings, kind: str) -> bool:
    """Whether a bucket of this kind has a residual."""
    options = options_by_kind(_quantised(settings)).get(between_nodes(kind))
    return options.keeps_residual if options is not None else density_of(kind) is not None


def kinds_of(settings: Settings) -> tuple[str, ...]:
    """The kinds of exchange that plans may choose from, in addition to dense ones."""
    if isinstance(settings, Auto):
        return tuple(settings.kinds or ())
    if isinstance(settings, OkTopk):
        densities = DENSITIES if settings.density == "auto" else [settings.density]
        return tuple(kind_of(float(density)) for density in densities)
    return () if settings is None else (settings.kind,)


def may_be_sparse(parameter: torch.Tensor) -> bool:
    """Whether a gradient may be sent sparsely: vectors (biases, norms) are few, and delay hurts them most."""
    return parameter.dim() > 1 and parameter.dtype in DTYPES


def probe_of(kind: str) -> Collective:
    """An exchange for timing, such as "int8" or "oktopk:0.01"; a wire may follow, as in "oktopk:0.01:bf16".

    Of a two-level kind it is that between nodes.
    """
    plain, wire = split_wire(between_nodes(kind))
    if (density := density_of(plain)) is not None:
        return sparse_probe_of(density, OkTopk(wire=wire), Communicators())
    return dense if plain == DENSE else QuantisedExchanges().probe(plain)


def collectives_for(
    settings: Settings,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    averaged: Callable[[], bool],
    applied: Applied | None = None,
    frozen: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    skipped: Callable[[], bool] | None = None,
    form: BlockFormat | None = None,
) -> Collectives:
    """All exchanges of a model, by the ``compress`` that the user gave; the rest as in ``Residuals``.

    Whatever it is, a given plan may name bf16 and int8, which need no memory; so may a search while Ok-Topk warms up.
    """
    kinds = kinds_of(settings)
    sparse = tuple(kind for kind in kinds if density_of(kind) is not None)
    rounded = _quantised(settings)
    excluded = {name: _excluded(kind, parameters) for kind in kinds for name in (kind, two_level(kind))}
    excluded[two_level(DENSE)] = [name for name, given in parameters.items() if not supports_two_levels(given.dtype)]
    mixes = isinstance(settings, Auto) or len(kinds) > 1
    if not keeps_residuals(settings):
        return Collectives(QuantisedExchanges(rounded), DenseExchanges(), excluded=excluded, mixes=mixes)
    _check_residual_dtypes(rounded, parameters)
    options = settings if isinstance(settings, OkTopk) else settings.oktopk if isinstance(settings, Auto) else OkTopk()
    residuals = Residuals(
        partial(keeps_residual, settings),
        parameters,
        group,
        averaged,
        applied,
        frozen,
        warmup_steps=options.warmup_steps if sparse else 0,
        momentum=options.momentum,
        skipped=skipped,
        form=form,
    )
    families = [OkTopkExchanges(sparse, options, residuals)] if sparse else []
    quantised = QuantisedExchanges(rounded, residuals.bucket_state)
    return Collectives(*families, quantised, DenseExchanges(), residuals=residuals, excluded=excluded, mixes=mixes)


def _is_plain(settings: Settings) -> TypeGuard[Quantised]:
    """Whether a kind's name says it all."""
    return isinstance(settings, Quantised) and settings == Quantised(settings.kind)


def _quantised(settings: Settings) -> tuple[Quantised, ...]:
    """The options of the kinds that send every element, rounded."""
    if isinstance(settings, Quantised):
        return (settings,)
    return tuple(Quantised(kind) for kind in kinds_of(settings) if kind in COMPRESSED)


def _excluded(kind: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters whose gradients must not travel by this kind; those wider than float32 travel dense."""

    def may_use(parameter: torch.Tensor) -> bool:
        if density_of(kind) is not None:
            return may_be_sparse(parameter)
        return parameter.dtype in DTYPES and not sent_dense(kind, parameter.dtype)

    return [name for name, parameter in parameters.items() if not may_use(parameter)]


def _check_residual_dtypes(given: Iterable[Quantised], parameters: Mapping[str, torch.Tensor]) -> None:
    """ValueError if a kind with a residual would send a gradient dense, and so never send its residual."""
    for one in given:
        for name, parameter in parameters.items():
            if one.keeps_residual and sent_dense(one.kind, parameter.dtype):
                raise ValueError(
                    f"Quantised {one.kind} with a residual, and {name} is {parameter.dtype}, which {one.kind} sends "
                    "dense: expected float32 or bfloat16: leave the residual out, or use int8"
                )
