"""Run a program on a cluster made on this machine: the lab from its first check to its last word."""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

from anabranch.errors import LabError
from anabranch.lab import mps, preflight
from anabranch.lab.cluster import Cluster
from anabranch.lab.environment import LAB_ID, MASTER_PORT, free_port, gpus_of, variables
from anabranch.lab.failure_report import tell
from anabranch.lab.gpus import gpus
from anabranch.lab.hosts import Host, linked, local
from anabranch.lab.janitor import Janitor, Remains
from anabranch.lab.rank_process import start
from anabranch.lab.signals import Signals
from anabranch.lab.supervisor import Ending, Supervisor


def run(cluster: Cluster, command: Sequence[str], timeout_s: float | None = None) -> int:
    """The exit code of ``command``, run on every host: 0, or that of the first rank that failed.

    124 after ``timeout_s`` seconds, 128 and the signal's number after a signal. Rank 0 prints where this process
    prints; of the others the one that failed first is quoted on stderr. When this returns, or soon after this process
    dies, nothing of the lab is left.
    """
    found = gpus() if cluster.backend == "nccl" else []
    _check(command)
    preflight.check(cluster, found)
    if remark := preflight.note(cluster):
        print(f"anabranch lab: note: {remark}", file=sys.stderr)
    lab_id = secrets.token_hex(8)
    with ExitStack() as stack:
        hosts = local(cluster.hosts) if cluster.emulated else stack.enter_context(linked(cluster.rates_bit_s))
        mps_folder = mps.folder() if preflight.shares(cluster, found) and not mps.running() else None
        places = [host.namespace.descriptor for host in hosts if host.namespace is not None]
        janitor = stack.enter_context(Janitor(Remains(f"{LAB_ID}={lab_id}", mps_folder, places)))
        leads = mps.start(mps_folder) if mps_folder is not None else {}
        port = free_port() if cluster.emulated else MASTER_PORT
        environments = [
            {
                **variables(cluster, host, hosts[0], port, lab_id),
                **gpus_of(host, cluster.ranks_per_host, found),
                **leads,
            }
            for host in hosts
        ]
        return _supervised(cluster, hosts, environments, command, janitor, timeout_s)


def _supervised(
    cluster: Cluster,
    hosts: Sequence[Host],
    environments: Sequence[Mapping[str, str]],
    command: Sequence[str],
    janitor: Janitor,
    timeout_s: float | None,
) -> int:
    """Start all members, wait for their end, see to it, and tell of it."""
    with Signals() as signals, closing(Supervisor(signals)) as watch:
        ending = Ending()
        try:
            for host, environment in zip(hosts, environments, strict=True):
                name = f"{'rank' if cluster.ranks_per_host == 1 else 'host'} {host.index}"
                program = _program(cluster, host, environment, command)
                member = start(host, name, program, environment, loud=host.index == 0)
                member.several = cluster.ranks_per_host > 1
                watch.add(member)
            ending = watch.wait(timeout_s)
        finally:
            janitor.finish()
            tell(ending, watch.members, timeout_s)
            for member in watch.members:
                member.close()
    return ending.code


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
        "--local-addr": host.address,  # else it asks a name server, which a namespace does not have
    }
    flat = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "torch.distributed.run", *flat, "--no-python", *command]


def _check(command: Sequence[str]) -> None:
    if LAB_ID in os.environ:
        raise LabError(f"{LAB_ID} is set, so this is a rank of a lab: a lab inside a lab is not supported")
    if not command:
        raise LabError("there is no program to run: give it after --, such as: anabranch lab ... -- python train.py")
    if shutil.which(command[0]) is None:
        raise LabError(f"{command[0]}: no such program on PATH, or it is not executable")
