"""Contention and networks."""

from dataclasses import FrozenInstanceError, replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import AlphaBeta, Contention, Curve, CurvePoint, Network, NetworkError, TwoLevel
from anabranch.values.network import InsideNodes
from oracles import slowdown
from strategies import contentions, models

RINGS = AlphaBeta("ring", 1e-5, 1e-10, 1e-11), AlphaBeta("tree", 1e-4, 1e-9)


# -------------------------------------------------------------------------------------------------- Contention


@given(contentions(), st.integers(1, 12))
def test_slowdown_is_the_documented_law(contention: Contention, k: int) -> None:
    assert contention.slowdown(k) == pytest.approx(float(slowdown(contention, k)))
    assert 1 <= contention.slowdown(k) <= contention.slowdown(k + 1)
    if contention.link_cap is not None:
        assert k / contention.slowdown(k) <= contention.link_cap * (1 + 1e-12)


@given(st.floats(0, 4), st.integers(1, 8))
def test_the_published_law(eta: float, k: int) -> None:
    assert Contention.law(eta).slowdown(k) == pytest.approx(1 + eta * (k - 1))


def test_contention_by_hand() -> None:
    assert [Contention((1.0, 1.25, 2.0)).slowdown(k) for k in (0, 1, 2, 3, 4, 5)] == [1, 1, 1.25, 2, 2.75, 3.5]
    assert [Contention((1.0,)).slowdown(k) for k in (1, 2, 3)] == [1, 2, 3]
    assert [Contention.law(0.5, link_cap=1.25).slowdown(k) for k in (1, 2, 3)] == [1, 1.6, 2.4]
    assert Contention() == Contention.law(1.0)


def test_contention_refuses() -> None:
    for table in ((), (2.0,), (1.0, 0.5), (1.0, 3.0, 2.0), (1.0, nan), (1.0, inf)):
        with pytest.raises(ValueError, match="slowdown"):
            Contention(table)
    for cap in (0.5, 0.0, nan, inf):
        with pytest.raises(ValueError, match="link_cap"):
            Contention(link_cap=cap)
    with pytest.raises(ValueError, match="eta"):
        Contention.law(-0.1)


# ----------------------------------------------------------------------------------------------------- Network


def test_linear_prices() -> None:
    network = Network.linear(8, 1e-3, 2e-9)
    assert network.allreduce_s(10**6) == network.seconds("dense", 10**6) == pytest.approx(3e-3)
    assert network.contention == Contention.law(1.0)
    assert Network.linear(8, 1e-3, 2e-9, eta=0.5, link_cap=1.5).contention == Contention.law(0.5, 1.5)


def test_an_unknown_collective_is_our_error() -> None:
    with pytest.raises(NetworkError, match=r"oktopk.*\['dense'\]"):
        Network.linear(8, 1, 1).seconds("oktopk", 1)


@given(models, st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 1 << 30))
def test_at_follows_the_model(model: AlphaBeta | TwoLevel, here: int, there: int, nbytes: int) -> None:
    carried = Network.modelled(here, model, Contention.law(0.5)).at(there)
    start_s, s_per_byte = model.line(there)
    assert carried.world_size == there
    assert carried.allreduce_s(nbytes) == pytest.approx(start_s + s_per_byte * nbytes)
    assert carried.contention == Contention.law(0.5)
    assert carried.at(here) == Network.modelled(here, model, Contention.law(0.5))


def test_constructors_are_their_models() -> None:
    ring, tree = RINGS
    assert Network.ring(64, 1e-5, 1e-10, 1e-11).model == ring
    assert Network.tree(64, 1e-4, 1e-9).model == tree
    assert Network.halving_doubling(64, 1e-5, 1e-10).model == AlphaBeta("halving_doubling", 1e-5, 1e-10)
    assert Network.two_level(64, 8, ring, tree).model == TwoLevel(8, ring, tree)
    assert Network.ring(64, 1e-5, 1e-10).allreduce_s(0) == pytest.approx(126e-5)


def test_meta_travels_with_a_model() -> None:
    ring = Network.ring(8, 1e-5, 1e-10)
    marked = Network(8, ring.curves, ring.contention, ring.model, {"site": "x"})
    assert marked.at(16).meta == {"site": "x"}


