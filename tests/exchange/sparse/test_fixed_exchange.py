"""The exchange of fixed-size messages never looks at a value from the host."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.virtual import VirtualWork

from anabranch.exchange.communicator import ZeroBuffer
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.values.kinds.names import Wire
from anabranch.values.kinds.options import OkTopk


class Nowhere(ZeroBuffer):
    """A group of four that sends nothing: for tensors without values."""

    rank, size = 1, 4

    def all_to_all(self, *args: object) -> dist.Work:
        return VirtualWork()

    all_gather = all_gather_uneven = all_reduce = all_to_all


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_the_fixed_exchange_never_asks_for_a_value(wire: Wire) -> None:
    """On the meta device a look at a value is an error."""
    meta = torch.device("meta")
    state = BucketState.of(torch.zeros(9000, device=meta), 4)
    options = OkTopk(wire=wire, region_period=2)
    comm: Any = Nowhere()
    for density in (0.01, 0.2, 1.0):
        works = list(fixed_exchange(torch.zeros(9000, device=meta), state, comm, 4.0, density, options))
        assert len(works) in (2, 3)
    assert state.step == 3
