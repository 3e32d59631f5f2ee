"""Ok-Topk: a sparse all-reduce whose traffic stays under 3k entries per rank, however many ranks there are.

    local threshold   about k of this rank's accumulated values pass
    split             what passes goes to the owner of its region: k(P−1)/P entries, regions balanced by count
    global threshold  about k of the sums at all owners pass
    gather            what passes goes to everyone: k(P−1)/P entries, or twice that where owners must first balance

An entry, a value with its position, has 8, 4 or 3 bytes, as ``OkTopk(wire=…)`` says; the published bound of 6k words is
that of 8.

What a rank offered and everyone applied leaves its residual; everything else stays there for a later step. S. Li,
T. Hoefler, *Near-optimal sparse allreduce for distributed deep learning*, PPoPP 2022.

This module alone chooses between the three versions of the exchange:

    exact_exchange.py   the published exchange: counts first, then messages of exactly their size; on CPUs
    fixed_exchange.py   messages of fixed size, in torch operations: on GPUs without Triton, or deterministic
    triton_exchange.py  messages of fixed size, in Triton kernels: on GPUs
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from anabranch.exchange.communicator import Communicator, Communicators
from anabranch.exchange.interface import (
    DTYPES,
    Collective,
    ExchangeFamily,
    Group,
    Steps,
    Traffic,
    record_stream,
    runs_triton,
)
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.residuals.momentum import Velocity
from anabranch.exchange.residuals.store import Residuals
from anabranch.exchange.sparse.exact_exchange import exact_exchange
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.values.kinds.formats import Sizes
from anabranch.values.kinds.names import density_of
from anabranch.values.kinds.options import OkTopk
from anabranch.values.plan import Bucket

Version = Callable[[torch.Tensor, BucketState, Communicator, float, float, OkTopk], Steps]


def exchange(
    buffer: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk,
    velocity: Velocity | None = None,
    version: Version | None = None,
) -> Steps:
    """The exchange of one bucket in one step, as steps for a lane; of velocities, if there is momentum.

    ``density`` is the bucket's final density; ``options`` may start from a higher one. Afterwards ``buffer`` holds,
    with the same bits on every rank, the sum over the ranks of what was offered and applied, divided by ``divisor``,
    and ``state.residual`` what is still to be sent. If any rank's gradient is not finite, all gradients are NaN and all
    residuals as they were. A buffer that is not float32 is exchanged as a float32 copy. ``version``: by default that
    of the buffer's device.
    """
    if buffer.dtype not in DTYPES:
        raise ValueError(
            f"a sparse exchange was given gradients of {buffer.dtype}: expected float32, bfloat16 or float16; send "
            "others dense"
        )
    if len(buffer) == 0:  # a share may be: all ranks of a node still count the same steps
        state.step += 1
        state.fresh = False
        return iter(())
    run = version or version_for(buffer.device, options)
    density = options.density_at(state.step, density)
    if velocity is None and buffer.dtype == torch.float32:
        return run(buffer, state, comm, divisor, density, options)

    def converted() -> Steps:
        gradient = buffer.float()  # the buffer itself, if that is float32
        if velocity is not None:
            velocity.take(gradient)
        yield from run(gradient, state, comm, divisor, density, options)
        if velocity is not None:
            velocity.reset_sent(gradient, state.residual, rounded=options.wire != "fp32")
        if gradient is not buffer:
            record_stream(gradient)
            round_averages(gradient, buffer, state, comm.rank, divisor)

    return converted()


def round_averages(averages: torch.Tensor, buffer: torch.Tensor, state: BucketState, rank: int, divisor: float) -> None:
    """``buffer`` ← the averages, each rounded once to its dtype.

    Of an average that float16 cannot hold, the rest goes to the residual of rank 0 and is sent in a later step. An
    infinite one would be lost, or, if all were put back, be infinite in every step to come.
    """
    largest = torch.finfo(buffer.dtype).max
    fitting = averages.clamp(-largest, largest)
    if rank == 0 and buffer.dtype == torch.float16:
        state.residual.add_(torch.where(averages.isfinite(), averages - fitting, 0.0), alpha=divisor)
    buffer.copy_(fitting)


def version_for(device: torch.device, options: OkTopk) -> Version:
    """The version of the exchange for buckets on this device."""
    if options.exact or device.type != "cuda":
        return exact_exchange
    if options.deterministic or not runs_triton(device):  # kernels add in no fixed order
        return fixed_exchange
    from anabranch.exchange.sparse.triton_exchange import triton_exchange

    return triton_exchange


def probe_of(density: float, options: OkTopk, comms: Communicators) -> Collective:
    """An exchange of noise, for timing: its time depends on how many values are selected, not on which."""
    states: dict[int, BucketState] = {}
    settled = replace(options, start_density=None)  # plans are made for the settled density

    def exchanged(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        if buffer.numel() not in states:
            generator = torch.Generator(buffer.device).manual_seed(dist.get_rank(group))
            buffer.normal_(generator=generator)
            states[buffer.numel()] = BucketState.of(torch.zeros_like(buffer), dist.get_world_size(group))
        return exchange(buffer, states[buffer.numel()], comms[group], divisor, density, settled)

    return exchanged


class OkTopkExchanges(ExchangeFamily):
    """The family of Ok-Topk exchanges of one model, at one density or several: one kind per density.

    A bucket that names "oktopk:0.01" is sent at a density of 1 %. Densities are few, because each is measured.
    """

    def __init__(self, kinds: tuple[str, ...], options: OkTopk, residuals: Residuals) -> None:
        self.kinds = kinds
        self._options = options
        self._residuals = residuals
        self._version = version_for(residuals.device, options)  # all residuals of a model are on one device
        self._comms = Communicators()

    def handles(self, kind: str) -> bool:
        return density_of(kind) is not None

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        state, velocity = self._residuals.bucket_state(bucket, buffer), self._residuals.velocity(bucket)
        density, comm = density_of(bucket.collective), self._comms[group]
        assert density is not None
        return exchange(buffer, state, comm, divisor, density, self._options, velocity, self._version)

    def traffic(self, bucket: Bucket, numel: int, dtype: torch.dtype, ranks: int) -> Traffic:  # noqa: ARG002
        """Bytes of the last exchange: exact exchanges send what was selected, fixed ones all their slots.

        On a GPU how much was selected is not known to the host, so that the planned sizes are given.
        """
        if numel == 0:
            return Traffic(0, 0, 0.0)
        settled, state = density_of(bucket.collective), self._residuals.bucket_state(bucket)
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
