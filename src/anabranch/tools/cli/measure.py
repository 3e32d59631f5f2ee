"""anabranch measure: the network among the ranks that torchrun has started."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Annotated

from typer import Option

from anabranch.tools.cli.output import check_free
from anabranch.tools.cli.ranks import join
from anabranch.tools.cli.shared_options import BackendOption, ForceOption, JsonOption
from anabranch.tools.cli.show import print_saved
from anabranch.values.files import save
from anabranch.values.kinds.names import DENSE, EVERY_ELEMENT, density_of, kind_of, split_wire
from anabranch.values.network import Network
from anabranch.values.plan import MAX_LANES

# torchrun sets these for every rank.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MIB = 1 << 20
MAX_BUDGET_S = 3600.0

OUTPUT = Option("-o", "--output", metavar="FILE", help="Write the network to this file, on rank 0.")
LARGEST = Option(metavar="MIB", help="Largest message in MiB: the largest bucket that a plan may have.")
LANES = Option(metavar="N", min=1, max=MAX_LANES, help="Also send up to this many messages at once.")
COLLECTIVES = Option(
    metavar="C",
    help="Measure this as well as dense, all_gather and reduce_scatter: bf16, int8, int4, oktopk:0.01 or "
    "oktopk:0.01:bf16; may be repeated.",
)


def measure(
    output: Annotated[Path, OUTPUT],
    budget_s: Annotated[float, Option(metavar="S", help="About how many seconds to take.")] = 10.0,
    largest_mb: Annotated[float, LARGEST] = 64.0,
    lanes: Annotated[int, LANES] = 4,
    collective: Annotated[list[str] | None, COLLECTIVES] = None,
    backend: BackendOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what messages cost between ranks: torchrun --nproc-per-node 4 -m anabranch measure -o network.json."""
    torchrun = "torchrun --nproc-per-node 4 -m anabranch measure -o"
    if missing := [name for name in RENDEZVOUS if name not in os.environ]:
        raise ValueError(
            f"{missing[0]} is not set: measure runs on every rank, so start it with torchrun, such as: "
            f"{torchrun} {output}"
        )
    if os.environ["WORLD_SIZE"] == "1":
        raise ValueError(f"there is one rank, so nothing to measure: start more, such as {torchrun} {output}")
    if not 0 < largest_mb <= MIB:
        raise ValueError(f"--largest-mb is {largest_mb:g}: expected a number of MiB above 0, such as 64")
    if not 0 < budget_s <= MAX_BUDGET_S:
        raise ValueError(f"--budget-s is {budget_s:g}: expected seconds above 0 and up to {MAX_BUDGET_S:g}, such as 10")
    leads = os.environ["RANK"] == "0"
    if leads:
        check_free([output], force)
    kinds = list(dict.fromkeys([DENSE, *map(_kind, collective or [])]))
    network, notes = _measured(backend, lanes, round(largest_mb * MIB), budget_s, kinds)
    if leads:
        save(network, output, force)
        print_saved("measure", network, output, as_json, [f"Note: {note}." for note in notes], {"notes": notes})


def _kind(text: str) -> str:
    """The name that plans and prices have for a collective, such as oktopk:0.01 for oktopk:0.010."""
    if text in EVERY_ELEMENT:
        return text
    plain, wire = split_wire(text)
    if (density := density_of(plain)) is None:
        raise ValueError(
            f"--collective is {text!r}: expected one of {', '.join(EVERY_ELEMENT)}, or oktopk with a density in (0, "
            "1], such as oktopk:0.01, oktopk:0.01:bf16 or oktopk:0.01:int8"
        )
    return kind_of(density, wire)


def _measured(
    backend: str | None, lanes: int, largest_nbytes: int, budget_s: float, kinds: Sequence[str]
) -> tuple[Network, list[str]]:
    """The network among all ranks, and notes on noise.

    The process groups exist for as long as this takes.
    """
    import torch.distributed as dist

    from anabranch.exchange.compression import probe_of
    from anabranch.exchange.lanes import RELEASE_GRACE_S, Lanes
    from anabranch.exchange.nodes import find_nodes
    from anabranch.observe.measure import SHARDED, noise_note
    from anabranch.observe.measure import measure as measured

    device = join(backend)
    try:
        everyone = dist.group.WORLD
        assert everyone is not None
        made = Lanes(everyone, device)
        made.grow(lanes)
        if (nodes := find_nodes("auto", everyone).nodes) is not None:
            made.use_nodes(nodes, [0])
        timed = {**{kind: probe_of(kind) for kind in kinds}, **SHARDED}
        network = measured(made.groups, device, largest_nbytes, budget_s, timed, nodes=made[0].nodes)
        made.close()
        return network, [note for note in [noise_note(network)] if note]
    finally:
        dist.destroy_process_group()
        sleep(RELEASE_GRACE_S)
