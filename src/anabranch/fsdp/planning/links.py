"""Links: what a sharded step sends on, and whether that can happen while it computes."""

from dataclasses import dataclass

from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER, Network


@dataclass(frozen=True, slots=True)
class Links:
    """The networks of a sharded step.

    inside     among the ranks that share one copy of the model: gathers and reduce-scatters
    between    among the ranks with the same shard, one in each node: what is averaged between nodes; None for one copy
    kind       of the exchange between nodes, as ``between`` prices it: "dense", "int8", …
    overlaps   messages travel while the rank computes, as on GPUs; on CPUs FSDP2 waits for each of them
    """

    inside: Network
    between: Network | None = None
    kind: str = "dense"
    overlaps: bool = True

    def gather_s(self, nbytes: int) -> float:
        """To give all ranks inside ``nbytes`` of parameters."""
        return self._half_s(ALL_GATHER, nbytes)

    def reduce_s(self, nbytes: int) -> float:
        """To give each rank inside its shard of the sum of ``nbytes`` of gradients."""
        return self._half_s(REDUCE_SCATTER, nbytes)

    def average_s(self, nbytes: int) -> float:
        """To average between nodes this rank's shard of ``nbytes`` of gradients."""
        if self.between is None or not nbytes:
            return 0.0
        return self.between.seconds(self.kind, -(-nbytes // self.inside.world_size))

    def _half_s(self, collective: str, nbytes: int) -> float:
        """As measured; else half an all-reduce, which is a reduce-scatter and a gather."""
        if not nbytes or self.inside.world_size == 1:
            return 0.0
        if collective in self.inside.curves:
            return self.inside.seconds(collective, nbytes)
        return self.inside.allreduce_s(nbytes) / 2
