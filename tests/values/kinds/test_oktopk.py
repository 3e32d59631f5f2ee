"""Options of Ok-Topk."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from anabranch.values.kinds.options import OkTopk


def test_density_falls_after_warm_up() -> None:
    options = OkTopk(density=0.01, warmup_steps=10, start_density=0.25, decay_steps=100)
    assert options.density_at(0, 0.01) == 0.25
    assert options.density_at(50, 0.01) == pytest.approx(0.05)
    assert options.density_at(100, 0.01) == options.density_at(9999, 0.01) == 0.01
    assert OkTopk().density_at(0, 0.03) == 0.03


def test_bad_options_are_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"density": 0.0},
        {"density": 2},
        {"start_density": -1},
        {"wire": "fp8"},
        {"region_period": 0},
    ]
    for wrong in bad:
        with pytest.raises(ValueError, match="OkTopk"):
            OkTopk(**wrong)
    with pytest.raises(ValueError, match="capacity_factor"):
        OkTopk(capacity_factor=0.5)


@pytest.mark.parametrize("name", [field.name for field in fields(OkTopk)])
def test_values_of_another_kind_are_refused_by_name(name: str) -> None:
    kinds: list[Any] = ["x", float("nan"), float("inf"), -float("inf"), -1, [], {}, 5j, b"1", torch.tensor(0.5)]
    for odd in kinds if name in ("deterministic", "exact") else [*kinds, True]:
        with pytest.raises(ValueError, match=f"OkTopk {name} is "):
            OkTopk(**{name: odd})


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_that_make_no_sense(share: float) -> None:
    with pytest.raises(ValueError, match="momentum"):
        OkTopk(momentum=share)
