"""Run a program on a cluster made on this machine, from the first check to the report of a failure."""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from anabranch.tools.lab import gpus, preflight
from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.environment import (
    LAB_ID,
    MASTER_PORT,
    free_port,
    gpu_environment,
    host_environment,
    shared_gpu_environment,
)
from anabranch.tools.lab.hosts import Host, linked_hosts, local_hosts
from anabranch.tools.lab.janitor import janitor
from anabranch.tools.lab.supervisor import Supervisor, start_process
from anabranch.values.errors import LabError

# Ranks of a host that share a GPU: NCCL refuses that unless they look like ranks of several hosts, and each finds the
# GPU as number 0. Where a host has a GPU for each of its ranks, nothing changes.
ALONE = """
case "$CUDA_VISIBLE_DEVICES" in
  *,*) ;;
  *) export NCCL_HOSTID="$NCCL_HOSTID-$LOCAL_RANK" LOCAL_RANK=0 ;;
esac
exec "$@"
"""


def run(cluster: Cluster, command: Sequence[str], timeout_s: float | None = None) -> int:
    """Run ``command`` on every host; returns 0, or the exit code of the first rank that failed.

    The exit code is 124 after ``timeout_s`` seconds, and 128 plus the signal's number after a signal. Rank 0 prints
    where this process prints; if another rank fails first, its last output is quoted on stderr. When this returns, or
    soon after this process dies, nothing of the lab is left.
    """
    available = gpus.available_gpus() if cluster.backend == "nccl" else []
    _check_command(command)
    preflight.check(cluster, available)
    if caveats := preflight.caveats(cluster):
        print(f"anabranch lab: note: {caveats}", file=sys.stderr)
    lab_id = secrets.token_hex(8)
    with ExitStack() as stack:
        if cluster.emulated:
            hosts = local_hosts(cluster.hosts)
        else:
            hosts = stack.enter_context(linked_hosts(cluster.rates_bit_s))
        shared = preflight.shares_gpus(cluster, available)
        mps_folder = gpus.new_mps_folder() if shared and not gpus.user_mps_answers() else ""
        namespaces = [host.namespace for host in hosts if host.namespace is not None]
        supervisor = stack.enter_context(Supervisor())
        with janitor(f"{LAB_ID}={lab_id}", mps_folder, namespaces):
            mps_environment = gpus.start_mps(mps_folder) if mps_folder else {}
            port = free_port() if cluster.emulated else MASTER_PORT
            for host in hosts:
                environment = {
                    **host_environment(cluster, host, hosts[0], port, lab_id),
                    **gpu_environment(host, cluster.ranks_per_host, available),
                    **mps_environment,
                    **(shared_gpu_environment(cluster.world_size) if shared else {}),
                }
                program = _program(cluster, host, environment, command)
                supervisor.add(start_process(host, program, environment, cluster.ranks_per_host > 1))
            supervisor.wait(timeout_s)
        supervisor.report(timeout_s)
    return supervisor.exit_code


def _program(cluster: Cluster, host: Host, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The command itself, or torchrun around it where a host has several ranks."""
    if cluster.ranks_per_host == 1:
        return list(command)
    options = {
        "--nnodes": str(cluster.hosts),
        "--node-rank": str(host.index),
        "--nproc-per-node": str(cluster.ranks_per_host),
        "--master-addr": environment["MASTER_ADDR"],
        "--master-port": environment["MASTER_PORT"],
        "--local-addr": host.address,  # else torchrun asks a name server, which a namespace does not have
    }
    flat = [part for option in options.items() for part in option]
    alone = ["sh", "-c", ALONE, "sh"] if cluster.backend == "nccl" else []
    return [sys.executable, "-m", "torch.distributed.run", *flat, "--no-python", *alone, *command]


def _check_command(command: Sequence[str]) -> None:
    if LAB_ID in os.environ:
        raise LabError(f"{LAB_ID} is set, so this is a rank of a lab: a lab inside a lab is not supported")
    if not command:
        raise LabError("there is no program to run: give it after --, such as: anabranch lab ... -- python train.py")
    if shutil.which(command[0]) is None:
        raise LabError(f"{command[0]}: no such program on PATH, or it is not executable")
