"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter.

Import this before anything that imports Triton. Triton decides when it is imported, by the environment, whether it
interprets.
"""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

__all__ = ["DEVICE", "triton_exchange", "use_small_blocks"]

if find_spec("triton") is None:
    pytest.skip("needs Triton: pip install 'anabranch[dev]'", allow_module_level=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
    pytest.skip("needs a GPU, or Triton 3.9: older interpreters fail under numpy 2.4", allow_module_level=True)
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "Triton was imported before TRITON_INTERPRET was set"
    os.environ["TRITON_INTERPRET"] = "1"

from anabranch.exchange.sparse import triton_exchange  # noqa: E402 (after the environment is set)


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that few elements need many programs."""
    monkeypatch.setattr(triton_exchange, "BLOCK", 1024)
    monkeypatch.setattr(triton_exchange, "PAIRS", 128)
    monkeypatch.setattr(triton_exchange, "CHUNK", 2048)
