"""Quantised: what it refuses, and what it stands for."""

from typing import Any

import pytest
import torch

from anabranch import Bucket
from anabranch.exchange.compression import collectives_for, keeps_residuals
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import COMPRESSED
from anabranch.values.kinds.options import Quantised


def test_every_compressed_kind_has_a_format() -> None:
    assert tuple(FORMATS) == COMPRESSED


def test_int4_alone_keeps_a_residual_unless_it_is_said_otherwise() -> None:
    assert {kind: Quantised(kind).keeps_residual for kind in COMPRESSED} == {"bf16": False, "int8": False, "int4": True}
    for kind in COMPRESSED:
        for said in (True, False):
            assert Quantised(kind, residual=said).keeps_residual is said
        assert keeps_residuals(Quantised(kind)) is Quantised(kind).keeps_residual


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "int2"}, "Quantised kind is 'int2': expected one of 'bf16', 'int8', 'int4'"),
        ({"kind": "dense"}, "Quantised kind is 'dense': expected one of"),
        ({"rounding": "stochastic"}, "Quantised rounding is 'stochastic': expected 'nearest', the only one left"),
        ({"residual": 1}, "Quantised residual is 1: expected True, False or None"),
        ({"residual": "yes"}, "Quantised residual is 'yes': expected True, False or None"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantised(**{"kind": "int8", **wrong})


def test_bf16_keeps_no_residual_of_what_it_sends_dense() -> None:
    half = {"weight": torch.zeros(2, 2, dtype=torch.float16)}
    with pytest.raises(
        ValueError, match=r"bf16 with a residual, and weight is torch.float16, .*: leave the residual out"
    ):
        collectives_for(Quantised("bf16", residual=True), half, None, lambda: True)  # type: ignore[arg-type]


def test_kinds_with_a_residual_need_a_memory_and_bf16_takes_any_dtype() -> None:
    plain = QuantisedExchanges()
    assert [kind for kind in (*COMPRESSED, "dense", "zip") if plain.handles(kind)] == ["bf16", "int8"]
    assert plain.kinds == () and QuantisedExchanges((Quantised("int8"),)).kinds == ("int8",)
    assert QuantisedExchanges((Quantised("int4", residual=False),)).handles("int4")
    assert not QuantisedExchanges((Quantised("int8", residual=True),)).handles("int8")
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert [plain.supports("bf16", dtype) for dtype in dtypes] == [True] * 4
    assert [plain.supports("int8", dtype) for dtype in dtypes] == [True, True, True, False]


def test_traffic_is_that_of_two_phases_of_whole_blocks() -> None:
    plain, bucket = QuantisedExchanges(), Bucket(("a",), 0, "bf16")
    region = 256  # a quarter of 1001, in whole blocks of 8
    assert plain.traffic(bucket, 1001, torch.float32, 4) == (2 * 3 * region * 2, 2 * 3 * region * 2, 1.0)
    assert plain.traffic(bucket, 1000, torch.bfloat16, 4).sent_nbytes == 2 * 3 * 256 * 2
    assert plain.traffic(bucket, 1000, torch.float64, 4) == (12000, 12000, 1.0), "dense"
    int8 = plain.traffic(Bucket(("a",), 0, "int8"), 1001, torch.float32, 4)
    assert int8.sent_nbytes == 2 * 3 * (256 + 2 * 2), "with two scales"
