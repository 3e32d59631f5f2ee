"""Nodes: finds out, together with all ranks of a group, which of them share a machine.

A node is known by what two machines cannot share: the boot id of its kernel, and the network namespace of the process,
in which its cards are. Where a system has neither, by the host's name.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch.distributed as dist

from anabranch.exchange.agreement import from_all_ranks
from anabranch.exchange.interface import Group
from anabranch.values.nodes import Nodes

GivenNodes = Literal["auto", False] | int  # a number: of ranks per node, one node after the other

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class FoundNodes(NamedTuple):
    """The nodes of a group whose exchanges may have two levels; None if all must be flat. And why, in words."""

    nodes: Nodes | None
    why: str

    def __str__(self) -> str:
        return f"Exchanges are flat: {self.why}." if self.nodes is None else f"Nodes: {self.nodes} ({self.why})."


UNKNOWN = FoundNodes(None, "nodes were not looked for")
ALONE = FoundNodes(None, "there is one rank")


def check_given(nodes: object) -> None:
    """ValueError unless this may be given as ``nodes=``."""
    is_number = type(nodes) is int and nodes >= 1
    if nodes != "auto" and nodes is not False and not is_number:
        raise ValueError(f"nodes is {nodes!r}: expected 'auto', the number of ranks per node, or False for flat")


def find_nodes(given: GivenNodes, group: Group) -> FoundNodes:
    """The nodes of the ranks of ``group``; the same on every rank. Collective.

    ``given`` was checked, and is the same on all ranks. ValueError on all ranks if it does not divide them.
    """
    ranks = dist.get_world_size(group)
    if given is False:
        return FoundNodes(None, "nodes=False")
    if ranks == 1:  # where a program is tried out: a number may be that of a larger world
        return ALONE
    if given != "auto":
        if ranks % given:
            raise ValueError(f"nodes is {given}, and these are {ranks} ranks: expected a number that divides them")
        found = FoundNodes(Nodes.of_size(ranks, given), f"nodes={given}")
    else:
        size = local_size() if ranks == dist.get_world_size() else ""  # it counts the ranks of all groups
        words = [payload.decode() for payload in from_all_ranks(f"{size} {node_id()}".encode(), group)]
        found = from_ids(*zip(*(word.split(" ", 1) for word in words), strict=True))
    if found.nodes is None:
        return found
    if found.nodes.per_node == 1:
        return FoundNodes(None, "every node has one rank")
    if len(found.nodes) == 1:
        return FoundNodes(None, f"all {ranks} ranks are on one node")
    if "nccl" in dist.get_backend_config(group) and ranks < dist.get_world_size():
        return FoundNodes(None, "its group has some of the ranks, and NCCL makes groups among all")
    return found


def from_ids(sizes: tuple[str, ...], ids: tuple[str, ...]) -> FoundNodes:
    """The nodes of ranks with these ids of their machines; ``sizes``: what launchers say of ranks per machine."""
    by_id: dict[str, list[int]] = {}
    for rank, one in enumerate(ids):
        by_id.setdefault(one, []).append(rank)
    counts = [len(node) for node in by_id.values()]
    if len(set(counts)) > 1:
        return FoundNodes(None, f"nodes have {' + '.join(map(str, counts))} ranks, and all need the same number")
    said = set(sizes) - {""}
    if said - {str(counts[0])}:
        told = f"{counts[0]} ranks share a machine, and LOCAL_WORLD_SIZE is {', '.join(sorted(said))}"
        return FoundNodes(None, f"{told}: nodes={counts[0]} says that they share its network card")
    return FoundNodes(Nodes(tuple(map(tuple, by_id.values()))), "ranks that share a machine")


def node_id() -> str:
    """What ranks of one node share, and no others."""
    try:
        return f"{BOOT_ID.read_text().strip()} {NETWORK_NAMESPACE.stat().st_ino}"
    except OSError:
        return socket.gethostname()


def local_size(variables: Mapping[str, str] = os.environ) -> str:
    """How many ranks the launcher has started on this machine; empty if it does not say."""
    return variables.get("LOCAL_WORLD_SIZE", "").strip()
