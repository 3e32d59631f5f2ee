"""Contestants that shard the model by FSDP2, over all ranks or inside nodes (HSDP): stock, planned, compressed."""

import os
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anabranch.exchange.agree import from_all_ranks
from anabranch.exchange.compression import Compress
from anabranch.exchange.groups import default_group
from anabranch.fsdp.planning.modes import PLANNED, ShardingMode, sharding_mode
from anabranch.fsdp.replicate import replicate
from anabranch.fsdp.shard import block_names, shard
from anabranch.fsdp.trial import FoundSharding, find_sharding
from anabranch.tools.bench.compress import compression
from anabranch.tools.bench.contestants import Contestant, unwrapped
from anabranch.tools.bench.workload import Workload
from anabranch.values.errors import AnabranchError
from anabranch.values.kinds.names import DENSE

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def sharded_contestants(workload: Workload, names: Sequence[str]) -> list[Contestant]:
    """One for each of these ways, on a model of its own that is kept between its turns. Collective.

    Where units are planned, steps of the other layouts on the same mesh with the same exchange are predicted, too.
    """
    ways = [sharding_mode(name) for name in names]
    meshes = {nodes: _mesh(workload, nodes) for nodes in sorted({way.nodes for way in ways})}
    found = {
        (way.nodes, way.exchange): _found(workload, way, meshes[way.nodes]) for way in ways if way.units == PLANNED
    }
    return [_contestant(workload, way, meshes[way.nodes], found.get((way.nodes, way.exchange))) for way in ways]


def _contestant(workload: Workload, way: ShardingMode, mesh: DeviceMesh, found: FoundSharding | None) -> Contestant:
    model, step = workload.build()
    plan = way.per_block(block_names(model) if found is None else found.default.names)  # in the order of forward
    if found is not None and way.units == PLANNED:
        plan = found.plan
    if way.exchange == DENSE:
        shard(model, mesh, plan)
    else:
        shard(model, mesh["shard"], plan)
        replicate(model, mesh, compress=_compress(way))
    predicted_s = None if found is None else found.predicted_s(plan)
    return Contestant(way.title, partial(unwrapped, partial(step, model)), None, predicted_s)


def _found(workload: Workload, way: ShardingMode, mesh: DeviceMesh) -> FoundSharding:
    _, step = workload.build()

    def build() -> nn.Module:
        return workload.build()[0]

    return find_sharding(build, mesh, step, compress=_compress(way))


def _compress(way: ShardingMode) -> Compress:
    """What ``ab.replicate`` is given for the exchange of a way."""
    return None if way.exchange == DENSE else compression(way.exchange)


def _mesh(workload: Workload, nodes: bool) -> DeviceMesh:
    return _nodes(workload) if nodes else init_device_mesh(workload.device.type, (dist.get_world_size(),))


def _nodes(workload: Workload) -> DeviceMesh:
    """Nodes, and the ranks in a node, as the launcher says. Collective."""
    own = os.environ.get(LOCAL_WORLD_SIZE, "1")
    said = [text.decode() for text in from_all_ranks(own.encode(), default_group())]
    if other := next((rank for rank, text in enumerate(said) if text != said[0]), None):
        raise AnabranchError(
            f"hsdp needs as many ranks in every node, and {LOCAL_WORLD_SIZE} is {said[0]} on rank 0 and {said[other]} "
            f"on rank {other}: start the same number in each"
        )
    ranks, inside = len(said), int(own) if own.isdecimal() else 0
    if not 1 < inside < ranks or ranks % inside:
        raise AnabranchError(
            f"hsdp needs several nodes of several ranks, and there are {ranks} ranks, {own} in this node "
            f"({LOCAL_WORLD_SIZE}): run e.g. anabranch lab --hosts 2 --ranks-per-host 2"
        )
    return init_device_mesh(workload.device.type, (ranks // inside, inside), mesh_dim_names=("replicate", "shard"))
