"""Process groups of our own: clones of the user's group, in whose creation only its own ranks take part.

torch's ``new_group`` names a group by how many groups this process has made so far, so that all ranks of the world must
make all groups in one order. A clone is made over the store of the group itself, under a name that its rank 0 has
chosen. Torch does not count it either: the names of groups that the program makes later stay what they would be.
"""

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from anabranch.exchange.agreement import explained, from_all_ranks
from anabranch.exchange.interface import Group

USE_A_TORCH_GROUP = "Give it a process group of torch's own, from init_process_group or new_group, with Gloo or NCCL"

CONNECT_TIMEOUTS = 5  # Gloo waits five timeouts for a rank that dies while ranks connect
MIN_CONNECT_TIMEOUT = timedelta(seconds=1.0)

c10d: Any = distributed_c10d  # its private names are in no type stub


def clone_group(
    group: Group, backend: str, description: str, options: Any = None, siblings: Sequence[Sequence[int]] = ()
) -> Group:
    """A new group of the same ranks with the same timeout. Collective among them, and among no others.

    But an NCCL group is cloned by ``new_group``, which can split its communicator, and in which all ranks of the world
    take part. So one of some ranks is cloned together with its ``siblings``: the ranks of each of the groups, this one
    among them, into which the world is divided. Without siblings it is not cloned at all (``Lanes.max_lanes``).
    """
    if backend != "gloo":
        new_group = partial(
            dist.new_group, timeout=timeout_of(group), backend=backend, pg_options=options, group_desc=description
        )
        new = [new_group(list(ranks)) for ranks in siblings] if siblings else [new_group()]
        return next(one for one in new if isinstance(one, dist.ProcessGroup))  # for other ranks' groups: a constant
    return _made_over_store(
        group, _name_of_rank_0(group), description, group.rank(), dist.get_process_group_ranks(group)
    )


def clone_part(
    group: Group, backend: str, description: str, parts: Sequence[Sequence[int]], options: Any = None
) -> Group:
    """A new group of some ranks of ``group``: of that one of ``parts`` which has this rank.

    Collective among the ranks of ``group``, which ``parts`` divide; for NCCL these must be all ranks of the world.
    """
    global_ranks = dist.get_process_group_ranks(group)
    if backend != "gloo":
        return clone_group(
            group, backend, description, options, [[global_ranks[rank] for rank in part] for part in parts]
        )
    own = dist.get_rank(group)
    number, part = next((number, part) for number, part in enumerate(parts) if own in part)
    name = f"{_name_of_rank_0(group)}/{number}"
    return _made_over_store(group, name, description, part.index(own), [global_ranks[rank] for rank in part])


def _name_of_rank_0(group: Group) -> str:
    """A name for a new group, from its rank 0. All ranks are here when this returns.

    For each then has every rank's bytes. So the limit for connecting can be short.
    """
    return f"anabranch/{from_all_ranks(uuid4().bytes, group)[0].hex()}"


def _made_over_store(group: Group, name: str, description: str, rank: int, ranks: Sequence[int]) -> Group:
    """A Gloo group of ``ranks``, in which this one is ``rank``, made over the store of ``group``."""
    timeout = timeout_of(group) or c10d.default_pg_timeout
    # A connection of its own: a thread that waits for a key would keep the others of this process from setting theirs.
    store = c10d._get_process_group_store(group).clone()
    made: Group
    with explained(f"the process group {description!r} could not be made"):
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            rank,
            ranks,
            dist.Backend("gloo"),
            store,
            name,
            timeout=max(timeout / CONNECT_TIMEOUTS, MIN_CONNECT_TIMEOUT),
            group_desc=description,
        )
    backend_of(made, "cpu").set_timeout(timeout)
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    del c10d._world.pg_names[made]
    return made


def is_in_python(group: Group) -> bool:
    """Whether the group is a Python class, whose size may change and whose clones torch does not know how to make."""
    return type(group) is not dist.ProcessGroup and not getattr(group, "is_cloned_by_torch", False)


def no_clone_reason(group: Group) -> str:
    """Why this group cannot be cloned, as the end of a sentence; empty if it can.

    A Python class (torchft) may do more than send, such as replacing ranks that died, which a clone would not do.
    """
    if is_in_python(group):
        return f"its process group is a {type(group).__name__}, a Python class, and more groups like it cannot be made"
    if group not in c10d._world.pg_map:
        return "its process group is not known to torch.distributed, so that more groups like it cannot be made"
    backend = dist.get_backend_config(group)
    return "" if "gloo" in backend or "nccl" in backend else f"its process group has neither Gloo nor NCCL ({backend})"


def default_group() -> Group:
    """The group of all ranks; raises torch's own error if there is none."""
    group: Group = c10d._get_default_group()
    return group


def destroy_clone(clone: Group) -> None:
    """Destroy a group made by ``clone_group``; not collective. Nothing is left to do once the default group is gone."""
    if dist.is_initialized() and clone in c10d._world.pg_map:
        c10d._world.pg_names[clone] = clone.group_name
        dist.destroy_process_group(clone)


def keep_groups(groups: Iterable[Group]) -> None:
    """Never free these groups: torch would wait for their threads, which may be in a collective that cannot end."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def keep_all_groups() -> None:
    """Never free any group of this process, which is a forked child: it has none of the threads of its groups."""
    keep_groups(c10d._world.pg_map)


def timeout_of(group: Group) -> timedelta | None:
    """The timeout of a group's collectives; None if its backend does not say."""
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            timeout = backend_of(group, kind).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return None


def inherit_timeout(group: Group) -> None:
    """Give a group that has torch's own timeout that of the default group, where that is shorter. Not collective.

    The groups of a device mesh have torch's own, 30 minutes on Gloo, whatever init_process_group() was given.
    """
    given, found = timeout_of(default_group()), timeout_of(group)
    if given is None or found is None or given >= found:
        return
    if found not in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout):  # the program's
        return
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError):  # it has no backend for these
            backend_of(group, kind).set_timeout(given)


def backend_of(group: Group, kind: str) -> Any:
    """A group's backend for a kind of device: inside the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it.

    Torch 2.11 sets no timeout through the wrapper, and from 2.15 on the function that looks for the backend itself is
    deprecated.
    """
    backend: Any = group._get_backend(torch.device(kind))
    return getattr(backend, "wrapped_pg", backend)
