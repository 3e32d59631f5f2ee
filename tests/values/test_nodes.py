"""Nodes: every rank in one node, as many in each, and the places that ranks have in them."""

import pytest

from anabranch.values.nodes import Nodes


def test_consecutive_ranks() -> None:
    nodes = Nodes.of_size(6, 2)
    assert nodes.ranks == ((0, 1), (2, 3), (4, 5))
    assert nodes.places == ((0, 2, 4), (1, 3, 5))
    assert (len(nodes), nodes.per_node, str(nodes)) == (3, 2, "3 nodes of 2 ranks")
    assert [nodes.place_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_interleaved_ranks() -> None:
    nodes = Nodes(((0, 2, 5), (4, 1, 3)))
    assert nodes.places == ((0, 4), (2, 1), (5, 3))
    for place, ranks in enumerate(nodes.places):
        assert [nodes.place_of(rank) for rank in ranks] == [place, place]


def test_lists_are_frozen() -> None:
    """As they come from a checkpoint."""
    nodes = Nodes([[0, 1], [2, 3]])  # type: ignore[arg-type]
    assert nodes == Nodes.of_size(4, 2) and hash(nodes) == hash(Nodes.of_size(4, 2))


@pytest.mark.parametrize("ranks", [((0, 1), (1, 2)), ((0, 1), (3, 4)), ((1, 2),)])
def test_each_rank_must_be_there_once(ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"expected each from 0 to \d once"):
        Nodes(ranks)


def test_nodes_must_be_of_one_size() -> None:
    with pytest.raises(ValueError, match=r"nodes have \[3, 1\] ranks: expected as many in each"):
        Nodes(((0, 1, 2), (3,)))
