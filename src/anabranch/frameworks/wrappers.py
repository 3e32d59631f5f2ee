"""What integrations share: the wrappers they make, and Lean with the settings of the framework."""

from dataclasses import replace
from typing import Any, Literal

from anabranch.lean.options import Lean
from anabranch.lean.parallel import LeanDataParallel
from anabranch.parallel import DataParallel

Wrapper = DataParallel | LeanDataParallel


def with_clipping(lean: Lean, name: Literal["clip_norm", "clip_value"], limit: float, setting: str) -> Lean:
    """``lean`` with the framework's clipping limit; raises ValueError if Lean names another.

    ``setting`` is what the framework calls it. The framework's own call to clip, after backward, then finds it done.
    """
    if (own := getattr(lean, name)) not in (None, limit):
        raise ValueError(f"{setting} is {limit}, and Lean {name} is {own}: expected the same; leave {name} out")
    clipping: Any = {name: limit}
    return replace(lean, **clipping)
