"""Prices of exchanges: their messages are those that virtual ranks count, and links price them as any."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from benchmarks.virtual import VirtualWorld
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Curve, Network, NetworkError
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.planning.prices import (
    NOTHING,
    QUANTISED_ON_H200,
    SPARSE_ON_H200,
    Computing,
    Exchange,
    Phase,
    quantised_exchange,
    quantised_phases,
    sparse_exchange,
    sparse_phases,
    travel_s,
    with_nodes,
)
from anabranch.values.kinds.formats import ENTRY_NBYTES, FINITE, FORMATS, NUMBER_NBYTES
from anabranch.values.kinds.names import COMPRESSED, WIRES, Wire, kind_of
from anabranch.values.kinds.options import OkTopk
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import InsideNodes
from exchange.quantised.worlds import gradients, step
from exchange.sparse import worlds as sparse_worlds

RING, MIB = AlphaBeta("ring", 1e-5, 1e-9), 2**20
EACH = pytest.mark.parametrize("kind", COMPRESSED)


def messages_of(kind: str) -> Exchange:
    """The exchange, if it computed nothing."""
    return replace(quantised_exchange(kind), computing=NOTHING)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("ranks", "numel"), [(2, 4096), (3, 5000), (4, 129), (16, 20_000)])
def test_the_formula_is_what_virtual_ranks_count(kind: str, ranks: int, numel: int) -> None:
    counts = step(gradients(ranks, numel, seed=1), None, FORMATS[kind]).byte_counts
    split, gather = quantised_phases(kind, numel, ranks)
    for name, phase in (("split", split), ("gather", gather)):
        assert counts.sent([name]).tolist() == pytest.approx([phase.sent_nbytes] * ranks)
        assert counts.messages([name]).tolist() == [phase.messages] * ranks
    sent = quantised_exchange(kind).sent_nbytes(numel, ranks)
    assert sent == round(split.sent_nbytes + gather.sent_nbytes)


def test_sizes_need_no_torch_and_are_torchs() -> None:
    assert torch.finfo(torch.float32).max == FINITE and torch.bfloat16.itemsize == NUMBER_NBYTES


@pytest.mark.parametrize(
    ("kind", "ranks", "message_nbytes"),
    [
        ("bf16", 2, 1024 * 2),
        ("int8", 2, 1024 + 8 * 2),  # 8 blocks of 128, each with a scale
        ("int4", 2, 1024 // 2 + 16 * 2),  # 16 blocks of 64
        ("bf16", 4, 512 * 2),
        ("int8", 4, 512 + 4 * 2),
        ("int4", 4, 512 // 2 + 8 * 2),
    ],
)
def test_a_small_bucket_by_hand(kind: str, ranks: int, message_nbytes: int) -> None:
    """2048 values: every rank sends every other one a message of 1/P of them, and then again."""
    assert quantised_phases(kind, 2048, ranks)[0].nbytes == message_nbytes
    by_hand = 2 * (ranks - 1) * (1e-5 + message_nbytes * 1e-9)
    assert messages_of(kind).seconds(4 * 2048, RING, ranks) == pytest.approx(by_hand)
    computing_s = QUANTISED_ON_H200[kind].s_per_byte * 4 * 2048
    assert quantised_exchange(kind).seconds(4 * 2048, RING, ranks) == pytest.approx(by_hand + computing_s)


def test_three_passes_of_an_h200_are_counted() -> None:
    assert QUANTISED_ON_H200["int8"].seconds(440e6) == pytest.approx(0.497e-3)
    assert QUANTISED_ON_H200["int4"].seconds(440e6) == pytest.approx(1.579e-3)


@EACH
@pytest.mark.parametrize("ranks", [2, 4, 64, 2048])
def test_a_longer_message_and_a_slower_link_never_cost_less(kind: str, ranks: int) -> None:
    exchange = quantised_exchange(kind)
    for network in (Network.ring(ranks, 1e-5, 1e-9), Network.two_level(ranks, 8, RING, replace(RING, alpha_s=1e-4))):
        for one in (exchange, exchange.between_nodes()):
            costs = [point.seconds for point in one.curve(network).points]
            assert costs == sorted(costs)
            has_others = not (one.two_level and isinstance(network.model, TwoLevel)) or ranks > 8
            assert (costs[0] > 0) == has_others  # in one node nothing is exchanged between nodes
    rates = [exchange.curve(Network.ring(ranks, 1e-5, beta)).seconds(64 * MIB) for beta in (1e-10, 1e-9, 1e-8)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_fewer_bits_cost_less_where_the_wire_is_the_limit() -> None:
    network = Network.ring(4, 3e-5, 8e-10)
    costs = [network.allreduce_s(100 * MIB)]
    costs += [quantised_exchange(kind).curve(network).seconds(100 * MIB) for kind in COMPRESSED]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] / costs[2] == pytest.approx(32 / 8.125, rel=0.02)  # int8 sends 8.125 bits a value


def test_one_rank_sends_nothing() -> None:
    assert quantised_exchange("int8").priced(Network.ring(1, 1e-5, 1e-9)).seconds("int8", MIB) == 0


def test_what_was_measured_wins_at_its_own_world_size_and_tells_what_is_computed_elsewhere() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]
    slow = replace(quantised_exchange("int8"), computing=Computing(3e-4, 2e-11, "")).curve(ring)
    measured = Network.measured(8, {
        "dense": [(size, ring.allreduce_s(size)) for size in sizes],
        "int8": [(size, slow.seconds(size)) for size in sizes],
    })  # fmt: skip
    found = quantised_exchange("int8", measured)
    assert found.priced(measured).curve("int8") == measured.curve("int8")
    assert found.computing.start_s == pytest.approx(3e-4, rel=0.01)
    assert found.computing.s_per_byte == pytest.approx(2e-11, rel=0.01) and "8 ranks" in found.computing.source
    assert found.priced(measured.at(64)).seconds("int8", MIB) > 3e-4 > quantised_exchange("int8").computing.start_s
    assert quantised_exchange("int4", measured).computing is QUANTISED_ON_H200["int4"]


# ------------------------------------------------------------------------------------------------------- two levels

FAST, SLOW = AlphaBeta("ring", 1e-6, 1e-11), AlphaBeta("ring", 1e-5, 1e-9)
EXCHANGES: list[Callable[[], Exchange]] = [
    *(lambda kind=kind: quantised_exchange(kind) for kind in COMPRESSED),
    lambda: sparse_exchange(0.01),
]


@pytest.mark.parametrize("made", EXCHANGES)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_between_nodes_of_one_rank_it_is_the_plain_exchange(made: Callable[[], Exchange], ranks: int) -> None:
    exchange = made()
    apart = exchange.between_nodes()
    for nbytes in (1000, MIB, 100 * MIB):
        flat_s = exchange.seconds(nbytes, SLOW, ranks)
        assert apart.seconds(nbytes, TwoLevel(1, FAST, SLOW), ranks) == pytest.approx(flat_s)
        assert exchange.seconds(nbytes, TwoLevel(1, FAST, SLOW), ranks) == pytest.approx(flat_s)
        assert apart.seconds(nbytes, SLOW, ranks) == flat_s  # a network without nodes


@pytest.mark.parametrize("made", EXCHANGES)
def test_inside_one_node_all_is_inside_it(made: Callable[[], Exchange]) -> None:
    start_s, s_per_byte = FAST.line(4)
    exchange = made().between_nodes()
    network = exchange.priced(Network.two_level(4, 8, FAST, SLOW))
    assert network.seconds(exchange.kind, MIB) == 0
    assert sum(network.inside_s(exchange.kind, MIB)) == pytest.approx(start_s + s_per_byte * MIB)


def test_two_nodes_of_four_by_hand() -> None:
    """4096 values: dense inside, then two ranks each exchange 1024 of them, and the card carries those of four."""
    exchange = messages_of("int8").between_nodes()
    message_nbytes = 512 + 4 * 2
    half_inside_s = 3 * 1e-6 + 3 / 4 * 4 * 4096 * 1e-11
    between_s = 2 * 1 * (1e-5 + 4 * message_nbytes * 1e-9)
    assert exchange.seconds(4 * 4096, TwoLevel(4, FAST, SLOW), 8) == pytest.approx(between_s)
    network = exchange.priced(Network.two_level(8, 4, FAST, SLOW))
    assert network.inside_s("int8@nodes", 4 * 4096) == pytest.approx((half_inside_s, half_inside_s))
    assert network.inside_s("int8", 4 * 4096) == (0, 0)


@pytest.mark.parametrize("ranks", [4, 8, 12, 64])
def test_the_stages_of_dense_messages_on_two_levels_add_up_to_the_models_all_reduce(ranks: int) -> None:
    for inside in (FAST, AlphaBeta("tree", 1e-6, 1e-11, 2e-12), replace(FAST, gamma_s_per_byte=3e-12)):
        network = with_nodes(Network.two_level(ranks, 4, inside, SLOW))
        stages_s = network.seconds("dense@nodes", MIB) + sum(network.inside_s("dense@nodes", MIB))
        assert stages_s == pytest.approx(network.allreduce_s(MIB))
        scatter_s, gather_s = network.inside_s("dense@nodes", MIB)
        assert scatter_s - gather_s == pytest.approx(
            inside.gamma_s_per_byte * MIB * {"ring": 3 / 4, "tree": 2}[inside.algorithm], abs=1e-12
        )


def test_of_a_network_without_nodes_messages_on_two_levels_cost_as_much_as_flat_ones() -> None:
    exchange = quantised_exchange("int8")
    network = exchange.between_nodes().priced(exchange.priced(Network.ring(8, 1e-5, 1e-9)))
    assert network.curve("int8@nodes") == network.curve("int8")
    assert network.curve("dense@nodes") == network.curve("dense") and network.inside is None


def test_what_was_measured_between_nodes_prices_other_kinds_between_them_there_and_elsewhere() -> None:
    model = TwoLevel(4, FAST, SLOW)
    told = with_nodes(Network.modelled(16, model))
    measured = replace(told, model=None)  # as if so measured
    exchange = messages_of("int8").between_nodes()
    for ranks in (16, 32):
        here = exchange.priced(measured.at(ranks))
        expected = exchange.priced(told.at(ranks))
        assert here.inside == measured.inside
        for kind in ("dense@nodes", "int8@nodes"):
            assert here.seconds(kind, 100 * MIB) == pytest.approx(expected.seconds(kind, 100 * MIB), rel=1e-3)
    assert told.at(2).inside == InsideNodes.modelled(2, model)  # a model gives it anew


@given(st.sampled_from(COMPRESSED), st.integers(2, 64), st.integers(1, 30))
def test_between_nodes_never_costs_more_than_dense_ones_but_for_padding(kind: str, nodes: int, mib: int) -> None:
    links = TwoLevel(8, FAST, SLOW)
    start_s, s_per_byte = links.line(8 * nodes)
    found_s = messages_of(kind).between_nodes().seconds(mib * MIB, links, 8 * nodes)
    assert found_s <= (start_s + s_per_byte * mib * MIB) * 1.01


def test_the_name_says_that_it_is_between_nodes_and_prices_do_not_mix() -> None:
    exchange = quantised_exchange("int8")
    network = Network.two_level(32, 8, FAST, SLOW)
    here = exchange.between_nodes().priced(exchange.priced(network))
    assert {"int8", "int8@nodes"} < set(here.curves)
    assert here.seconds("int8@nodes", 100 * MIB) < here.seconds("int8", 100 * MIB)
    kept = Network(4, {"dense": Curve.linear(0.0, 1e-9), "int8@nodes": Curve.linear(1.0, 0.0)})
    assert exchange.between_nodes().priced(kept) is kept


# ----------------------------------------------------------------------------------------------------------- sparse

DENSITY = 0.01


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("ranks", "numel"), [(2, 40_000), (3, 40_000), (4, 39_999), (16, 20_000), (64, 20_000), (128, 5_000)]
)
def test_sparse_the_formula_is_what_virtual_ranks_count(ranks: int, numel: int, wire: Wire) -> None:
    options = OkTopk(region_period=2, wire=wire)
    held, world = sparse_worlds.states(ranks, numel), VirtualWorld(ranks)

    def exchanged() -> set[str]:
        world.byte_counts.clear()
        given = sparse_worlds.gradients(ranks, numel, held[0].step)
        world.run([
            fixed_exchange(gradient, state, comm, float(ranks), DENSITY, options)
            for gradient, state, comm in zip(given, held, world.comms, strict=True)
        ])  # fmt: skip
        return set(world.byte_counts.phases)

    told = sparse_phases(numel, ranks, DENSITY, options)
    assert exchanged() == set(told)
    for name, phase in told.items():
        share = options.region_period if name == "regions" else 1  # which this step has, and every second has not
        assert world.byte_counts.sent([name]).tolist() == pytest.approx([share * phase.sent_nbytes] * ranks)
        assert world.byte_counts.received([name]).tolist() == pytest.approx([share * phase.sent_nbytes] * ranks)
        assert world.byte_counts.messages([name]).tolist() == pytest.approx([share * phase.messages] * ranks)
    assert exchanged() == set(told) - {"regions"}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 256, 1024, 2048])
@pytest.mark.parametrize("wire", WIRES)
def test_at_any_number_of_ranks_it_is_under_three_k_entries(wire: Wire, ranks: int) -> None:
    numel = 25_000_000
    nbytes = sum(phase.sent_nbytes for phase in sparse_phases(numel, ranks, DENSITY, OkTopk(wire=wire)).values())
    entries = nbytes / ENTRY_NBYTES[wire] / (DENSITY * numel) / ((ranks - 1) / ranks)
    assert 2 < entries <= (3 if ranks <= 1024 else 3.1)


def test_at_density_one_regions_are_never_balanced() -> None:
    assert sparse_phases(1000, 4, 1.0)["regions"].sent_nbytes == 0


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
    here = sparse_exchange(DENSITY).priced(Network.ring(4, 30e-6, 8e-10))
    took = here.seconds("oktopk:0.01", 440_000_000)
    assert took == pytest.approx(6 * (30e-6 + 2.75e6 * 8e-10) + 916e-6, rel=0.01)
    assert took < here.allreduce_s(440_000_000) / 30


def test_it_grows_with_ranks_by_latency_alone() -> None:
    messages = replace(sparse_exchange(DENSITY), computing=NOTHING)
    free = [messages.curve(Network.ring(ranks, 0.0, 8e-10)).seconds(1 << 28) for ranks in (64, 2048)]
    assert free[1] == pytest.approx(free[0], rel=0.05)
    dear = [messages.curve(Network.ring(ranks, 1e-5, 0.0)).seconds(1 << 28) for ranks in (64, 2048)]
    assert dear[1] / dear[0] == pytest.approx(2047 / 63)


def test_sparse_one_rank_sends_nothing() -> None:
    here = sparse_exchange(DENSITY).priced(Network.ring(1, 1e-5, 1e-9))
    assert here.seconds("oktopk:0.01", 1 << 20) == 0


def test_what_was_measured_stays_and_other_densities_join_it() -> None:
    network = Network(4, {"dense": Curve.linear(1e-3, 1e-9), "oktopk:0.01": Curve.linear(5e-3, 1e-10)})
    here = sparse_exchange(0.02).priced(sparse_exchange(0.01).priced(network))
    assert here.curve("oktopk:0.01") == Curve.linear(5e-3, 1e-10) and "oktopk:0.02" in here.curves
    assert here.curve("dense") == network.curve("dense")
    with pytest.raises(NetworkError, match=r"oktopk:0\.02"):
        network.seconds("oktopk:0.02", 1)


def test_selection_is_what_a_measured_exchange_takes_beyond_its_messages() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]
    made = replace(sparse_exchange(DENSITY), computing=Computing(3e-4, 2e-11, "")).curve(ring)
    measured = Network.measured(8, {
        "dense": [(size, ring.allreduce_s(size)) for size in sizes],
        "oktopk:0.01": [(size, made.seconds(size)) for size in sizes],
        "oktopk:0.2": [(size, 1.0 + size) for size in sizes],
    })  # fmt: skip
    found = sparse_exchange(0.02, measured).computing
    assert found.start_s == pytest.approx(3e-4, rel=0.01) and found.s_per_byte == pytest.approx(2e-11, rel=0.01)
    assert "oktopk:0.01" in found.source and "8 ranks" in found.source
    carried = replace(sparse_exchange(DENSITY), computing=found)
    far = carried.priced(measured.at(64)).seconds("oktopk:0.01", 1 << 26)
    assert far == pytest.approx(carried.curve(Network.ring(64, 2e-5, 8e-10)).seconds(1 << 26), rel=0.01)


def test_without_a_measured_exchange_selection_is_an_h200s() -> None:
    assert sparse_exchange(DENSITY, Network.ring(4, 1e-5, 1e-9)).computing is SPARSE_ON_H200["fp32"]
    one_point = Network(4, {"dense": Curve.linear(0.0, 1e-9), "oktopk:0.01": Curve.linear(1e-3, 0.0)})
    assert sparse_exchange(DENSITY, one_point).computing is SPARSE_ON_H200["fp32"]


def test_a_smaller_wire_costs_less() -> None:
    ring = Network.ring(4, 0.0, 8e-10)
    whole, half, least = (
        replace(sparse_exchange(DENSITY, options=OkTopk(wire=wire)), computing=NOTHING)
        .priced(ring)
        .seconds(kind_of(DENSITY, wire), 440_000_000)
        for wire in WIRES
    )
    assert half / whole == pytest.approx(4 / 8, rel=0.01) and least / whole == pytest.approx(3 / 8, rel=0.05)


def test_selection_is_taken_from_the_same_wire_where_that_was_measured_and_else_from_another() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]

    def took(wire: Wire, start_s: float) -> list[tuple[int, float]]:
        made = replace(sparse_exchange(DENSITY, options=OkTopk(wire=wire)), computing=Computing(start_s, 2e-11, ""))
        return [(size, made.curve(ring).seconds(size)) for size in sizes]

    dense = [(size, ring.allreduce_s(size)) for size in sizes]
    curves = {"dense": dense, "oktopk:0.01": took("fp32", 3e-4), "oktopk:0.01:bf16": took("bf16", 5e-4)}
    measured = Network.measured(8, curves)
    starts = {wire: sparse_exchange(0.02, measured, OkTopk(wire=wire)).computing.start_s for wire in WIRES}
    assert starts["fp32"] == pytest.approx(3e-4, rel=0.01) and starts["bf16"] == pytest.approx(5e-4, rel=0.01)
    assert starts["int8"] in (starts["fp32"], starts["bf16"])
    assert sparse_exchange(DENSITY, measured, OkTopk(wire="bf16")).priced(measured) == measured
