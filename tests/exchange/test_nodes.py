"""Which ranks share a machine: what they say of it, what a program says, and what ranks agree on."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from anabranch.exchange import nodes as module
from anabranch.exchange.nodes import FoundNodes, check_given, find_nodes, from_ids, local_size, node_id
from anabranch.values.nodes import Nodes
from ranks import cases_on_ranks, group_timeout


def found(ids: str, size: str = "") -> FoundNodes:
    """Nodes of ranks on machines of these letters, where launchers say this of ranks per machine."""
    return from_ids((size,) * len(ids), tuple(ids))


@pytest.mark.parametrize(
    ("ids", "ranks"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("abba", [[0, 3], [1, 2]]),
        ("bbbaaa", [[0, 1, 2], [3, 4, 5]]),
        ("aaaa", [[0, 1, 2, 3]]),
        ("abc", [[0], [1], [2]]),
        ("a", [[0]]),
    ],
)
def test_ranks_with_one_id_are_a_node(ids: str, ranks: list[list[int]]) -> None:
    for size in ("", str(len(ranks[0]))):
        nodes = found(ids, size).nodes
        assert nodes is not None and [list(node) for node in nodes.ranks] == ranks


def test_ragged_nodes_are_flat() -> None:
    answer = found("aaab", "3")
    assert answer == (None, "nodes have 3 + 1 ranks, and all need the same number")
    assert str(answer) == "Exchanges are flat: nodes have 3 + 1 ranks, and all need the same number."
    assert found("abacab").why.startswith("nodes have 3 + 2 + 1 ranks")


def test_launchers_that_count_other_ranks_are_believed() -> None:
    """Containers, or hosts of a lab, may share an id, and have a network card each."""
    for sizes in (("2", "2", "2", "2"), ("", "2", "", "4")):
        answer = from_ids(sizes, tuple("aaaa"))
        assert answer.nodes is None
        assert answer.why.endswith("nodes=4 says that they share its network card")
    assert "LOCAL_WORLD_SIZE is 1:" in found("aabb", "1").why
    assert found("aabb", "2").nodes == Nodes.of_size(4, 2)


@pytest.mark.parametrize("given", ["auto", False, 1, 2, 16])
def test_what_may_be_given(given: object) -> None:
    check_given(given)


@pytest.mark.parametrize("given", [True, None, 0, -2, 2.0, "2", "off", [2]])
def test_what_may_not_be_given(given: object) -> None:
    with pytest.raises(ValueError, match="expected 'auto', the number of ranks per node, or False for flat"):
        check_given(given)


def test_a_machine_has_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_id() == node_id() != ""
    monkeypatch.setattr(module, "BOOT_ID", Path("/nowhere/boot_id"))
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    assert node_id() == "node17"


def test_what_the_launcher_says() -> None:
    assert local_size({"LOCAL_WORLD_SIZE": " 4 "}) == "4" and local_size({}) == ""


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def told(answer: FoundNodes) -> list[Any]:
    return [None if answer.nodes is None else [list(node) for node in answer.nodes.ranks], str(answer)]


def as_given(rank: int) -> list[list[Any]]:
    """A number that divides the ranks; each rank by itself; all on one node; flat."""
    return [told(find_nodes(given, group())) for given in (2, 1, 4, False)]


def not_divided(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        find_nodes(3, group())
    return str(caught.value)


def by_id(rank: int, ids: str, size: str = "") -> list[Any]:
    """Ranks that are on machines of these letters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "node_id", lambda: f"host {ids[rank]}")
        patch.setattr(module, "local_size", lambda: size)
        return told(find_nodes("auto", group()))


def here(rank: int) -> list[Any]:
    """These ranks themselves, of which no launcher says anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        return told(find_nodes("auto", group()))


def subgroup(rank: int) -> list[Any]:
    """A group of three of the ranks, whose nodes are of its own ranks; launchers count those of all groups."""
    members = dist.new_group([0, 1, 3], timeout=group_timeout())
    if rank == 2:
        return []
    assert isinstance(members, dist.ProcessGroup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "node_id", lambda: "aabb"[rank])
        patch.setattr(module, "local_size", lambda: "2")
        return told(find_nodes("auto", members))


def pairs(rank: int) -> list[Any]:
    """Two groups of two ranks each, on two nodes."""
    made = [dist.new_group(ranks, timeout=group_timeout()) for ranks in ([0, 2], [1, 3])]
    members = made[rank % 2]
    assert isinstance(members, dist.ProcessGroup)
    return [told(find_nodes(1, members)), told(find_nodes(2, members))]


CASES: dict[str, tuple[Any, ...]] = {
    "given": (as_given,),
    "not divided": (not_divided,),
    "here": (here,),
    "interleaved": (by_id, "abab", "2"),
    "ragged": (by_id, "aaab"),
    "apart": (by_id, "abcd", "1"),
    "subgroup": (subgroup,),
    "pairs": (pairs,),
}


def test_all_ranks_find_the_same() -> None:
    answers = cases_on_ranks(CASES, 4)
    for name, (first, *others) in answers.items():
        assert name == "subgroup" or all(other == first for other in others), name
    one_node = "Exchanges are flat: all 4 ranks are on one node."
    assert answers["given"][0] == [
        [[[0, 1], [2, 3]], "Nodes: 2 nodes of 2 ranks (nodes=2)."],
        [None, "Exchanges are flat: every node has one rank."],
        [None, one_node],
        [None, "Exchanges are flat: nodes=False."],
    ]
    assert answers["not divided"][0] == "nodes is 3, and these are 4 ranks: expected a number that divides them"
    assert answers["here"][0] == [None, one_node]
    assert answers["interleaved"][0] == [[[0, 2], [1, 3]], "Nodes: 2 nodes of 2 ranks (ranks that share a machine)."]
    assert answers["ragged"][0] == [
        None,
        "Exchanges are flat: nodes have 3 + 1 ranks, and all need the same number.",
    ]
    assert answers["apart"][0] == [None, "Exchanges are flat: every node has one rank."]
    first, second, third, fourth = answers["subgroup"]
    assert first == second == fourth and third == []
    assert first[1] == "Exchanges are flat: nodes have 2 + 1 ranks, and all need the same number."
    assert answers["pairs"][0] == [
        [None, "Exchanges are flat: every node has one rank."],
        [None, "Exchanges are flat: all 2 ranks are on one node."],
    ]
