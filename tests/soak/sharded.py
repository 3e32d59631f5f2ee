"""Training with FSDP2 inside each of two nodes, and ``ab.replicate``, or as control stock HSDP, between them."""

from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import anabranch as ab
from soak.training import Training

SHARDS = 2  # ranks in a node


@cache
def two_nodes() -> DeviceMesh:
    """The mesh of this process, which makes its groups once."""
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=names)


class ShardedTraining(Training):
    """One rank's training of a sharded model; ranks with the same shard must have the same weights."""

    def _wrap(self) -> Any:
        mesh = two_nodes()
        inside = mesh if self.control else mesh["shard"]
        for layer in [part for part in self.module.modules() if isinstance(part, nn.Linear)]:
            fully_shard(layer, mesh=inside)
        fully_shard(self.module, mesh=inside)
        self.replication = None if self.control else ab.replicate(self.module, mesh, **self.configuration.ours)
        return self.module

    @property
    def part(self) -> int:
        """The number of this rank's shard."""
        return dist.get_rank() % SHARDS

    def stage(self) -> str:
        """Nothing is tuned."""
        return "between nodes" if not self.control else ""

    def close(self) -> None:
        """The exchange between nodes ends with the model."""
        self.replication = None
