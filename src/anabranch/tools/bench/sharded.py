"""Contestants that shard the model by FSDP2, over all ranks or inside nodes (HSDP): stock, planned, compressed."""

import os
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anabranch.exchange.agreement import from_all_ranks
from anabranch.exchange.compression import Compress
from anabranch.exchange.groups import default_group
from anabranch.fsdp.find_sharding import FoundSharding, find_sharding
from anabranch.fsdp.planning.sharding_modes import PLANNED, ShardingMode, sharding_mode
from anabranch.fsdp.replicate import replicate
from anabranch.fsdp.shard import block_names, shard
from anabranch.tools.bench.compress_option import compression
from anabranch.tools.bench.contestants import Contestant
from anabranch.tools.bench.workload import Workload
from anabranch.values.errors import AnabranchError
from anabranch.values.kinds.names import DENSE

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def sharded_contestants(workload: Workload, names: Sequence[str]) -> list[Contestant]:
    """One contestant per sharding mode, on a model of its own that is kept between its turns. Collective.

    Where units are planned, steps of the other layouts on the same mesh with the same exchange are predicted, too.
    """
    modes = [sharding_mode(name) for name in names]
    meshes = {nodes: _mesh(workload, nodes) for nodes in sorted({mode.nodes for mode in modes})}
    found = {
        (mode.nodes, mode.exchange): find_sharding(
            lambda: workload.build()[0], meshes[mode.nodes], workload.build()[1], compress=_compress(mode)
        )
        for mode in modes
        if mode.units == PLANNED
    }
    return [_contestant(workload, mode, meshes[mode.nodes], found.get((mode.nodes, mode.exchange))) for mode in modes]


def _contestant(workload: Workload, mode: ShardingMode, mesh: DeviceMesh, found: FoundSharding | None) -> Contestant:
    model, step = workload.build()
    plan = mode.per_block(block_names(model) if found is None else found.default.names)  # in the order of forward
    if found is not None and mode.units == PLANNED:
        plan = found.plan
    if mode.exchange == DENSE:
        shard(model, mesh, plan)
    else:
        shard(model, mesh["shard"], plan)
        replicate(model, mesh, compress=_compress(mode))
    predicted_s = None if found is None else found.predicted_s(plan)
    return Contestant.ready(mode.title, partial(step, model), None, predicted_s)


def _compress(mode: ShardingMode) -> Compress:
    """The ``compress`` of ``ab.replicate`` for a mode's exchange between nodes."""
    return None if mode.exchange == DENSE else compression(mode.exchange)


def _mesh(workload: Workload, nodes: bool) -> DeviceMesh:
    """All ranks; or nodes, and the ranks in a node, as the launcher says. Collective."""
    if not nodes:
        return init_device_mesh(workload.device.type, (dist.get_world_size(),))
    own = os.environ.get(LOCAL_WORLD_SIZE, "1")
    said = [text.decode() for text in from_all_ranks(own.encode(), default_group())]
    ranks, inside = len(said), int(own) if own.isdecimal() else 0
    if len(set(said)) > 1 or not 1 < inside < ranks or ranks % inside:
        raise AnabranchError(
            "hsdp needs several nodes of several ranks, the same number in each, and the ranks are told "
            f"{LOCAL_WORLD_SIZE} {', '.join(said)}: run e.g. anabranch lab --hosts 2 --ranks-per-host 2"
        )
    return init_device_mesh(workload.device.type, (ranks // inside, inside), mesh_dim_names=("replicate", "shard"))
