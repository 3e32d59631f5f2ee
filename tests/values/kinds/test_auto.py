"""Auto: which kinds it allows, and what it refuses."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from anabranch import Auto, OkTopk, Quantised
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import Settings, collectives_for, keeps_residuals, kinds_of, settings_of
from anabranch.values.kinds.fidelity import LADDER
from anabranch.values.kinds.names import two_level


def test_auto_allows_what_costs_no_learning_and_bounds_change_that() -> None:
    assert Auto().kinds == ("bf16", "int8", "int4")
    assert Auto(at_least="oktopk:0.01").kinds == LADDER[1:]
    assert Auto(at_least="int8").kinds == ("bf16", "int8")
    assert Auto(at_least="oktopk:0.05").kinds == ("bf16", "int8", "int4", "oktopk:0.1", "oktopk:0.05")
    assert Auto(at_least="dense").kinds == ()
    assert Auto(kinds=["oktopk:0.3", "int8", "dense", "int8"]).kinds == ("int8", "oktopk:0.3")
    assert Auto(kinds=["int4", "bf16"], at_least="int8").kinds == ("bf16",)
    assert Auto(kinds=[]).kinds == ()


def test_what_compress_may_be() -> None:
    assert settings_of("auto") == Auto()
    assert settings_of(["int8", "bf16"]) == Auto(kinds=["bf16", "int8"])
    for kind in ("bf16", "int8", "int4"):
        assert settings_of(kind) == Quantised(kind)
    for same in (None, Quantised("int8", residual=True), OkTopk(0.1), Auto(at_least="int4")):
        assert settings_of(same) is same
    for wrong in ("int3", "dense", "oktopk:0.01", 8, True, {"int8"}):
        with pytest.raises(ValueError, match=rf"compress is {re.escape(repr(wrong))}: expected one of bf16, int8"):
            settings_of(wrong)


def test_residuals_are_kept_where_some_kind_needs_them() -> None:
    for without in (None, Quantised("int8"), Quantised("int4", residual=False), Auto(at_least="int8")):
        assert not keeps_residuals(without)
    for kept in (Quantised("int4"), Quantised("int8", residual=True), OkTopk(), Auto()):
        assert keeps_residuals(kept)
    assert kinds_of(OkTopk(0.03)) == ("oktopk:0.03",) and len(kinds_of(OkTopk())) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_least": "int9"}, "no kind of exchange is called 'int9': expected one of dense, bf16"),
        ({"kinds": ["int8", "zip"]}, "no kind of exchange is called 'zip'"),
        ({"kinds": "int8"}, "Auto kinds is 'int8': expected a list of kinds"),
        ({"kinds": [8]}, r"Auto kinds is \[8\]: expected a list of kinds"),
        ({"oktopk": 0.01}, r"Auto oktopk is 0\.01: expected OkTopk"),
        ({"oktopk": OkTopk(momentum=0.9)}, r"Auto oktopk has momentum 0\.9: expected 0"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(**options)  # type: ignore[arg-type]


def made(settings: Settings) -> Collectives:
    parameters = {"weight": torch.zeros(4, 4), "half": torch.zeros(4, 4, dtype=torch.float16), "bias": torch.zeros(4)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        assert group is not None
        return collectives_for(settings, parameters, group, lambda: True)
    finally:
        dist.destroy_process_group()


def test_plans_that_send_less_occupy_fewer_multiprocessors() -> None:
    assert made(None).max_ctas is None
    for little in (Quantised("int8"), Quantised("int4"), OkTopk(0.01)):
        assert made(little).max_ctas == 1
    for more in (Quantised("bf16"), Auto(), Auto(kinds=["int8"])):
        assert made(more).max_ctas == 2


def test_what_each_kind_must_not_carry() -> None:
    excluded = made(Auto(kinds=["bf16", "int8", "oktopk:0.01"])).excluded
    # bf16 would send float16 dense
    flat = {"bf16": {"half"}, "int8": frozenset(), "oktopk:0.01": {"bias"}}
    assert excluded == {**flat, **{two_level(kind): names for kind, names in flat.items()}, "dense@nodes": frozenset()}
