"""What tests on a GPU share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error in here."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
