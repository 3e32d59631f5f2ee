"""Variables: what each rank's program finds in its environment, as torchrun would set it."""

import os
import socket
from collections.abc import Mapping, Sequence

from anabranch.lab.cluster import Cluster
from anabranch.lab.hosts import Host

MASTER_PORT = 29500  # free in a namespace of its own
LAB, LAB_ID = "ANABRANCH_LAB", "ANABRANCH_LAB_ID"
LAB_BACKEND, LAB_BIT_S = "ANABRANCH_LAB_BACKEND", "ANABRANCH_LAB_BIT_S"


def variables(cluster: Cluster, host: Host, master: Host, master_port: int, lab_id: str) -> dict[str, str]:
    """The environment of one host's process: this process's own, and what the lab adds.

    With one rank per host that is all a rank needs; with several, torchrun adds theirs.
    """
    ours = {
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master_port),
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": host.interface,
        # NCCL takes ranks of one host id for neighbours on one machine. Different ones, and no way but sockets, make
        # it use the link; they also let several ranks share a GPU, which it refuses on one machine.
        "NCCL_HOSTID": f"lab{host.index}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        LAB: str(cluster),
        LAB_BACKEND: cluster.backend,
        LAB_BIT_S: f"{min((rate for rate in cluster.rates_bit_s if rate is not None), default=0.0):.0f}",
        LAB_ID: lab_id,
    }
    if cluster.ranks_per_host == 1:
        ours |= {
            "RANK": str(host.index),
            "WORLD_SIZE": str(cluster.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(host.index),
        }
    # What another torchrun has said to this process is not meant for the lab's ranks: they would wait for its store.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {**inherited, **ours, **_emulation(cluster)}


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def gpus_of(host: Host, ranks_per_host: int, gpus: Sequence[str]) -> Mapping[str, str]:
    """Which GPUs a host has: as many as its ranks, dealt out in turn, so that hosts share where there are too few.

    The only GPU of a machine is left as it is: everybody finds it as number 0. One of several, that the user has chosen
    by its number, is not: behind an MPS daemon numbers count anew.
    """
    if not gpus or (len(gpus) == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ):
        return {}
    first = host.index * ranks_per_host
    mine = [gpus[(first + rank) % len(gpus)] for rank in range(ranks_per_host)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def _emulation(cluster: Cluster) -> dict[str, str]:
    if cluster.alpha_s is None:
        return {}
    from anabranch.lab.emulation import environment

    return environment([rate for rate in cluster.rates_bit_s if rate is not None], cluster.alpha_s)