def test_a_measured_network_is_carried_as_a_ring_and_says_so() -> None:
    line = [(nbytes, 1e-3 + 2e-9 * nbytes) for nbytes in (0, 1 << 10, 1 << 20, 1 << 24)]
    network = Network.measured(8, {"dense": line, "other": line}, contention=Contention.law(0.5), meta={"nic": "x"})
    assert network.at(8) is network
    far = network.at(64)
    assert far.allreduce_s(1 << 20) == pytest.approx(1e-3 * 63 / 7 + 2e-9 * (63 / 64) / (7 / 8) * (1 << 20))
    assert far.contention == network.contention
    assert far.meta["nic"] == "x"
    assert "ring fitted to 8 ranks" in str(far.meta["assumption"])
    assert "assumption" not in network.meta
    assert set(far.curves) == {"dense"}  # the others cannot be carried
    assert network.at(1).allreduce_s(1 << 20) == 0
    with pytest.raises(NetworkError, match="1 rank cannot be carried to 4"):
        Network.linear(1, 1e-3, 1e-9).at(4)


def test_measured_takes_points_or_kinds_of_points() -> None:
    points = [(0, 1.0), (10, 2.0)]
    assert Network.measured(4, points) == Network.measured(4, {"dense": points})


def test_shifted_network() -> None:
    network = Network.measured(4, [(0, 1.0, 0.5), (10, 2.0, 0.5)])
    assert network.shifted(1).allreduce_s(0) == 1.5
    assert network.shifted(-1).allreduce_s(10) == 1.5
    assert network.shifted(0) == network
    inside = InsideNodes(2, network.curve("dense"), Curve.linear(1.0, 0.0))
    moved = replace(network, inside=inside).shifted(1).inside
    assert moved is not None and moved.scatter.seconds(0) == 1.5 and moved.gather == inside.gather


def test_a_measured_network_keeps_what_nodes_cost_inside_and_carries_what_is_between_them() -> None:
    line = Curve.linear(1e-3, 2e-9)
    inside = InsideNodes(4, Curve.linear(1e-5, 1e-11), Curve.linear(1e-5, 1e-11))
    far = Network(8, {"dense": line, "dense@nodes": line, "int8@nodes": line}, inside=inside).at(16)
    assert far.inside == inside and set(far.curves) == {"dense", "dense@nodes"} == set(far.at(32).curves)
    assert far.seconds("dense@nodes", 1 << 20) == pytest.approx(1e-3 * 3 + 2e-9 * (3 / 4) / (1 / 2) * (1 << 20))
    one_node = Network(4, {"dense": line, "dense@nodes": Curve.linear(0.0, 0.0)}, inside=inside)
    assert set(one_node.at(8).curves) == {"dense"}  # nothing is known of what is between nodes


def test_a_network_refuses() -> None:
    with pytest.raises(ValueError, match="world_size"):
        Network(0, {"dense": Curve.linear(0, 0)})
    with pytest.raises(ValueError, match="dense"):
        Network(2, {"other": Curve.linear(0, 0)})


def test_frozen_slotted_hashable() -> None:
    network = Network.ring(4, 1, 1)
    for noun, name in ((network, "world_size"), (network.curves["dense"], "points"), (Contention(), "link_cap"),
                       (CurvePoint(0, 1), "seconds"), (RINGS[0], "alpha_s"),
                       (TwoLevel(1, *RINGS), "inside")):  # fmt: skip
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, 1)
        assert not hasattr(noun, "__dict__")
        assert hash(noun) == hash(noun)
    with pytest.raises(TypeError):
        network.curves["dense"] = Curve.linear(0, 0)  # type: ignore[index]
    with pytest.raises(TypeError):
        network.meta["a"] = 1  # type: ignore[index]
    assert hash(Network.ring(4, 1, 1)) == hash(network)


def test_delays_go_along_to_another_number_of_ranks_and_are_times() -> None:
    for network in (Network.ring(4, 1e-5, 1e-9), Network.linear(4, 1e-4, 1e-9)):
        slow = replace(network, delays={"int8": 0.25})
        assert slow.at(64).delay_s("int8") == 0.25 and slow.at(64).delay_s("dense") == 0
    with pytest.raises(ValueError, match="delay by a message of int8"):
        Network(4, {"dense": Curve.linear(1.0, 1.0)}, delays={"int8": -1.0})
