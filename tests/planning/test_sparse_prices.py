"""Prices of sparse exchanges: their messages are those that virtual ranks count, and links price them as any."""

from dataclasses import replace

import pytest

from anabranch import Curve, Network, NetworkError
from anabranch.exchange.sparse.fixed import fixed_exchange
from anabranch.planning.prices import NOTHING, Computing, Phase, travel_s
from anabranch.planning.sparse_prices import H200, exchange_of, phases
from anabranch.tools.bench.virtual import VirtualWorld
from anabranch.values.kinds.formats import ENTRY_NBYTES
from anabranch.values.kinds.names import Wire, kind_of
from anabranch.values.kinds.options import OkTopk
from anabranch.values.links import AlphaBeta, TwoLevel
from exchange.sparse.worlds import gradients, states

DENSITY = 0.01
PRECISIONS: list[Wire] = ["fp32", "bf16", "int8"]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("ranks", "numel"), [(2, 40_000), (3, 40_000), (4, 39_999), (16, 20_000), (64, 20_000), (128, 5_000)]
)
def test_the_formula_is_what_virtual_ranks_count(ranks: int, numel: int, wire: Wire) -> None:
    options = OkTopk(region_period=2, wire=wire)
    held, world = states(ranks, numel), VirtualWorld(ranks)

    def exchanged() -> set[str]:
        world.byte_counts.clear()
        given = gradients(ranks, numel, held[0].step)
        world.run([
            fixed_exchange(gradient, state, comm, float(ranks), DENSITY, options)
            for gradient, state, comm in zip(given, held, world.comms, strict=True)
        ])  # fmt: skip
        return set(world.byte_counts.phases)

    told = phases(numel, ranks, DENSITY, options)
    assert exchanged() == set(told)
    for name, phase in told.items():
        share = options.region_period if name == "regions" else 1  # which this step has, and every second has not
        assert world.byte_counts.sent([name]).tolist() == pytest.approx([share * phase.sent_nbytes] * ranks)
        assert world.byte_counts.received([name]).tolist() == pytest.approx([share * phase.sent_nbytes] * ranks)
        assert world.byte_counts.messages([name]).tolist() == pytest.approx([share * phase.messages] * ranks)
    assert exchanged() == set(told) - {"regions"}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 256, 1024, 2048])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_at_any_number_of_ranks_it_is_under_three_k_entries(wire: Wire, ranks: int) -> None:
    numel = 25_000_000
    nbytes = sum(phase.sent_nbytes for phase in phases(numel, ranks, DENSITY, OkTopk(wire=wire)).values())
    entries = nbytes / ENTRY_NBYTES[wire] / (DENSITY * numel) / ((ranks - 1) / ranks)
    assert 2 < entries <= (3 if ranks <= 1024 else 3.1)


def test_at_density_one_regions_are_never_balanced() -> None:
    assert phases(1000, 4, 1.0)["regions"].sent_nbytes == 0


def test_messages_pay_latency_and_bytes_pay_bandwidth() -> None:
    ring = AlphaBeta("ring", 1e-5, 1e-9)
    assert travel_s(Phase(3, 1000.0, ring=False), ring, 4) == pytest.approx(3 * 1e-5 + 3000 * 1e-9)


def test_ranks_of_a_node_share_its_card() -> None:
    fast, slow = AlphaBeta("ring", 1e-6, 1e-11), AlphaBeta("ring", 1e-5, 1e-9)
    links = TwoLevel(4, fast, slow)
    everyone, around = Phase(7, 1000.0, ring=False), Phase(7, 1000.0, ring=True)
    assert travel_s(everyone, links, 8) == pytest.approx(3 * (1e-6 + 1e-8) + 4 * (1e-5 + 4 * 1e-6))
    assert travel_s(around, links, 8) == pytest.approx(7 * (1e-5 + 1e-6))
    assert travel_s(Phase(3, 1000.0, ring=False), links, 4) == pytest.approx(3 * (1e-6 + 1e-8))


def test_a_large_bucket_costs_what_its_bytes_cost() -> None:
    """110 M elements at 1 % on 4 ranks of 10 Gbit/s: 2 · 3 messages of 2.75 MB, and nearly a millisecond to select."""
    here = exchange_of(DENSITY).priced(Network.ring(4, 30e-6, 8e-10))
    took = here.seconds("oktopk:0.01", 440_000_000)
    assert took == pytest.approx(6 * (30e-6 + 2.75e6 * 8e-10) + 916e-6, rel=0.01)
    assert took < here.allreduce_s(440_000_000) / 30


