"""What links inside a host of the lab are: its loopback, or copies in memory. torch comes later."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

STARTUP_FOLDER = Path(__file__).parents[1] / "startup"  # with a sitecustomize.py, which Python runs as it starts
INSIDE_VARIABLE = "ANABRANCH_LAB_INSIDE"  # set where it is memory

# Methods of torch's ProcessGroup by those of ``HostMemory``; torch 2.13 renamed them. An all-reduce is not among them.
METHODS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("_allgather_base", "all_gather_single"),
    "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
    "all_to_all": ("alltoall_base", "all_to_all_single"),
}


def environment() -> dict[str, str]:
    """Environment variables for ranks whose messages inside a host are to be copies in memory."""
    return {INSIDE_VARIABLE: "memory", **startup_path()}


def startup_path() -> dict[str, str]:
    """The variable by which the lab's code runs first in ranks, whose interpreter must have anabranch installed.

    It keeps the entries that it has in this process.
    """
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP_FOLDER), os.environ.get("PYTHONPATH")]))}


def install(c10d: ModuleType) -> None:
    """Let collectives of groups whose ranks are all on one host be copies in its memory.

    ``c10d`` is torch.distributed.distributed_c10d, while torch is still being imported. Methods of the class of all
    groups are replaced: what everything in Python calls.
    """
    for kind, names in METHODS.items():
        for name in names:
            if hasattr(c10d.ProcessGroup, name):
                setattr(c10d.ProcessGroup, name, _by_memory(kind, getattr(c10d.ProcessGroup, name)))


def _by_memory(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def collective(group: Any, *arguments: Any) -> Any:
        from anabranch.tools.lab.inside import host_memory

        work = host_memory.run(kind, group, arguments)
        return real(group, *arguments) if work is None else work

    return collective
