"""Contestants that shard the model by FSDP2: stock, over all ranks or inside nodes (HSDP), and in planned units."""

import os
from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anabranch.bench.contestants import Contestant, unwrapped
from anabranch.bench.workload import Workload
from anabranch.errors import AnabranchError
from anabranch.integrations.sharding import block_names, shard
from anabranch.integrations.sharding_trial import FoundSharding, find_sharding
from anabranch.sharded import ShardingPlan, step_s

FSDP2, RESHARD, PLANNED, HSDP = "fsdp2", "fsdp2:reshard", "fsdp2:planned", "hsdp"
NAMES: Mapping[str, str] = {
    FSDP2: "FSDP2, a unit per block, kept after forward",
    RESHARD: "FSDP2, a unit per block, freed after forward",
    PLANNED: "FSDP2, planned units",
    HSDP: "HSDP, a unit per block, kept after forward",
}


def check_sharded(ways: Sequence[str]) -> None:
    """ValueError unless each is one of ``NAMES``."""
    for way in ways:
        if way not in NAMES:
            raise ValueError(f"--sharded is {way!r}: expected one of {', '.join(NAMES)}")


def sharded_contestants(workload: Workload, ways: Sequence[str]) -> list[Contestant]:
    """One for each way, on a model of its own that is kept between its turns. Collective.

    Where units are planned, the steps of the other layouts of FSDP2 are predicted, too.
    """
    flat = init_device_mesh(workload.device.type, (dist.get_world_size(),))
    found = _found(workload, flat) if PLANNED in ways else None
    contestants = []
    for way in ways:
        model, step = workload.build()
        names = block_names(model) if found is None else found.default.names  # in the order of forward
        default = ShardingPlan.per_block(names, reshard=way == RESHARD)
        plan = found.plan if found is not None and way == PLANNED else default
        shard(model, _nodes(workload) if way == HSDP else flat, plan)
        predicted_s = step_s(found.trace, plan, found.links) if found is not None and way != HSDP else None
        enter = partial(unwrapped, partial(step, model))
        contestants.append(Contestant(NAMES[way], enter, None, predicted_s))
    return contestants


def _found(workload: Workload, mesh: DeviceMesh) -> FoundSharding:
    _, step = workload.build()

    def build() -> nn.Module:
        return workload.build()[0]

    return find_sharding(build, mesh, step)


def _nodes(workload: Workload) -> DeviceMesh:
    """Nodes, and the ranks in a node, as the launcher says."""
    ranks, inside = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 1 < inside < ranks or ranks % inside:
        raise AnabranchError(
            f"hsdp needs several nodes of several ranks, and there are {ranks} ranks, {inside} in this node "
            "(LOCAL_WORLD_SIZE): run e.g. anabranch lab --hosts 2 --ranks-per-host 2"
        )
    return init_device_mesh(workload.device.type, (ranks // inside, inside), mesh_dim_names=("replicate", "shard"))
