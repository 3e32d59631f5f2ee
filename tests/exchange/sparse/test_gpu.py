"""On a GPU: the same bits as on the CPU, and never a synchronisation with the host."""

from functools import partial

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.encoding import unframe_messages
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.exchange.sparse.oktopk import exchange, version_for
from anabranch.exchange.sparse.select import unpack
from anabranch.values.kinds.formats import FP32, Sizes
from anabranch.values.kinds.names import Wire
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.worlds import check_step, gradients, states, step
from gpu import ON_GPU, no_waiting

pytestmark = ON_GPU


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_fixed_exchange_never_waits_and_gives_the_same_bits(wire: Wire) -> None:
    ranks, numel, density = 4, 200_000, 0.01
    options = OkTopk(wire=wire, deterministic=True, region_period=3)

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
        with no_waiting():
            step(way, sent, device, world, density)
        for a, b, x, y in zip(made, sent, host, device, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.cpu().nan_to_num(7.0))
            assert torch.equal(x.residual, y.residual.cpu())
            assert torch.equal(x.boundaries, y.boundaries.cpu())


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_kernels_never_wait_and_offer_what_the_twin_offers(wire: Wire) -> None:
    """In the first step residuals, samples and regions are equal; what owners select is sampled in no fixed order."""
    pytest.importorskip("triton")
    from anabranch.exchange.sparse.triton_exchange import triton_exchange

    ranks, numel, density = 4, 1_000_003, 0.01
    options = OkTopk(wire=wire, region_period=3)
    host, world = states(ranks, numel), VirtualWorld(ranks)
    device = [BucketState.of(torch.zeros(numel, device="cuda"), ranks) for _ in range(ranks)]
    for number in range(5):
        made = gradients(ranks, numel, number)
        if number == 3:
            made[1][numel - 1] = float("inf")
        sent = [gradient.cuda() for gradient in made]
        assert version_for(sent[0].device, options) is triton_exchange
        step(partial(fixed_exchange, options=options), made, host, world, density)
        with no_waiting():
            step(partial(exchange, options=options), sent, device, world, density)
        for a, b, x, y in zip(made, sent, host, device, strict=True):
            assert torch.equal(a.isnan(), b.cpu().isnan())
            assert bool(a.isnan().all()) == (number == 3)
            if number == 0:
                assert torch.equal(x.boundaries, y.boundaries.cpu())
                assert x.local_threshold.item() == y.local_threshold.item()
                assert int(x.offered) == int(y.offered)
            if number != 3:
                assert int(y.applied) == pytest.approx(int(x.applied), rel=0.2)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
def test_kernels_lose_nothing(wire: Wire, density: float) -> None:
    pytest.importorskip("triton")
    ranks, numel = 4, 2_000_001
    way = partial(exchange, options=OkTopk(wire=wire, region_period=2))
    device, world = (
        [BucketState.of(torch.zeros(numel, device="cuda"), ranks) for _ in range(ranks)],
        VirtualWorld(ranks),
    )
    for number in range(4):
        check_step(way, [gradient.cuda() for gradient in gradients(ranks, numel, number)], device, world, density)
        assert all(not comm.zeros(numel, torch.device("cuda", 0)).any() for comm in world.comms)
        if density < 1:
            assert all(int(s.offered) == pytest.approx(density * numel, rel=0.2, abs=60) for s in device)


def test_kernels_reach_beyond_two_to_the_31() -> None:
    """One rank of eight, alone: what it offers it also receives, and all of that is applied."""
    pytest.importorskip("triton")
    from anabranch.exchange.sparse.triton_exchange import TritonStep

    numel, ranks = 2**31 + 5000, 8
    gradient, residual = torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")
    positions = torch.tensor([0, 2**28 - 1, 2**31 - 1, 2**31, numel - 1], device="cuda")
    gradient[positions] = torch.arange(1.0, 6.0, device="cuda")
    state = BucketState.of(residual, ranks)
    state.local_threshold.fill_(0.5)
    work = TritonStep(gradient, state, VirtualWorld(ranks).comms[0], Sizes(8, 4, FP32, False))
    work.offer()
    heads, packed = unframe_messages(work.sent, FP32)
    assert int(heads[:, 0].sum()) == 5
    found, values = unpack(packed, state.boundaries)
    assert sorted(found[values != 0].tolist()) == positions.tolist()
    assert float(residual[positions].sum()) == 0
    work.finish(work.sent, 2.0)
    assert gradient[positions].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert not residual.any()
    assert int(gradient.count_nonzero()) == 5