def test_it_grows_with_ranks_by_latency_alone() -> None:
    messages = replace(exchange_of(DENSITY), computing=NOTHING)
    free = [messages.curve(Network.ring(ranks, 0.0, 8e-10)).seconds(1 << 28) for ranks in (64, 2048)]
    assert free[1] == pytest.approx(free[0], rel=0.05)
    dear = [messages.curve(Network.ring(ranks, 1e-5, 0.0)).seconds(1 << 28) for ranks in (64, 2048)]
    assert dear[1] / dear[0] == pytest.approx(2047 / 63)


def test_one_rank_sends_nothing() -> None:
    here = exchange_of(DENSITY).priced(Network.ring(1, 1e-5, 1e-9))
    assert here.seconds("oktopk:0.01", 1 << 20) == 0


def test_what_was_measured_stays_and_other_densities_join_it() -> None:
    network = Network(4, {"dense": Curve.linear(1e-3, 1e-9), "oktopk:0.01": Curve.linear(5e-3, 1e-10)})
    here = exchange_of(0.02).priced(exchange_of(0.01).priced(network))
    assert here.curve("oktopk:0.01") == Curve.linear(5e-3, 1e-10) and "oktopk:0.02" in here.curves
    assert here.curve("dense") == network.curve("dense")
    with pytest.raises(NetworkError, match=r"oktopk:0\.02"):
        network.seconds("oktopk:0.02", 1)


def test_selection_is_what_a_measured_exchange_takes_beyond_its_messages() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]
    made = replace(exchange_of(DENSITY), computing=Computing(3e-4, 2e-11, "")).curve(ring)
    measured = Network.measured(8, {
        "dense": [(size, ring.allreduce_s(size)) for size in sizes],
        "oktopk:0.01": [(size, made.seconds(size)) for size in sizes],
        "oktopk:0.2": [(size, 1.0 + size) for size in sizes],
    })  # fmt: skip
    found = exchange_of(0.02, measured).computing
    assert found.start_s == pytest.approx(3e-4, rel=0.01) and found.s_per_byte == pytest.approx(2e-11, rel=0.01)
    assert "oktopk:0.01" in found.source and "8 ranks" in found.source
    carried = replace(exchange_of(DENSITY), computing=found)
    far = carried.priced(measured.at(64)).seconds("oktopk:0.01", 1 << 26)
    assert far == pytest.approx(carried.curve(Network.ring(64, 2e-5, 8e-10)).seconds(1 << 26), rel=0.01)


def test_without_a_measured_exchange_selection_is_an_h200s() -> None:
    assert exchange_of(DENSITY, Network.ring(4, 1e-5, 1e-9)).computing is H200["fp32"]
    one_point = Network(4, {"dense": Curve.linear(0.0, 1e-9), "oktopk:0.01": Curve.linear(1e-3, 0.0)})
    assert exchange_of(DENSITY, one_point).computing is H200["fp32"]


def test_a_smaller_wire_costs_less() -> None:
    ring = Network.ring(4, 0.0, 8e-10)
    whole, half, least = (
        replace(exchange_of(DENSITY, options=OkTopk(wire=wire)), computing=NOTHING)
        .priced(ring)
        .seconds(kind_of(DENSITY, wire), 440_000_000)
        for wire in PRECISIONS
    )
    assert half / whole == pytest.approx(4 / 8, rel=0.01) and least / whole == pytest.approx(3 / 8, rel=0.05)


def test_selection_is_taken_from_the_same_wire_where_that_was_measured_and_else_from_another() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]

    def took(wire: Wire, start_s: float) -> list[tuple[int, float]]:
        made = replace(exchange_of(DENSITY, options=OkTopk(wire=wire)), computing=Computing(start_s, 2e-11, ""))
        return [(size, made.curve(ring).seconds(size)) for size in sizes]

    dense = [(size, ring.allreduce_s(size)) for size in sizes]
    curves = {"dense": dense, "oktopk:0.01": took("fp32", 3e-4), "oktopk:0.01:bf16": took("bf16", 5e-4)}
    measured = Network.measured(8, curves)
    starts = {wire: exchange_of(0.02, measured, OkTopk(wire=wire)).computing.start_s for wire in PRECISIONS}
    assert starts["fp32"] == pytest.approx(3e-4, rel=0.01) and starts["bf16"] == pytest.approx(5e-4, rel=0.01)
    assert starts["int8"] in (starts["fp32"], starts["bf16"])
    assert exchange_of(DENSITY, measured, OkTopk(wire="bf16")).priced(measured) == measured
