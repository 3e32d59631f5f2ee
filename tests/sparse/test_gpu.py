"""On a GPU: the same bits as on the CPU, and not one wait for the host."""

import pytest
import torch

from anabranch.sparse.fixed import fixed_exchange
from anabranch.sparse.options import OkTopk
from anabranch.sparse.state import BucketState
from anabranch.sparse.virtual import VirtualWorld
from sparse.worlds import gradients, states, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_fixed_exchange_never_waits_and_gives_the_same_bits(wire: str) -> None:
    ranks, numel, density = 4, 200_000, 0.01
    options = OkTopk(wire="bf16" if wire == "bf16" else "fp32", deterministic=True, region_period=3)

    def way(gradient, state, comm, divisor, density):  # type: ignore[no-untyped-def]
        return fixed_exchange(gradient, state, comm, divisor, density, options)

    host, world = states(ranks, numel), VirtualWorld(ranks)
    device = [BucketState.of(torch.zeros(numel, device="cuda"), ranks) for _ in range(ranks)]
    for number in range(7):
        made = gradients(ranks, numel, number)
        if number == 4:
            made[1][5] = float("inf")
        sent = [gradient.cuda() for gradient in made]
        step(way, made, host, world, density)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(way, sent, device, world, density)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b, x, y in zip(made, sent, host, device, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.cpu().nan_to_num(7.0))
            assert torch.equal(x.residual, y.residual.cpu())
            assert torch.equal(x.boundaries, y.boundaries.cpu())
