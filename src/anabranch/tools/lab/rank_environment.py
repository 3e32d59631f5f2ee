"""The environment of each rank's program, as torchrun would set it, with the variables that the lab adds."""

import os
import socket
from collections.abc import Mapping, Sequence

from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.emulation.settings import environment as emulation_environment
from anabranch.tools.lab.hosts import Host
from anabranch.tools.lab.inside.install import environment as inside_environment

MASTER_PORT = 29500  # always free in a new namespace
LAB = "ANABRANCH_LAB"
LAB_ID = "ANABRANCH_LAB_ID"
LAB_BACKEND = "ANABRANCH_LAB_BACKEND"
LAB_BIT_S = "ANABRANCH_LAB_BIT_S"
CACHE = "ANABRANCH_CACHE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
OWN_QUEUES, LEAST_QUEUES = 8, 2  # hardware queues of a process with a GPU of its own, and of an MPS client, by default
ALL_QUEUES = 96  # assumed of one MPS daemon, for all its clients together: 48 with two each


def rank_environment(
    cluster: Cluster, host: Host, local_rank: int, master: Host, master_port: int, lab_id: str
) -> dict[str, str]:
    """The environment of one rank: that of this process, and the lab's own variables."""
    ranks = cluster.ranks_per_host
    rates = [rate for rate in cluster.rates_bit_s if rate is not None]
    ours = {
        "RANK": str(host.index * ranks + local_rank),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(host.index),
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master_port),
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": host.interface,
        # NCCL takes ranks with the same host id for neighbours on one machine. Different ids, and only sockets to
        # communicate, make it use the link; they also let several ranks share a GPU, which it refuses on one machine.
        "NCCL_HOSTID": f"lab{host.index}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Each experiment in a lab searches again, and a plan for its links is of no use outside. To try the plan cache
        # in a lab, set the variable; a cached plan's key has the lab's hosts and links in it.
        CACHE: os.environ.get(CACHE, "off"),
        LAB: str(cluster),
        LAB_BACKEND: cluster.backend,
        LAB_BIT_S: f"{min(rates, default=0.0):.0f}",
        LAB_ID: lab_id,
        "TORCHELASTIC_RUN_ID": lab_id,  # Lightning then takes all of this as it is
    }
    if cluster.alpha_s is not None:
        ours |= emulation_environment(rates, cluster.alpha_s)
    if cluster.inside == "memory":
        ours |= inside_environment()
    # Variables from a torchrun around this process are not meant for the lab's ranks: they would wait for its store.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {**inherited, **ours}


def gpu_environment(cluster: Cluster, host: Host, local_rank: int, gpus: Sequence[str]) -> Mapping[str, str]:
    """The variables that give a host as many GPUs as it has ranks, in turn; hosts share where there are too few.

    A host with more ranks than there are GPUs gets one, for all of its ranks. NCCL refuses that unless they look like
    ranks of several hosts, and each finds the GPU as number 0.

    On a machine with one GPU nothing is chosen: every rank finds it as number 0. But where the user has chosen one of
    several by its number, the variable gives its id, because an MPS daemon numbers the GPUs itself.
    """
    ranks = cluster.ranks_per_host
    alone = ranks > len(gpus) > 0
    found = {"NCCL_HOSTID": f"lab{host.index}-{local_rank}", "LOCAL_RANK": "0"} if alone else {}
    if len(gpus) > 1 or (gpus and VISIBLE in os.environ):
        first, number = (host.index, 1) if alone else (host.index * ranks, ranks)
        found[VISIBLE] = ",".join(gpus[(first + one) % len(gpus)] for one in range(number))
    return found


def shared_gpu_environment(ranks: int) -> Mapping[str, str]:
    """The variable that gives ``ranks`` that share GPUs the hardware queues of a rank with a GPU of its own.

    All ranks of the lab, on however many GPUs, share what one MPS daemon has; beyond 12 ranks each gets fewer.

    Under MPS a process has two. Its streams share them, and work that waits in a queue holds up whatever another stream
    has put behind it: messages on two lanes, or the streams of FSDP2, would wait for each other as on no real host.
    A number that the user has chosen is kept.
    """
    queues = max(LEAST_QUEUES, min(OWN_QUEUES, ALL_QUEUES // ranks))
    return {} if QUEUES in os.environ else {QUEUES: str(queues)}


def free_port() -> int:
    """A port of this machine that is not in use now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
