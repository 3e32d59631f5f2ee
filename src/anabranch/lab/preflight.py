"""What a lab needs of this machine, asked before anything is started, all of it at once."""

import errno
import importlib.util
import os
import shutil
import sys

from anabranch.errors import LabError
from anabranch.lab.cluster import Cluster
from anabranch.lab.hosts import linked
from anabranch.lab.janitor import MPS_CONTROL

EMULATE = "or say --emulate, which needs no rights and emulates the links inside the ranks"
ANY_RATE_BIT_S = 1e9


def check(cluster: Cluster, gpus: list[str]) -> None:
    """LabError with everything that is missing here, and what to do about each; nothing if the lab can start."""
    if missing := [*_network(cluster), *_gpu(cluster, gpus)]:
        raise LabError(f"this machine cannot run the lab. Missing: {'; '.join(missing)}")


def note(cluster: Cluster) -> str | None:
    """What will be odd, although it works."""
    notes = []
    if cluster.emulated:
        notes.append("links are emulated by delays inside the ranks: times are not those of a real network")
    cores = len(os.sched_getaffinity(0))
    if cluster.world_size > cores:
        notes.append(
            f"{cluster.world_size} ranks share {cores} CPU core{'s' * (cores > 1)}: where they are all busy, times are "
            "those of the cores and not of the links"
        )
    return "; ".join(notes) or None


def _network(cluster: Cluster) -> list[str]:
    if not sys.platform.startswith("linux"):
        return [
            f"Linux (this is {sys.platform}): the lab's hosts and their supervision are made of what its kernel offers"
        ]
    if cluster.emulated:
        return []
    missing = []
    if importlib.util.find_spec("pyroute2") is None:
        missing.append("the Python package pyroute2: pip install pyroute2")
    if trouble := _namespaces():
        missing.append(trouble)
    elif not missing:
        missing += _kernel(shaped=any(rate is not None for rate in cluster.rates_bit_s))
    return missing


def _namespaces() -> str | None:
    from anabranch.lab.namespaces import create

    try:
        create().close()
    except OSError as error:
        if error.errno != errno.EPERM:
            return f"network namespaces in the kernel ({error.strerror}): use one with CONFIG_NET_NS, {EMULATE}"
        user = "root lacks CAP_SYS_ADMIN" if os.geteuid() == 0 else f"this is user {os.geteuid()}"
        return (
            f"the right to make network namespaces ({user}): run as root with CAP_SYS_ADMIN, CAP_NET_ADMIN, {EMULATE}"
        )
    return None


def _kernel(shaped: bool) -> list[str]:
    """Ask the kernel by making a host, which also has it load its modules."""
    trouble = _refusal(ANY_RATE_BIT_S if shaped else None)
    if trouble is None:
        return []
    if "not permitted" in trouble:
        return [f"the right to make interfaces ({trouble}): run as root with CAP_NET_ADMIN, {EMULATE}"]
    if shaped and _refusal(None) is None:
        return [f"tbf, the shaper, in the kernel ({trouble}): modprobe sch_tbf, say --rate unshaped, {EMULATE}"]
    return [f"bridge and veth interfaces in the kernel ({trouble}): modprobe bridge veth, {EMULATE}"]


def _refusal(rate_bit_s: float | None) -> str | None:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with linked([rate_bit_s]):
            return None
    except (NetlinkError, OSError) as error:
        return str(error)


def _gpu(cluster: Cluster, gpus: list[str]) -> list[str]:
    if cluster.backend != "nccl":
        return []
    missing = []
    if not gpus:
        missing.append(
            "an NVIDIA GPU for --backend nccl (neither nvidia-smi nor /dev/nvidia0 shows one): say --backend gloo"
        )
    elif cluster.ranks_per_host > len(gpus):
        missing.append(
            f"GPUs for {cluster.ranks_per_host} ranks per host (found {len(gpus)}), because NCCL refuses two ranks of "
            "one host on one GPU: say more --hosts and fewer --ranks-per-host"
        )
    if shares(cluster, gpus) and shutil.which(MPS_CONTROL) is None:
        missing.append(
            f"{MPS_CONTROL} on PATH (it comes with the NVIDIA driver), without which ranks take turns on a GPU"
        )
    return missing


def shares(cluster: Cluster, gpus: list[str]) -> bool:
    """Whether several ranks will have to share a GPU."""
    return cluster.backend == "nccl" and cluster.world_size > len(gpus)
