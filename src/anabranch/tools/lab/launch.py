"""Run a program on a cluster made on this machine, from the first check to the report of a failure."""

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from anabranch.tools.lab import gpus, preflight
from anabranch.tools.lab.cluster import Cluster
from anabranch.tools.lab.hosts import linked_hosts, local_hosts
from anabranch.tools.lab.janitor import janitor
from anabranch.tools.lab.rank_environment import (
    LAB_ID,
    MASTER_PORT,
    free_port,
    gpu_environment,
    rank_environment,
    shared_gpu_environment,
)
from anabranch.tools.lab.supervisor import Supervisor, start_process
from anabranch.values.errors import LabError


def run(cluster: Cluster, command: Sequence[str], timeout_s: float | None = None) -> int:
    """Run ``command`` as every rank of every host; returns 0, or the exit code of the first rank that failed.

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
            of_all = {
                **(gpus.start_mps(mps_folder) if mps_folder else {}),
                **(shared_gpu_environment(cluster.world_size) if shared else {}),
            }
            port = free_port() if cluster.emulated else MASTER_PORT
            for rank in range(cluster.world_size):
                host, local_rank = hosts[rank // cluster.ranks_per_host], rank % cluster.ranks_per_host
                variables = {
                    **rank_environment(cluster, host, local_rank, hosts[0], port, lab_id),
                    **gpu_environment(cluster, host, local_rank, available),
                    **of_all,
                }
                supervisor.add(start_process(host, rank, command, variables))
            supervisor.wait(timeout_s)
        supervisor.report(timeout_s)
    return supervisor.exit_code


def _check_command(command: Sequence[str]) -> None:
    if LAB_ID in os.environ:
        raise LabError(f"{LAB_ID} is set, so this is a rank of a lab: a lab inside a lab is not supported")
    if not command:
        raise LabError("there is no program to run: give it after --, such as: anabranch lab ... -- python train.py")
    if shutil.which(command[0]) is None:
        raise LabError(f"{command[0]}: no such program on PATH, or it is not executable")
