"""anabranch lab: run a program on a cluster made on this machine, with links of a chosen rate."""

import math
from typing import Annotated

from typer import Argument, Exit, Option

from anabranch.tools.cli.network_text import RATE_BIT, TIME_S
from anabranch.tools.lab.cluster import MAX_HOSTS, Backend, Cluster, Inside
from anabranch.values.quantities import quantity

UNSHAPED = "unshaped"
DEFAULT_ALPHA = "50us"

EmulateOption = Annotated[bool, Option("--emulate", help="Emulate the links inside the ranks; needs no root.")]


def lab(
    command: Annotated[list[str], Argument(metavar="PROGRAM", help="The program, with its arguments.")],
    rate: Annotated[
        str, Option(help="Rate of all links, such as 10gbit, or one rate per host: 10gbit,10gbit,1gbit; or: unshaped.")
    ],
    hosts: Annotated[int, Option(min=1, max=MAX_HOSTS, help="Machines in the cluster.")] = 4,
    backend: Annotated[Backend, Option(help="With nccl, hosts share this machine's GPUs (through MPS).")] = "gloo",
    ranks_per_host: Annotated[int, Option(min=1, help="Ranks on each host.")] = 1,
    inside: Annotated[
        Inside,
        Option(help="Links among ranks of a host: its loopback, or, with nccl, copies in the GPU's memory."),
    ] = "loopback",
    emulate: EmulateOption = False,
    alpha: Annotated[
        str | None, Option(help=f"Latency of an emulated link, by default {DEFAULT_ALPHA}; only with --emulate.")
    ] = None,
    timeout: Annotated[
        float | None, Option(help="End the program after this many seconds, with exit code 124.")
    ] = None,
) -> None:
    """Run a program on several hosts, all on this machine: anabranch lab --rate 10gbit -- python train.py."""
    from anabranch.tools.lab.launch import run

    if alpha is not None and not emulate:
        raise ValueError("--alpha is the latency of emulated links: it needs --emulate")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"--timeout is {timeout:g}: expected seconds above 0, such as 600")
    rates = [link_rate(part.strip()) for part in rate.split(",")]
    if len(rates) not in (1, hosts):
        raise ValueError(f"--rate has {len(rates)} rates, {rate}: expected one for all hosts, or {hosts}, one for each")
    alpha_s = quantity(alpha or DEFAULT_ALPHA, TIME_S) if emulate else None
    if alpha_s is not None and not math.isfinite(alpha_s):
        raise ValueError(f"--alpha is {alpha!r}: expected a time in s, ms or us, such as {DEFAULT_ALPHA}")
    cluster = Cluster(rates * hosts if len(rates) == 1 else rates, ranks_per_host, backend, alpha_s, inside)
    raise Exit(run(cluster, command, timeout))


def link_rate(text: str) -> float | None:
    """The rate of a link in bit/s; None for an unshaped one."""
    rate = None if text == UNSHAPED else quantity(text, RATE_BIT)
    if rate is not None and not math.isfinite(rate):
        raise ValueError(f"--rate is {text!r}: expected a rate in kbit, mbit or gbit (per second), or {UNSHAPED}")
    return rate
