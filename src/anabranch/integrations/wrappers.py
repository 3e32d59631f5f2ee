"""What integrations share: the wrappers they make, and Lean with the settings of the framework."""

from dataclasses import replace

from anabranch.lean.options import Lean
from anabranch.lean_parallel import LeanDataParallel
from anabranch.parallel import DataParallel

Wrapper = DataParallel | LeanDataParallel


def with_clip_norm(lean: Lean, clip_norm: float, setting: str) -> Lean:
    """The same with the norm to which the framework clips; raises ValueError if Lean names another.

    ``setting`` is what the framework calls it. The framework's own call to clip, after backward, then returns the norm.
    """
    if lean.clip_norm not in (None, clip_norm):
        raise ValueError(
            f"{setting} is {clip_norm}, and Lean clip_norm is {lean.clip_norm}: expected the same; leave clip_norm out"
        )
    return replace(lean, clip_norm=clip_norm)
