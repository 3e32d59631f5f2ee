"""Ok-Topk for the buckets of a live model: one kind of exchange per density.

A bucket that names "oktopk:0.01" travels at a density of 1 %. Densities are few, because each is measured.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from anabranch.exchange.communicator import GroupCommunicators
from anabranch.exchange.contracts import Collective, Group, Steps, Traffic
from anabranch.exchange.quantised.exchanges import DTYPES
from anabranch.exchange.residuals.memory import ResidualMemory
from anabranch.exchange.residuals.state import BucketState
from anabranch.exchange.sparse.oktopk import exchange, in_float32
from anabranch.values.kinds.formats import Sizes
from anabranch.values.kinds.names import density_of
from anabranch.values.kinds.options import OkTopk
from anabranch.values.plan import Bucket


def probe_of(density: float, options: OkTopk, comms: GroupCommunicators) -> Collective:
    """An exchange of noise, for timing: its time depends on how many values are selected, not on which."""
    states: dict[int, BucketState] = {}
    settled = replace(options, start_density=None)  # plans are made for the settled density

    def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        if buffer.numel() not in states:
            generator = torch.Generator(buffer.device).manual_seed(dist.get_rank(group))
            buffer.normal_(generator=generator)
            states[buffer.numel()] = BucketState.of(torch.zeros_like(buffer), dist.get_world_size(group))
        return exchange(buffer, states[buffer.numel()], comms.of(group), divisor, density, settled)

    return exchanged


class OkTopkExchanges:
    """The family of Ok-Topk exchanges of one model, at one density or several; ``memory`` keeps their residuals."""

    def __init__(self, kinds: tuple[str, ...], options: OkTopk, memory: ResidualMemory) -> None:
        self.kinds = kinds
        self._options = options
        self._memory = memory
        self._comms = GroupCommunicators()

    def handles(self, kind: str) -> bool:
        return density_of(kind) is not None

    def supports(self, kind: str, dtype: torch.dtype) -> bool:
        return self.handles(kind) and dtype in DTYPES

    def on_side_stream(self, kind: str) -> bool:
        return self.handles(kind)

    def sends_little(self, kind: str) -> bool:
        return self.handles(kind)

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        state = self._memory.begin_exchange(bucket, buffer)
        density = density_of(bucket.collective)
        assert density is not None
        comm = self._comms.of(group)

        def exchanged(gradient: torch.Tensor) -> Steps:
            steps = exchange(gradient, state, comm, divisor, density, self._options)
            return self._memory.momentum.wrap(steps, gradient, state)

        return in_float32(buffer, exchanged, state, comm, divisor)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:  # noqa: ARG002
        """Bytes of the last exchange: exact exchanges send what was selected, fixed ones all their slots.

        On a GPU how much was selected is not known to the host, so that the planned sizes are given.
        """
        settled, state = density_of(bucket.collective), self._memory.bucket_state(bucket)
        assert settled is not None
        density = self._options.density_at(max(0, state.step - 1), settled)
        sizes = Sizes.of(numel, ranks, density, self._options)
        if state.residual.device.type != "cpu":
            nbytes = 2 * (ranks - 1) * sizes.message_nbytes
            return Traffic(nbytes, nbytes, sizes.k / numel)
        offered, applied = min(int(state.offered), sizes.max_selected), int(state.applied)
        entries_nbytes = (offered + applied) * sizes.encoding.entry_nbytes // ranks
        nbytes = (ranks - 1) * (entries_nbytes + 2 * sizes.encoding.table_nbytes)
        return Traffic(nbytes, nbytes, applied / numel)

    def probe(self, kind: str) -> Collective:
        density = density_of(kind)
        assert density is not None
        return probe_of(density, self._options, self._comms)

    def close(self) -> None:
        self._comms.clear()
