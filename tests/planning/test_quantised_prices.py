"""Prices of quantised exchanges: messages as virtual ranks count them, and link by link what anyone can compute."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Curve, Network
from anabranch.planning import quantised_prices as quantised
from anabranch.planning import sparse_prices as sparse
from anabranch.planning.prices import NOTHING, Computing, Exchange
from anabranch.planning.quantised_prices import H200, Region, phases
from anabranch.values.kinds.formats import FINITE, FORMATS, NUMBER_NBYTES
from anabranch.values.kinds.names import COMPRESSED
from anabranch.values.links import AlphaBeta, TwoLevel
from exchange.quantised.worlds import gradients, step

RING, MIB = AlphaBeta("ring", 1e-5, 1e-9), 2**20
EACH = pytest.mark.parametrize("kind", COMPRESSED)


def messages_of(kind: str) -> Exchange:
    """The exchange, if it computed nothing."""
    return replace(quantised.exchange_of(kind), computing=NOTHING)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("ranks", "numel"), [(2, 4096), (3, 5000), (4, 129), (16, 20_000)])
def test_the_formula_is_what_virtual_ranks_count(kind: str, ranks: int, numel: int) -> None:
    counts = step(gradients(ranks, numel, seed=1), None, FORMATS[kind]).byte_counts
    split, gather = phases(kind, numel, ranks)
    for name, phase in (("split", split), ("gather", gather)):
        assert counts.sent([name]).tolist() == pytest.approx([phase.sent_nbytes] * ranks)
        assert counts.messages([name]).tolist() == [phase.messages] * ranks
    sent = quantised.exchange_of(kind).sent_nbytes(numel, ranks)
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
    assert Region.of(kind, 2048, ranks).message_nbytes == message_nbytes
    by_hand = 2 * (ranks - 1) * (1e-5 + message_nbytes * 1e-9)
    assert messages_of(kind).seconds(4 * 2048, RING, ranks) == pytest.approx(by_hand)
    computing_s = H200[kind].s_per_byte * 4 * 2048
    assert quantised.exchange_of(kind).seconds(4 * 2048, RING, ranks) == pytest.approx(by_hand + computing_s)


def test_three_passes_of_an_h200_are_counted() -> None:
    assert H200["int8"].seconds(440e6) == pytest.approx(0.497e-3)
    assert H200["int4"].seconds(440e6) == pytest.approx(1.579e-3)


@EACH
@pytest.mark.parametrize("ranks", [2, 4, 64, 2048])
def test_a_longer_message_and_a_slower_link_never_cost_less(kind: str, ranks: int) -> None:
    exchange = quantised.exchange_of(kind)
    for network in (Network.ring(ranks, 1e-5, 1e-9), Network.two_level(ranks, 8, RING, replace(RING, alpha_s=1e-4))):
        for one in (exchange, exchange.between_nodes()):
            costs = [point.seconds for point in one.curve(network).points]
            assert costs == sorted(costs) and costs[0] > 0
    rates = [exchange.curve(Network.ring(ranks, 1e-5, beta)).seconds(64 * MIB) for beta in (1e-10, 1e-9, 1e-8)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_fewer_bits_cost_less_where_the_wire_is_the_limit() -> None:
    network = Network.ring(4, 3e-5, 8e-10)
    costs = [network.allreduce_s(100 * MIB)]
    costs += [quantised.exchange_of(kind).curve(network).seconds(100 * MIB) for kind in COMPRESSED]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] / costs[2] == pytest.approx(32 / 8.125, rel=0.02)  # int8 sends 8.125 bits a value


def test_one_rank_sends_nothing() -> None:
    assert quantised.exchange_of("int8").priced(Network.ring(1, 1e-5, 1e-9)).seconds("int8", MIB) == 0


def test_what_was_measured_wins_at_its_own_world_size_and_tells_what_is_computed_elsewhere() -> None:
    ring, sizes = Network.ring(8, 2e-5, 8e-10), [1 << bits for bits in range(16, 28, 2)]
    slow = replace(quantised.exchange_of("int8"), computing=Computing(3e-4, 2e-11, "")).curve(ring)
    measured = Network.measured(8, {
        "dense": [(size, ring.allreduce_s(size)) for size in sizes],
        "int8": [(size, slow.seconds(size)) for size in sizes],
    })  # fmt: skip
    found = quantised.exchange_of("int8", measured)
    assert found.priced(measured).curve("int8") == measured.curve("int8")
    assert found.computing.start_s == pytest.approx(3e-4, rel=0.01)
    assert found.computing.s_per_byte == pytest.approx(2e-11, rel=0.01) and "8 ranks" in found.computing.source
    assert found.priced(measured.at(64)).seconds("int8", MIB) > 3e-4 > quantised.exchange_of("int8").computing.start_s
    assert quantised.exchange_of("int4", measured).computing is H200["int4"]


# ------------------------------------------------------------------------------------------------------- two levels

FAST, SLOW = AlphaBeta("ring", 1e-6, 1e-11), AlphaBeta("ring", 1e-5, 1e-9)
EXCHANGES: list[Callable[[], Exchange]] = [
    *(lambda kind=kind: quantised.exchange_of(kind) for kind in COMPRESSED),
    lambda: sparse.exchange_of(0.01),
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
def test_inside_one_node_it_is_the_dense_all_reduce(made: Callable[[], Exchange]) -> None:
    start_s, s_per_byte = FAST.line(4)
    found_s = made().between_nodes().seconds(MIB, TwoLevel(8, FAST, SLOW), 4)
    assert found_s == pytest.approx(start_s + s_per_byte * MIB)


def test_two_nodes_of_four_by_hand() -> None:
    """4096 values: dense inside, then two ranks each exchange 1024 of them, and the card carries those of four."""
    exchange = messages_of("int8").between_nodes()
    message_nbytes = 512 + 4 * 2
    inside_s = 2 * 3 * 1e-6 + 2 * 3 / 4 * 4 * 4096 * 1e-11
    across_s = 2 * 1 * (1e-5 + 4 * message_nbytes * 1e-9)
    assert exchange.seconds(4 * 4096, TwoLevel(4, FAST, SLOW), 8) == pytest.approx(inside_s + across_s)


@given(st.sampled_from(COMPRESSED), st.integers(2, 64), st.integers(1, 30))
def test_between_nodes_never_costs_more_than_dense_ones_but_for_padding(kind: str, nodes: int, mib: int) -> None:
    links = TwoLevel(8, FAST, SLOW)
    start_s, s_per_byte = links.line(8 * nodes)
    found_s = messages_of(kind).between_nodes().seconds(mib * MIB, links, 8 * nodes)
    assert found_s <= (start_s + s_per_byte * mib * MIB) * 1.01


def test_the_name_says_that_it_is_between_nodes_and_prices_do_not_mix() -> None:
    exchange = quantised.exchange_of("int8")
    network = Network.two_level(32, 8, FAST, SLOW)
    here = exchange.between_nodes().priced(exchange.priced(network))
    assert {"int8", "int8@nodes"} < set(here.curves)
    assert here.seconds("int8@nodes", 100 * MIB) < here.seconds("int8", 100 * MIB)
    kept = Network(4, {"dense": Curve.linear(0.0, 1e-9), "int8@nodes": Curve.linear(1.0, 0.0)})
    assert exchange.between_nodes().priced(kept) is kept
