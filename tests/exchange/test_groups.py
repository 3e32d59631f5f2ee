"""Clones of process groups: of the same ranks and deadline, made by these ranks alone, and unknown to others."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.exchange import groups
from anabranch.exchange.groups import (
    backend_of,
    clone_group,
    destroy_clone,
    inherit_timeout,
    no_clone_reason,
    timeout_of,
)
from anabranch.values.errors import CollectiveError
from ranks import group_timeout, on_ranks


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def members(ranks: list[int], timeout_s: float = 20.0) -> dist.ProcessGroup:
    """A group that only its own ranks make."""
    group = dist.new_group(ranks, use_local_synchronization=True, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def copies(rank: int, debugged: bool) -> dict[str, Any]:
    if debugged:  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does: a backend is inside a wrapper
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    made = clone_group(world(), "gloo", "a copy")
    some = dist.new_group([0, 2], timeout=timedelta(seconds=9))
    answer: dict[str, Any] = {
        "whole": dist.get_process_group_ranks(made),
        "timeout": timeout_of(made) == group_timeout(),
    }
    if rank != 1:
        assert isinstance(some, dist.ProcessGroup)
        part = clone_group(some, "gloo", "a copy of a part")
        value = torch.ones(1)
        dist.all_reduce(value, group=part)
        answer |= {
            "part": dist.get_process_group_ranks(part),
            "sum": value.item(),
            "nine": timeout_of(part) == timedelta(seconds=9),
        }
    return answer


@pytest.mark.parametrize("debugged", [False, True])
def test_copies_of_groups_have_their_ranks_and_deadline(debugged: bool) -> None:
    for rank, answer in enumerate(on_ranks(copies, 3, debugged)):
        assert answer["whole"] == [0, 1, 2] and answer["timeout"]
        if rank != 1:
            assert answer["part"] == [0, 2] and answer["sum"] == 2 and answer["nine"]


def inherited(rank: int, debugged: bool) -> list[float]:
    """Timeouts in seconds, once they have inherited: of a group that nobody gave one, and of one with its own.

    The last one is that of the default group.
    """
    if debugged:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    found = []
    for group in (dist.new_group(), dist.new_group(timeout=timedelta(hours=2))):
        assert isinstance(group, dist.ProcessGroup)
        inherit_timeout(group)
        timeout = timeout_of(group)
        assert timeout is not None
        found.append(timeout.total_seconds())
    return [*found, group_timeout().total_seconds()]


@pytest.mark.parametrize("debugged", [False, True])
def test_a_group_inherits_a_timeout_unless_it_was_given_one(debugged: bool) -> None:
    for inherited_s, own_s, default_s in on_ranks(inherited, 2, debugged):
        assert (inherited_s, own_s) == (default_s, 7200)


def test_a_group_that_says_no_timeout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch knows no NCCL, and has no timeout for it."""
    default: Any = object()
    monkeypatch.setattr(groups, "default_group", lambda: default)
    monkeypatch.setattr(groups, "timeout_of", lambda group: timedelta(seconds=45) if group is default else None)
    monkeypatch.setattr(groups.c10d, "default_pg_nccl_timeout", None)
    silent: Any = object()
    inherit_timeout(silent)


def uneven(rank: int) -> float:
    """Every rank has made another number of groups; then one more group that torch itself must name."""
    if rank != 2:
        first = members([0, 1])
        clones = [clone_group(first, "gloo", f"clone {number}") for number in range(2)]
        value = torch.ones(1)
        dist.all_reduce(value, group=clones[1])
        assert value.item() == 2
        destroy_clone(clones[0])
    else:
        members([2])
    if rank != 0:
        second = members([1, 2])  # torch's name for it counts the groups on each of its ranks
        dist.all_reduce(torch.ones(1), group=clone_group(second, "gloo", "clone"))
    value = torch.ones(1)
    dist.all_reduce(value, group=clone_group(world(), "gloo", "clone of all"))
    return value.item()


def test_only_members_make_a_clone_and_torch_does_not_count_it() -> None:
    assert on_ranks(uneven, 3) == [3, 3, 3]


def missing_member(rank: int) -> str:
    group = members([0, 1], timeout_s=group_timeout().total_seconds())
    dist.all_reduce(torch.ones(1), group=group)  # torch connects a group in its first use
    backend_of(group, "cpu").set_timeout(timedelta(seconds=1.5))
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(CollectiveError) as caught:
        clone_group(group, "gloo", "clone")
    dist.barrier()
    return str(caught.value)


def test_a_missing_member_is_an_error_at_the_deadline() -> None:
    answer, _ = on_ranks(missing_member, 2)
    assert answer


def destroyed(rank: int) -> bool:
    clone = clone_group(world(), "gloo", "clone")
    dist.barrier()
    dist.destroy_process_group()
    destroy_clone(clone)
    return no_clone_reason(clone) != ""


def test_the_default_group_may_go_first() -> None:
    assert on_ranks(destroyed, 2) == [True, True]
