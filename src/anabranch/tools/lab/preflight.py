"""What a lab needs of this machine, checked before anything is started; all problems are reported at once."""

import os
import shutil
import sys

from anabranch.tools.lab import hosts
from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.janitor import MPS_CONTROL
from anabranch.values.dependencies import require
from anabranch.values.errors import LabError, MissingExtraError

EMULATE = "or use --emulate, which needs no privileges and emulates the links inside the ranks"


def check(cluster: Cluster, gpus: list[str]) -> None:
    """Return if the lab can start; otherwise LabError with every problem and what to do about it."""
    if problems := [*_network_problems(cluster), *_gpu_problems(cluster, gpus)]:
        raise LabError(f"this machine cannot run the lab: {'; '.join(problems)}")


def caveats(cluster: Cluster) -> str | None:
    """What a user must know about the measured times of a lab that can start; None if there is nothing."""
    found = []
    if cluster.emulated:
        found.append("links are emulated by delays inside the ranks: times are not those of a real network")
    if cluster.ranks_per_host > 1 and cluster.inside == "loopback":
        found.append("sockets inside a host go over its loopback, unshaped: NVLink and shared memory would be faster")
    cores = len(os.sched_getaffinity(0))
    if cluster.world_size > cores:
        found.append(
            f"{cluster.world_size} ranks share {cores} CPU core{'s' * (cores > 1)}: while all of them compute, the "
            "cores and not the links determine the times"
        )
    return "; ".join(found) or None


def shares_gpus(cluster: Cluster, gpus: list[str]) -> bool:
    """Whether several ranks have to share a GPU."""
    return cluster.backend == "nccl" and cluster.world_size > len(gpus)


def _network_problems(cluster: Cluster) -> list[str]:
    if not sys.platform.startswith("linux"):
        return [f"it needs Linux (this is {sys.platform}), because hosts and supervision use features of its kernel"]
    if cluster.emulated:
        return []
    problems = []
    try:
        require("pyroute2", "lab", "anabranch lab")
    except MissingExtraError as error:
        problems.append(f"{error}, {EMULATE}")
    try:  # one host, which also makes the kernel load its modules; without pyroute2, whether there may be any
        if problems:
            os.close(hosts.new_namespace())
        else:
            with hosts.linked_hosts([next((rate for rate in cluster.rates_bit_s if rate is not None), None)]):
                pass
    except PermissionError as error:
        user = "root without them" if os.geteuid() == 0 else f"user {os.geteuid()}"
        needed = f"run as root with CAP_SYS_ADMIN and CAP_NET_ADMIN (this is {user}), {EMULATE}"
        problems.append(f"no permission to create network namespaces and their interfaces ({error}): {needed}")
    except OSError as error:
        needed = f"modprobe bridge veth sch_tbf, use one with CONFIG_NET_NS, {EMULATE}"
        problems.append(
            f"the kernel lacks namespaces, bridge and veth interfaces, or the shaper tbf ({error}): {needed}"
        )
    return problems


def _gpu_problems(cluster: Cluster, gpus: list[str]) -> list[str]:
    if cluster.backend != "nccl":
        return []
    problems = []
    if not gpus:
        problems.append("--backend nccl needs an NVIDIA GPU, and nvidia-smi lists none: use --backend gloo")
    if shares_gpus(cluster, gpus) and shutil.which(MPS_CONTROL) is None:
        problems.append(
            f"{MPS_CONTROL} is not on PATH (it comes with the NVIDIA driver); without it, ranks take turns on a GPU"
        )
    return problems
