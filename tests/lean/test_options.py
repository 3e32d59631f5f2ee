"""The options of Lean: wrong values are refused when they are given."""

import math
from typing import Any

import pytest
import torch

import anabranch as ab


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"optimizer": 3}, "expected a function"),
        ({"optimizer": torch.optim.SGD, "residuals": "disk"}, "'in place', 'bf16', 'int8'"),
        ({"optimizer": torch.optim.SGD, "clip_norm": 0}, "more than 0"),
        ({"optimizer": torch.optim.SGD, "clip_norm": float("nan")}, "more than 0"),
        ({"optimizer": torch.optim.SGD, "clip_norm": "1"}, "more than 0"),
        ({"optimizer": torch.optim.SGD, "clip_norm": True}, "more than 0"),
        ({"optimizer": torch.optim.SGD, "clip_norm": torch.tensor(1.0)}, "more than 0"),
        ({"optimizer": torch.optim.SGD, "norm_type": math.inf}, "retired; clip_norm is of type 2"),
        ({"optimizer": torch.optim.SGD, "error_if_nonfinite": True}, "is left out: see model.skipped"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ab.Lean(**arguments)


class Custom(torch.optim.SGD):
    """Of a module of its own."""


def test_an_optimizer_that_may_not_be_split() -> None:
    with pytest.raises(ValueError, match="every bucket has its own; such as lambda params: Custom"):
        ab.Lean(Custom([torch.zeros(1)], lr=0.1))
